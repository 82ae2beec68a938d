"""What needs a process of its own: more ranks than the suite's eight devices, threads, and executables of another run.

Covers 16 and 32 ranks, two threads that run programs of one group at the same time, and the persistent compilation
cache with the mesh in other orders. tests/multi has groups that span processes.
"""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from jax_ep import testing

HERE = pathlib.Path(__file__).parent
pytestmark = pytest.mark.multiprocess


def run(script: str, devices: int, *args: str, **env: str) -> str:
    """Standard output of a Python program on `devices` virtual CPU devices; it ends within two minutes or fails."""
    start = f"import sys; sys.path.insert(0, {str(HERE)!r})\n"
    flags = f"--xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, "-c", start + script, *args],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, **env},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


MANY_RANKS = """
from exchange_cases import ExchangeCases, Sizes
cases = ExchangeCases()
cases.implementation = "xla"
kinds = sys.argv[2:]
sizes = {
    "16": Sizes(16, 32, num_tokens=3, num_topk=4, hidden=8, capacity=16, expert_alignment=4),
    "32": Sizes(32, 32, num_tokens=2, num_topk=3, hidden=8, layout="token"),
}[sys.argv[1]]
for kind in kinds:
    cases.run(sizes, cases.routing(kind, sizes))
print(len(kinds), "routings")
"""


@pytest.mark.parametrize("num_ranks", [16, 32])
def test_many_ranks(num_ranks):
    """Every operation and gradient on larger groups, against the oracle: with dropping (16), one expert a rank (32)."""
    kinds = ("zipf", "masked", "one_rank", "empty_ranks", "invalid")
    assert run(MANY_RANKS, num_ranks, str(num_ranks), *kinds) == "5 routings\n"


THREADS = """
import threading
import jax, numpy as np, jax_ep
from jax_ep import testing

mesh = jax.sharding.Mesh(np.array(jax.devices()), ("ep",))
problems = []

def work(layout, num_topk, start):
    x = testing.random_rows((4, 5 + num_topk, 8))
    idx = testing.routing("zipf", num_ranks=4, num_tokens=5 + num_topk, num_topk=num_topk, num_experts=8)
    def layer(x, idx):
        recv = jax_ep.dispatch(x, idx, num_experts=8, axis_name="ep", layout=layout)
        return jax_ep.combine(recv.x, recv.handle)
    oracle = testing.oracle_dispatch(x, idx, num_experts=8, layout=layout)
    expected = testing.oracle_combine(oracle, oracle.x)
    try:
        start.wait()
        program = testing.on_ranks(layer, mesh)  # compiled by both threads at the same time, too
        for _ in range(100):
            testing.same_bits(program(x, idx), expected)
    except BaseException as problem:
        problems.append(repr(problem))

start = threading.Barrier(2)
threads = [threading.Thread(target=work, args=(*args, start)) for args in (("expert", 2), ("token", 3))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not problems, problems
print("equal")
"""


def test_programs_of_two_threads():
    """Two programs of one group, compiled and run by two threads at the same time: each result is right."""
    assert run(THREADS, 4) == "equal\n"


CACHED = """
import json, jax, numpy as np, jax_ep
from jax_ep import testing
order = [int(i) for i in sys.argv[1].split(",")]
mesh = jax.sharding.Mesh(np.array(jax.devices())[order], ("ep",))
x = testing.code_rows(3, 5, 8)
idx = testing.routing("zipf", num_ranks=3, num_tokens=5, num_topk=2, num_experts=6)
def layer(x, idx):
    recv = jax_ep.dispatch(x, idx, num_experts=6, axis_name="ep")
    scale = 1 + jax.lax.axis_index("ep").astype(x.dtype)  # tells which rank computed
    return jax_ep.combine(recv.x * scale, recv.handle)
out = testing.on_ranks(layer, mesh)(x, idx)
assert [s.device.id for s in sorted(out.addressable_shards, key=lambda s: s.index[0].start)] == order
print(json.dumps(np.asarray(out).tolist()))
"""


def test_compilation_cache_with_the_mesh_in_another_order(tmp_path):
    """B52, B54: whatever the cache holds from other orders of the same devices, rank is the position in this mesh."""
    env = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    x = testing.code_rows(3, 5, 8)
    idx = testing.routing("zipf", num_ranks=3, num_tokens=5, num_topk=2, num_experts=6)
    oracle = testing.oracle_dispatch(x, idx, num_experts=6)
    expected = testing.oracle_combine(oracle, oracle.x * np.array([1, 2, 3], np.float32)[:, None, None])
    for order in ("0,1,2", "2,1,0", "1,2,0", "0,1,2"):
        out = np.array(json.loads(run(CACHED, 3, order, **env)), np.float32)
        testing.same_bits(out, expected, f"devices in order {order}")
    assert any(path.name.endswith("-cache") for path in tmp_path.iterdir())
