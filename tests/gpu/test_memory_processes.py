"""Device memory of a program that has our calls only: all of it is taken while the program compiles.

Runs as the only test of fresh processes. With a compilation cache (JAX_COMPILATION_CACHE_DIR) that already has the
program, the executable must come from there and the same must hold. Resets take none either.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ranks
from jax.sharding import Mesh

import jax_ep
from jax_ep import testing

NUM_TOKENS, NUM_TOPK, HIDDEN = 256, 4, 1024


def free() -> int:
    """Of the GPU that all ranks share, while none of them does anything."""
    ranks.barrier()
    free = ranks.free_device_bytes()
    ranks.barrier()
    return free


def test_all_growth_lies_in_compile():
    on = ranks.mesh()
    size = on.devices.size
    hits = []
    jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if "cache_hit" in event else None)
    cache = jax.config.jax_compilation_cache_dir
    is_cached = bool(cache) and any(pathlib.Path(cache).glob("*"))
    is_cached = all(ranks.exchange(is_cached))

    x = testing.code_rows(size, NUM_TOKENS, HIDDEN, "float32")
    idx = testing.routing("uniform", num_ranks=size, num_tokens=NUM_TOKENS, num_topk=NUM_TOPK, num_experts=4 * size)
    args = ranks.place(on, (x, idx))
    jax.block_until_ready(jax.jit(jnp.sum)(jnp.ones(8)))  # XLA's pool and its own first-run allocations

    def fn(x, idx):
        recv = jax_ep.dispatch(x, idx, num_experts=4 * size, axis_name="ep", mode="throughput", implementation="cuda")
        return jax_ep.combine(recv.x, recv.handle)

    before = free()
    assert jax.eval_shape(testing.on_ranks(fn, on), *args).shape == args[0].shape
    assert free() == before, "B50: eval_shape takes no memory"
    hits.clear()
    program = testing.on_ranks(fn, on).lower(*args).compile()
    assert bool(hits) == is_cached, f"executable from the cache: {bool(hits)}, expected {is_cached}"
    after_compile = free()
    jax.block_until_ready(program(*args))
    after_call_1 = free()
    for _ in range(99):
        out = program(*args)
    jax.block_until_ready(out)
    after_call_100 = free()

    assert after_compile < before, "own memory is taken at compile time"
    taken = {"call 1": after_compile - after_call_1, "calls 2 to 100": after_call_1 - after_call_100}
    assert all(n <= 0 for n in taken.values()), f"bytes taken after compile: {taken}"


def test_attaching_a_second_program_takes_no_memory():
    """Another shape of the same size class shares the arena."""
    if jax_ep.debug.stats()["arenas"] == 0:
        pytest.fail("run the whole file: this test continues the one before")
    on = ranks.mesh()
    size = on.devices.size
    arenas = jax_ep.debug.stats()["symmetric_bytes"]
    args = ranks.place(
        on,
        (
            testing.code_rows(size, 128, HIDDEN, "float32"),
            testing.routing("zipf", num_ranks=size, num_tokens=128, num_topk=NUM_TOPK, num_experts=4 * size),
        ),
    )

    def fn(x, idx):
        recv = jax_ep.dispatch(x, idx, num_experts=4 * size, axis_name="ep", mode="throughput", implementation="cuda")
        return jax_ep.combine(recv.x, recv.handle)

    program = testing.on_ranks(fn, on).lower(*args).compile()
    out = program(*args)
    testing.same_bits(ranks.local(out), ranks.local(args)[0] * NUM_TOPK)
    after = jax_ep.debug.stats()
    assert after["symmetric_bytes"] == arenas
    assert after["attached"] >= 2 and after["setup_ms"]["attach"] / after["attached"] < 1.0
    jax_ep.check()


def test_resets_take_no_memory():
    """B61: programs of two meshes and other sizes are right after each reset, and nothing grows."""
    size = jax.device_count()
    programs = []
    for order, num_tokens in ((1, 128), (-1, 512)):
        on = Mesh(np.array(jax.devices())[::order], ("ep",))
        sizes = dict(num_ranks=size, num_tokens=num_tokens, num_topk=NUM_TOPK, num_experts=4 * size)
        args = testing.code_rows(size, num_tokens, HIDDEN, "float32"), testing.routing("uniform", **sizes)
        args = ranks.place(on, args)

        def fn(x, idx):
            options = dict(axis_name="ep", mode="throughput", implementation="cuda")
            recv = jax_ep.dispatch(x, idx, num_experts=4 * size, **options)
            return jax_ep.combine(recv.x, recv.handle)

        programs.append((testing.on_ranks(fn, on).lower(*args).compile(), args))
    left = []
    for _ in range(4):
        for program, args in programs:
            testing.same_bits(ranks.local(program(*args)), ranks.local(args)[0] * NUM_TOPK)
        left.append((free(), jax_ep.debug.stats()["symmetric_bytes"]))
        jax_ep.reset(timeout_s=60)
        jax_ep.reset(timeout_s=60)
    assert len(set(left)) == 1, f"(free bytes, symmetric bytes) before each reset: {left}"
    jax_ep.check()
