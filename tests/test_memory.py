"""buffer_bytes: against the results that dispatch and combine really have, the lowered calls, and cuda/layout.h.

The arena's arithmetic is compared with a program compiled from the header, and with the extension where it is built.
"""

import doctest
import math
import pathlib
import re
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchange_cases import split_combine, split_dispatch

import jax_ep
from jax_ep import _ffi, bootstrap, lowering, memory, testing

W1 = dict(num_tokens=4096, hidden=7168, num_topk=8, num_experts=256, num_ranks=8)
SMALL = dict(num_tokens=5, hidden=16, num_topk=3, num_experts=6, num_ranks=2)
# num_ranks, num_experts, row_bytes, num_topk, staging_bytes, num_tokens, num_slots (0: throughput mode), num_nodes
CALLS = [
    (8, 256, 14336, 8, 16 << 20, 0, 0, 1),  # W1
    (1, 1, 16, 1, 1, 0, 0, 1),  # the least
    (2, 4, 64, 2, 4096, 0, 0, 1),
    (3, 9, 32, 3, 100, 0, 0, 1),  # staging grows until a token fits
    (8, 247, 14336, 8, 1 << 20, 0, 0, 1),  # 256 words exactly
    (8, 248, 14336, 8, 1 << 20, 0, 0, 1),  # one more
    (16, 4096, 57344, 32, 3 << 20, 0, 0, 1),
    (17, 34, 16, 1, 1000, 0, 0, 1),  # flags of 17 ranks take two units
    (64, 8192, 1 << 20, 32, 16 << 20, 0, 0, 1),
    (8, 256, 14336, 8, 16 << 20, 128, 2, 1),  # W2
    (8, 256, 7168 + 224, 8, 16 << 20, 128, 4, 1),  # FP8 rows, split
    (1, 1, 16, 1, 1, 0, 2, 1),  # no tokens
    (3, 9, 32, 3, 100, 1, 6, 1),
    (3, 9, 32, 3, 100, 10000, 2, 1),
    (16, 4096, 57344, 32, 3 << 20, 4096, 128, 1),  # beyond 32 bits
    (8, 256, 14336, 8, 64 << 20, 0, 0, 2),  # W1, two nodes of four
    (8, 256, 7168 + 224, 8, 64 << 20, 0, 0, 4),
    (2, 2, 16, 1, 1, 0, 0, 2),  # the least: one token for each block
    (64, 8192, 1 << 20, 32, 16 << 20, 0, 0, 8),
    (32, 64, 144, 3, 100, 0, 0, 32),
    (8, 256, 14336, 8, 1, 128, 2, 2),  # W2, two nodes of four
    (8, 256, 7168 + 224, 8, 1, 128, 4, 4),
    (8, 256, 14336, 8, 1, 72, 2, 1),  # one node fits into less than ...
    (8, 256, 14336, 8, 1, 72, 2, 2),  # ... two do
    (2, 2, 16, 1, 1, 0, 2, 2),
    (32, 64, 144, 3, 100, 33, 6, 32),
]


def test_example():
    """The worked example of the docstring."""
    (example,) = doctest.DocTestFinder().find(jax_ep.buffer_bytes, "buffer_bytes", globs={})
    assert example.examples and doctest.DocTestRunner().run(example).failed == 0


def test_own_memory_of_w1():
    """64 MiB is the limit for W1 at R = 8, whatever the layout."""
    for layout in ("expert", "token", "batched"):
        assert jax_ep.buffer_bytes(**W1, layout=layout, capacity=8192).arena <= 64 << 20


def mirrored(call):
    shape = shape_of(memory, call)
    return [*shape, memory.arena_bytes(call[0], *shape)]


def shape_of(module, call):
    num_ranks, *sizes, staging_bytes, num_tokens, num_slots, num_nodes = call
    if num_slots:
        return module.latency_arena_shape(num_ranks, num_nodes, *sizes, num_tokens, num_slots)
    if num_nodes > 1:
        return module.node_arena_shape(num_ranks, num_nodes, *sizes, staging_bytes)
    return module.arena_shape(num_ranks, *sizes, staging_bytes)


