"""Without XLA's one preallocated region rows are staged, and results stay right: a growing pool
(XLA_PYTHON_CLIENT_PREALLOCATE=false), and other allocators (XLA_PYTHON_CLIENT_ALLOCATOR)."""

import os

import jax
import ranks

import jax_ep
from jax_ep import testing


def test_rows_are_staged():
    """B57: whoever hands out XLA's memory, no call relies on exporting it, and none leaves an error behind."""
    is_other = os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default") in ("cuda_async", "platform")
    assert is_other or os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false", "tests/gpu/run.py starts this test so"
    on = ranks.mesh()
    size = on.devices.size
    program = {}
    for layout in ("expert", "token"):

        def fn(x, idx, layout=layout):
            recv = jax_ep.dispatch(
                x,
                idx,
                num_experts=4 * size,
                axis_name="ep",
                layout=layout,
                mode="throughput",
                config=ranks.CONFIG,
                implementation="cuda",
            )
            return recv, jax_ep.combine(recv.x, recv.handle)

        program[layout] = testing.on_ranks(fn, on)
    for number in range(6):
        layout = ("expert", "token")[number % 2]
        idx = testing.routing("masked", num_ranks=size, num_tokens=100, num_topk=4, num_experts=4 * size, seed=number)
        x = testing.code_rows(size, 100, 96, "bfloat16")
        recv, out = ranks.stacked(on, program[layout](*ranks.place(on, (x, idx))))
        oracle = testing.oracle_dispatch(x, idx, num_experts=4 * size, layout=layout)
        testing.check_recv(recv, oracle)
        testing.same_bits(out, testing.oracle_combine(oracle, oracle.x))
    stats = jax_ep.debug.stats()
    assert stats["pools_registered"] == 0
    assert stats["staged_calls"] == (stats["calls"] if size > 1 else 0)
    assert jax.local_device_count() == 1
    jax_ep.check()
