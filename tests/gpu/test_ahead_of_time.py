"""XLA:GPU compiles a MoE block for H100s that are not there: what is in the program, beside our calls.

Needs the wheels of JAX's CUDA plugin and the extension, no GPU and no driver:
`python -m pytest --device gpu tests/gpu/test_ahead_of_time.py`. Each program is compiled in a process of its own.
"""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("jax_ep._cuda", reason="needs the CUDA extension")
if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
    pytest.skip("needs jax's CUDA plugin", allow_module_level=True)

NUM_RANKS, NUM_TOKENS, NUM_TOPK, HIDDEN = 4, 64, 4, 512
CAPACITY = 1024  # unlike any other size in the program

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0"
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 1 patch: 1 } device_description_str: "NVIDIA H100 80GB HBM3"
"""

HEADER = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import jax_ep

h100, ranks, tokens, topk, hidden, capacity, layout = json.loads(sys.argv[1])
# Each device is a process of its own: calls may be recorded, and are by default.
topology = topologies.get_topology_desc("", platform="cuda", target_config=h100, topology=f"1x{ranks}x1")
mesh = Mesh(np.array(topology.devices), ("ep",))
settings = dict(num_experts=4 * ranks, axis_name="ep", layout=layout, capacity=capacity,
                expert_alignment=8 if layout == "expert" else 1, implementation="cuda")

def of(shape, dtype):
    return jax.ShapeDtypeStruct((ranks * tokens, *shape), dtype, sharding=NamedSharding(mesh, P("ep")))

args = of((hidden,), jnp.bfloat16), of((topk,), jnp.int32), of((topk,), jnp.float32)

def run(fn, specs):
    return jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=P("ep"))

def show(step, *args):
    print("HLO" + json.dumps(step.trace(*args).lower(lowering_platforms=("cuda",)).compile().as_text()))
"""

PROGRAM = """
def moe(x, idx, w):
    recv = jax_ep.dispatch(x, idx, w, **settings)
    return jax_ep.combine(recv.x * 2, recv.handle, weights=recv.weights if layout == "expert" else None)

def loss(x, idx, w):
    out = run(moe, P("ep"))(x, idx, w)
    return (out.astype(jnp.float32) ** 2).sum()

show(jax.jit(jax.grad(loss, (0, 2) if layout == "expert" else 0)), *args)
"""

# The sandwich of docs/concepts.md: three products each belong between a start and its done.
SANDWICH = """
def between(pending, x, weights):
    pending, x = lax.optimization_barrier((pending, x))
    for w in weights:
        x = jnp.dot(x, w)
    return lax.optimization_barrier((pending, x))

def moe(weights, x, idx, w):
    pending = jax_ep.dispatch_start(x, idx, w, **settings)
    pending, shared = between(pending, x, weights[:3])
    recv = jax_ep.dispatch_done(pending)
    pending = jax_ep.combine_start(recv.x * 2, recv.handle, weights=recv.weights)
    pending, shared = between(pending, shared, weights[3:])
    return shared + jax_ep.combine_done(pending)

weights = jax.ShapeDtypeStruct((6, hidden, hidden), jnp.bfloat16, sharding=NamedSharding(mesh, P()))
show(jax.jit(run(moe, (P(), P("ep"), P("ep"), P("ep")))), weights, *args)
"""


# Results that a scan keeps for the backward pass, in arrays of all turns, and that others use as well.
SCAN = """
def layer(x, idx, w, scale):
    if IS_SPLIT:
        recv = jax_ep.dispatch_done(jax_ep.dispatch_start(x, idx, w, **settings))
        return jax_ep.combine_done(jax_ep.combine_start(recv.x * scale, recv.handle, weights=recv.weights))
    recv = jax_ep.dispatch(x, idx, w, **settings)
    return jax_ep.combine(recv.x * scale, recv.handle, weights=recv.weights)

def loss(x, idx, w):
    scales = jnp.linspace(0.5, 1, 12, dtype=x.dtype)
    out = lax.scan(lambda x, scale: (layer(x, idx, w, scale), None), x, scales)[0]
    return jnp.sum(out.astype(jnp.float32) ** 2)

show(jax.jit(run(jax.grad(loss, (0, 2)), P("ep"))), *args)
"""