def test_arena_of_the_header(tmp_path):
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs nvcc's host compiler")
    program, checkout = tmp_path / "layout_test", pathlib.Path(__file__).parent.parent
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-I."]
    subprocess.run(
        [compiler, *flags, "cuda/tests/layout_test.cc", "-o", program], cwd=checkout, check=True, timeout=300
    )
    text = "".join(" ".join(map(str, call)) + "\n" for call in CALLS)
    out = subprocess.run([program], input=text, capture_output=True, text=True, timeout=60, check=True).stdout
    assert [[int(n) for n in line.split()] for line in out.splitlines()] == [mirrored(call) for call in CALLS]


@pytest.mark.skipif(bool(_ffi.available()), reason="needs the CUDA extension")
@pytest.mark.parametrize("call", CALLS)
def test_arena_of_the_extension(call):
    shape = shape_of(_ffi, call)
    assert [*shape, _ffi.module().arena_bytes(call[0], *shape)] == mirrored(call)


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": "expert", "expert_alignment": 4},
        {"layout": "expert", "capacity": 24, "dtype": jnp.float32},
        {"layout": "token"},
        {"layout": "token", "capacity": 7},
        {"layout": "batched", "capacity": 6, "dtype": jnp.float16},
        {"layout": "expert", "hidden": 256, "quantize": "fp8"},
        {"layout": "token", "hidden": 256, "quantize": "fp8_ue8m0"},
        {"layout": "token", "hidden": 128, "quantize": "fp8_wire"},
        {"layout": "expert", "hidden": 256, "quantize": "fp8", "mode": "latency"},
        {"layout": "batched", "capacity": 6, "mode": "latency"},
        {"layout": "token", "hidden": 128, "quantize": "fp8_wire", "mode": "latency"},
        {"layout": "expert", "hidden": 256, "quantize": "fp8_ue8m0", "is_split": True},
        {"layout": "token", "config": jax_ep.Config(max_pending=5), "mode": "latency", "is_split": True},
        {"layout": "expert", "config": jax_ep.Config(max_pending=1), "is_split": True},
    ],
    ids=str,
)
def test_results_of_real_calls(make_mesh, monkeypatch, changes):
    """What a program's dispatch and combine return on a rank, and what the lowered calls take beside that."""
    sizes = {**SMALL, **changes}
    taken = jax_ep.buffer_bytes(**sizes)
    num_ranks, dtype = sizes["num_ranks"], sizes.get("dtype", jnp.bfloat16)
    kwargs = {k: v for k, v in changes.items() if k not in ("dtype", "hidden", "is_split")}
    is_split = changes.get("is_split", False)
    dispatch, combine = (split_dispatch, split_combine) if is_split else (jax_ep.dispatch, jax_ep.combine)

    def layer(x, idx, w):
        recv = dispatch(x, idx, w, num_experts=sizes["num_experts"], axis_name="ep", **kwargs)
        rows = recv.x.dequantize() if isinstance(recv.x, jax_ep.Quantized) else recv.x
        return recv, combine(rows, recv.handle)

    shape = (num_ranks, sizes["num_tokens"], sizes["num_topk"])
    args = np.zeros((*shape[:2], sizes["hidden"]), dtype), np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    program = testing.on_ranks(layer, make_mesh(num_ranks))
    recv, out = program(*args)
    per_rank = lambda *arrays: sum(np.asarray(a).nbytes for a in arrays) // num_ranks
    parts = (recv.x.data, recv.x.scale) if isinstance(recv.x, jax_ep.Quantized) else (recv.x,)
    assert taken.recv == per_rank(*parts, recv.weights)
    assert taken.handle == per_rank(*recv.handle.arrays, recv.handle.stats)
    assert taken.out == per_rank(out)
    assert taken.total == taken.arena + taken.recv + taken.handle + taken.scratch + taken.out

    asked = set()

    def spy(shape_of):
        def arena_shape(*call):
            asked.add((call[0], *shape_of(*call)))
            return shape_of(*call)

        return arena_shape

    monkeypatch.setattr(bootstrap, "can_use_cuda", lambda groups, config=None, num_nodes=1: "")
    monkeypatch.setattr(bootstrap, "prepare", lambda groups, config=None, num_nodes=1: None)
    monkeypatch.setattr(bootstrap, "bind", lambda *call_site: None)
    monkeypatch.setattr(lowering._ffi, "arena_shape", spy(memory.arena_shape))
    monkeypatch.setattr(lowering._ffi, "latency_arena_shape", spy(memory.latency_arena_shape))
    monkeypatch.setattr(lowering._ffi, "node_arena_shape", spy(memory.node_arena_shape))
    monkeypatch.setattr(lowering._ffi, "protocol", lambda: 1)
    text = program.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert taken.arena == sum(memory.arena_bytes(*shape) for shape in asked)
    suffix = "_done" if is_split else "_latency" if changes.get("mode") == "latency" else ""
    _, _, *sums = result_bytes(text, f"jax_ep_combine{suffix}")  # that of no public result
    wanted = sum(sums)
    if changes.get("quantize") == "fp8_wire":
        wanted = max(wanted, sum(result_bytes(text, f"jax_ep_dispatch{suffix}")[:2]))
    assert taken.scratch == wanted


def result_bytes(text, target):
    """Bytes of each result of the only call of `target`."""
    (results,) = re.findall(rf"custom_call @{target}\(.*-> \((.*)\)", text)
    bytes_of = {"f32": 4, "i32": 4, "bf16": 2, "f16": 2, "ui8": 1, "f8E4M3FN": 1, "f8E8M0FNU": 1}
    shapes = [t.split("x") for t in re.findall(r"tensor<([^>]*)>", results)]
    return [math.prod(map(int, dims)) * bytes_of[kind] for *dims, kind in shapes]


def test_two_arenas_where_rows_differ_much():
    """A window too small for the larger row makes a size class of its own."""
    config = jax_ep.Config(staging_bytes=1 << 10)
    one = jax_ep.buffer_bytes(**SMALL, config=config).arena
    assert one == memory.arena_bytes(2, *memory.arena_shape(2, 6, 32, 3, 1 << 10))
    assert jax_ep.buffer_bytes(**{**SMALL, "hidden": 4096}, config=config).arena > one


def test_more_ranks_than_devices(make_mesh):
    """Nothing runs: any group can be asked about, also under another mesh and inside a shard_map."""
    assert len(jax.devices()) < 64
    with jax.set_mesh(make_mesh(2, axis_names=("ep",))):
        big = jax_ep.buffer_bytes(**{**W1, "num_ranks": 64}, layout="token")
    assert big.recv == 64 * 4096 * (7168 * 2 + 8 * 4)
    inside = testing.on_ranks(lambda x: jnp.zeros(jax_ep.buffer_bytes(**SMALL).out), make_mesh(4))
    assert jax.eval_shape(inside, np.zeros(4)).shape == (4, 5 * 16 * 2)


def test_nothing_wraps():
    """B26: bytes beyond 2**31 and 2**32 are exact."""
    taken = jax_ep.buffer_bytes(**{**W1, "num_ranks": 64})
    assert taken.recv == 64 * 4096 * 8 * (7168 * 2 + 4) > 2**34
    assert taken.scratch == 64 * 4096 * 7168 * 2 and type(taken.total) is int


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"num_ranks": 0}, ValueError, "num_ranks=0"),
        ({"num_experts": 7}, ValueError, "num_experts=7"),
        ({"hidden": 3}, ValueError, "16 bytes"),
        ({"dtype": jnp.int32}, TypeError, "int32"),
        ({"capacity": 10, "expert_alignment": 4}, ValueError, "capacity=12"),
        ({"layout": "rows"}, ValueError, "'rows'"),
        ({"mode": "auto"}, ValueError, "ask about both"),
        ({"config": {}}, TypeError, "jax_ep.Config"),
    ],
)
def test_mistakes(changes, error, text):
    with pytest.raises(error, match=text):
        jax_ep.buffer_bytes(**{**SMALL, **changes})