# examples/overlap.py, which checks this by itself where it runs.
EXAMPLE = """
sys.path.insert(0, EXAMPLES)
import overlap

args = overlap.parse_args("--tokens 64 --hidden 256 --ffn 128 --layers 2 --implementation cuda".split())
program = overlap.stack(overlap.Layer(args, ranks).overlapped, args.layers, mesh)
shapes = jax.eval_shape(lambda: overlap.make_operands(args, ranks, jnp.bfloat16))
place = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
hlo = program.trace(*jax.tree.map(place, shapes, overlap.SPECS)).lower(lowering_platforms=("cuda",)).compile().as_text()
overlap.show_schedule(overlap.schedule(hlo), args.layers, lambda line: print("HLO" + json.dumps(line)))
"""


WINDOWS = """
def loss(x, idx, w):
    out = jax_ep.windowed(lambda scale, recv: recv.x * scale, jnp.bfloat16(2), x, idx, w, **settings)
    return jnp.sum(out.astype(jnp.float32) ** 2)

show(jax.jit(run(jax.grad(loss, (0, 2)), P("ep"))), *args)
"""


# Layers as decoding has them.
GRAPHS = """
settings["config"] = jax_ep.Config(command_buffers=IS_RECORDED)

def moe(w, x, idx):
    for mode in ("throughput", "latency", "halves"):
        if mode == "halves":
            recv = jax_ep.dispatch_done(jax_ep.dispatch_start(x, idx, **settings))
            x = jax_ep.combine_done(jax_ep.combine_start(jnp.tanh(recv.x @ w), recv.handle))
        else:
            recv = jax_ep.dispatch(x, idx, mode=mode, **settings)
            x = jax_ep.combine(jnp.tanh(recv.x @ w), recv.handle)
    return x

weights = jax.ShapeDtypeStruct((hidden, hidden), jnp.bfloat16, sharding=NamedSharding(mesh, P()))
show(jax.jit(run(moe, (P(), P("ep"), P("ep")))), weights, *args[:2])
"""


def compiled(program, layout, flags=""):
    sizes = [H100, NUM_RANKS, NUM_TOKENS, NUM_TOPK, HIDDEN, CAPACITY, layout]
    env = os.environ | {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}  # there is no driver to ask
    env.pop("JAX_PLATFORMS", None)
    env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} {flags}".strip()
    command = [sys.executable, "-c", HEADER + program, json.dumps(sizes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    lines = [line for line in done.stdout.splitlines() if line.startswith("HLO")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[0][3:])


@pytest.fixture(scope="module", params=["expert", "token"])
def layout_and_hlo(request):
    return request.param, compiled(PROGRAM, request.param)


def test_our_calls_and_no_collective(layout_and_hlo):
    """Forward: dispatch, combine; backward: one redispatch, one combine: the routing is not exchanged again."""
    _, hlo = layout_and_hlo
    ours = re.findall(r'custom_call_target="jax_ep_(\w+)_graph"', hlo)
    assert sorted(ours) == ["combine", "combine", "dispatch", "redispatch"] and hlo.count('target="jax_ep_') == 4
    assert not re.findall(r"\b(?:all-\w+|collective-\w+|reduce-scatter|ragged-\w+)", hlo)


def test_rows_are_not_copied(layout_and_hlo):
    """Nothing but the user's arithmetic touches the rows: no copy, transpose or sort of the receive array."""
    _, hlo = layout_and_hlo
    rows = rf"bf16\[{CAPACITY},{HIDDEN}\]"
    assert re.search(rows, hlo)
    assert not re.findall(rf"= {rows}\S* (?:copy|transpose|copy-start)\(", hlo)
    assert not re.findall(r" sort\(", hlo)


@pytest.mark.parametrize("is_split", [False, True])
def test_calls_of_a_scan_run_once(is_split):
    """XLA of jax 0.11.2 made two of a dispatch and of a done, before a barrier stood behind them (lowering.py)."""
    hlo = compiled(f"IS_SPLIT = {is_split}" + SCAN, "expert")
    forward = (
        ["dispatch_start", "dispatch_done", "combine_start", "combine_done"] if is_split else ["dispatch", "combine"]
    )
    ours = re.findall(r'custom_call_target="jax_ep_(\w+)_graph"', hlo)
    assert sorted(ours) == sorted([*forward, "redispatch", "combine"])


def test_windows_are_loops_of_our_calls():
    """Two loops, forward and backward, whose number of turns comes from a dispatch: ranks agree on it by no collective
    of XLA's. The backward one dispatches again, so nothing of a window is kept."""
    hlo = compiled(WINDOWS, "expert")
    ours = re.findall(r'custom_call_target="jax_ep_(\w+?)(?:_graph)?"', hlo)
    assert len(re.findall(r" while\(", hlo)) >= 2 and ours.count("dispatch") == 2
    assert set(ours) == {"dispatch", "redispatch", "combine"} and ours.count("redispatch") == 1
    assert not re.findall(r"\b(?:all-\w+|collective-\w+|reduce-scatter|ragged-\w+)", hlo)


def test_what_runs_between_start_and_done():
    """The schedule keeps the products between the barriers between start and done, in both directions."""
    hlo = compiled(SANDWICH, "expert")
    assert "is_scheduled=true" in hlo.splitlines()[0]
    entry = hlo[hlo.index("\nENTRY ") :]
    # Products are calls of cuBLAS or fusions of their own, as XLA likes.
    calls = re.findall(
        r'^  %.*(?:custom_call_target="(?:jax_ep_|__)(\w+?)(?:_graph)?["$]|kind=kCustom, calls=%\S*?(gemm))',
        entry,
        re.M,
    )
    order = [re.sub("cublas.*", "gemm", name or product) for name, product in calls]
    expected = ["dispatch_start", *["gemm"] * 3, "dispatch_done", "combine_start", *["gemm"] * 3, "combine_done"]
    assert order == expected


@pytest.mark.parametrize("wanted", [None, True, False], ids=["default", "recorded", "launched"])
def test_what_xla_records(tmp_path, wanted):
    """All calls of both modes and the halves lie in one command buffer, or none; by XLA's own settings."""
    is_recorded = wanted is not False
    hlo = compiled(f"IS_RECORDED = {wanted}" + GRAPHS, "expert", f"--xla_dump_to={tmp_path}")
    assert len(re.findall(r'custom_call_target="jax_ep_\w+"', hlo)) == 8
    last = sorted(tmp_path.glob("*thunk_sequence*.txt"))[-1].read_text()  # "..._after_thunk_passes", if any changed it
    buffers = re.split(r"^\d+: (?=kCommandBuffer)", last, flags=re.M)[1:]
    inside = [len(re.findall(r"^ +\d+: kCustomCall", buffer, re.M)) for buffer in buffers]
    assert (max(inside) if inside else 0) >= (8 if is_recorded else 0)
    assert sum(inside) == 0 or is_recorded


def test_schedule_of_the_example():
    """Halves of every exchange of both micro-batches with their products in between, layer after layer."""
    pytest.importorskip("flax")
    examples = str(pathlib.Path(__file__).parents[2] / "examples")
    assert compiled(f"EXAMPLES = {examples!r}" + EXAMPLE, "expert").split(": ") == [
        "  dispatch a",
        "dispatch_start gemm gemm dispatch_done",
    ]
