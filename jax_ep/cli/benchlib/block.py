"""W8: where the time of a Mixture-of-Experts block of `jax_ep.nn` goes, forward and backward together.

`python -m jax_ep.cli.benchlib.block PLAN_AS_JSON` on each rank, or `run(plan)` in this process; `block_parts` says what
is timed and how.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_ep
from jax_ep import grouped_gemm, nn, shapes
from jax_ep import layout as layout_lib
from jax_ep.cli.benchlib import block_parts, measure, report, timing
from jax_ep.cli.benchlib.block_plan import Block, BlockPlan

AXIS = measure.AXIS
PARTS = ("router", "dispatch", "experts", "combine", "rest")

HEADER = (
    f"{'workload':<10}{'implementation':<16}{'experts':<20}{'capacity':<16}"
    + "".join(f"{part:>10}" for part in (*PARTS, "block", "rest %", "statistics"))
    + "   (us, forward and backward)"
)


def format_row(row: dict) -> str:
    """One line of the table."""
    capacity = f"{row['capacity']} {row['capacity_rows']}"
    start = f"{row['workload']:<10}{row['implementation']:<16}{row['experts']:<20}{capacity:<16}"
    if row["error"]:
        return f"{start}  {row['error']}"
    us = row["us"]
    figures = (*(us[part] for part in (*PARTS, "block")), row["rest_percent"], us["statistics"])
    return start + "".join(f"{'-':>10}" if figure is None else f"{figure:>10.1f}" for figure in figures)


def run(plan: BlockPlan) -> int:
    """Measures on all devices of the program; process 0 prints, writes and draws."""
    is_first = jax.process_index() == 0

    def say(line: str) -> None:
        if is_first:
            print(line, flush=True)

    def show(row: dict) -> None:
        say(format_row(row))
        result["blocks"].append(row)
        if is_first and plan.json_path:  # a run that is cut short leaves what it has
            pathlib.Path(plan.json_path).write_text(json.dumps(result, indent=1))

    result = report.environment() | {"num_ranks": jax.device_count(), "blocks": []}
    say(HEADER)
    breakdown(plan, measure.mesh(), show, say)
    if is_first and plan.png_path:
        draw(result, plan.png_path)
    return 0


def compiler(over: Mesh) -> Callable:
    """Wraps a per-rank function in shard_map and jit; every array is split along its first axis."""

    def compile_(fn, donate_argnums=()):
        spec = PartitionSpec(AXIS)
        return jax.jit(jax.shard_map(fn, mesh=over, in_specs=spec, out_specs=spec), donate_argnums=donate_argnums)

    return compile_


def breakdown(plan: BlockPlan, over: Mesh, show_row: Callable[[dict], None], say: Callable[[str], None]) -> None:
    """Measures all rows of the table; each is shown as soon as it is there."""
    num_ranks, block = over.devices.size, plan.block
    num_tokens = plan.num_tokens or max(block.total_tokens // num_ranks, 1)
    implementations = plan.implementations or (("cuda", "xla") if jax.default_backend() == "gpu" else ("xla",))
    compile_ = compiler(over)
    base = nn.MoEConfig(block.hidden, block.ffn, block.num_experts, block.num_topk, axis_name=AXIS)
    operands = _operands(block, num_tokens, over, compile_)
    loads = _loads(base, operands, compile_, num_ranks)
    token = jax.device_put(np.zeros(num_ranks, np.float32), NamedSharding(over, PartitionSpec(AXIS)))
    clock = block_parts.Clock(lambda fn: compile_(fn, donate_argnums=1), operands, token, plan.num_calls, plan.repeats)
    _, no_sums = measure.attempt(lambda: jax.block_until_ready(compile_(lambda a: a + lax.psum(a, AXIS))(token)))
    if no_sums:  # NCCL refuses some ways in which ranks share a GPU
        say(f"no statistics, as XLA's own collectives do not work between these ranks: {no_sums}")
    shared: dict = {}  # shared: parts without communication, which implementations have in common
    for name in implementations:
        for layout, choice in ((la, ch) for la in plan.layouts for ch in plan.capacities):
            config = dataclasses.replace(
                base,
                layout=layout,
                capacity=_capacity(loads, layout, choice, num_tokens, block.num_topk),
                implementation=name,
                config=jax_ep.Config(num_sms=plan.num_sms),
            )
            is_slow = name == "xla" and jax.default_backend() == "gpu"
            measured, problem = measure.attempt(
                partial(_measure, clock, compile_, config, is_slow, not no_sums, shared)
            )
            row = {"workload": block.name, "implementation": name, "layout": layout, "experts": _experts(layout, block)}
            row |= {"capacity": choice, "capacity_rows": config.capacity, "num_tokens": num_tokens, "error": problem}
            if problem:  # operands of what failed may be gone
                clock.operands.update(_operands(block, num_tokens, over, compile_))
            else:
                row |= {"us": measured, "rest_percent": 100 * measured["rest"] / measured["block"]}
            show_row(row)


def _operands(block: Block, num_tokens: int, over: Mesh, compile_: Callable) -> dict:
    """params, x and the cotangent of y, made on the devices; every rank has the same router."""
    num_local = block.num_experts // over.devices.size
    if num_local * over.devices.size != block.num_experts:
        raise SystemExit(f"got {over.devices.size} ranks, expected a divisor of {block.num_experts} experts")

    def generate(rank):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), rank[0]), 5)

        def normal(key, *shape, dtype=block.dtype, scale=1.0):
            return (scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

        # The scale of the router's weights decides how even the loads are; no time depends on that of the others.
        router = normal(jax.random.key(1), block.hidden, block.num_experts, dtype="float32", scale=block.hidden**-0.5)
        gate, up = (normal(k, num_local, block.hidden, block.ffn, scale=block.hidden**-0.5) for k in keys[:2])
        down = normal(keys[2], num_local, block.ffn, block.hidden, scale=block.ffn**-0.5)
        router = lax.pcast(router, (AXIS,), to="varying")
        x, g = (normal(k, num_tokens, block.hidden) for k in keys[3:])
        return {"params": nn.MoEParams(router, gate, up, down), "x": x, "g": g}

    ranks = np.arange(over.devices.size, dtype=np.int32)
    return compile_(generate)(jax.device_put(ranks, NamedSharding(over, PartitionSpec(AXIS))))


def _loads(config: nn.MoEConfig, operands: dict, compile_: Callable, num_ranks: int) -> np.ndarray:
    """Entries of each expert, [num_ranks, num_local_experts], known to every process."""

    def count(params, x):
        idx = nn.route(params.router, x, config).topk_idx
        return layout_lib.count_experts(idx, config.num_experts)[None]

    counts = compile_(count)(operands["params"], operands["x"])
    mine = sum(np.asarray(shard.data)[0] for shard in counts.addressable_shards)
    return np.sum(timing.exchange(mine.tolist()), axis=0).reshape(num_ranks, -1)


def _capacity(loads: np.ndarray, layout: str, choice: str, num_tokens: int, num_topk: int) -> int:
    """`demand`: the fullest rank's, or expert's, rounded up to 128; `default`: the worst case."""
    if choice == "default":
        return shapes.default_capacity(layout, loads.shape[0], num_tokens, num_topk, loads.shape[1])
    return shapes.round_up(int(loads.max() if layout == "batched" else loads.sum(1).max()), 128)


def _experts(layout: str, block: Block) -> str:
    """Layout and matrix product of the experts."""
    if layout == "batched":
        return "batched + einsum"
    return f"{layout} + {grouped_gemm.default_implementation(block.dtype, block.hidden, block.ffn)}"


def _measure(
    clock: block_parts.Clock, compile_: Callable, config: nn.MoEConfig, is_slow: bool, has_sums: bool, shared: dict
) -> dict:
    """µs by part; "statistics" is None without `has_sums`.

    `shared` keeps the parts without communication, which all implementations have in common.
    """
    operands = clock.operands
    routing, recv = compile_(block_parts.prepare(config))(operands["params"], operands["x"])
    dropped = max(timing.exchange(max(int(s.data[0]) for s in recv.num_dropped.addressable_shards)))
    if dropped:
        raise ValueError(f"a rank dropped {dropped} rows")
    operands |= {"routing": routing, "recv": recv}
    us = {"dispatch": clock.us(block_parts.dispatch(config), "x", "routing", is_slow=is_slow)}
    us["combine"] = clock.us(block_parts.combine(config), "recv", is_slow=is_slow)
    for name, key, step, args in (
        ("router", "router", block_parts.router(config), ("params", "x")),
        ("experts", (config.layout, config.capacity), block_parts.experts(config), ("params", "recv")),
    ):
        if key not in shared:
            shared[key] = clock.us(step, *args)
        us[name] = shared[key]
    us["rest"] = -sum(us.values())
    us["block"] = clock.us(block_parts.block(config), "params", "x", "g", is_slow=is_slow)
    us["rest"] += us["block"]
    us["statistics"] = None
    if has_sums:
        with_statistics = clock.us(block_parts.block_with_statistics(config), "params", "x", "g", is_slow=is_slow)
        us["statistics"] = with_statistics - us["block"]
    return us


def draw(result: dict, path: str) -> None:
    """Stacked bars of the parts' µs, one per row of the table; a line where the block ends, negative rest and all."""
    try:
        import matplotlib
    except ImportError:
        print(f"{path} not drawn: matplotlib is not installed (pip install 'jax_ep[bench]')")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [r for r in result["blocks"] if not r["error"]]
    labels = [f"{r['implementation']} {r['experts']} {r['capacity']}" for r in rows]
    figure, axis = plt.subplots(figsize=(11, 1.5 + 0.6 * len(rows)))
    left = np.zeros(len(rows))
    for part in (*PARTS, "statistics"):
        width = np.maximum([r["us"][part] or 0.0 for r in rows], 0.0)
        axis.barh(labels, width, left=left, label=part)
        left = left + width
    for y, row in enumerate(rows):
        whole = row["us"]["block"]
        axis.plot([whole] * 2, [y - 0.45, y + 0.45], color="black", linewidth=2)
        axis.text(max(whole, left[y]), y, f"  {whole:.0f}", va="center", fontsize=8)
    axis.margins(x=0.1)
    axis.invert_yaxis()
    title = f"µs of the parts of a block (line and number: all in one): {result['device']}, {result['num_ranks']} ranks"
    axis.set_title(title, fontsize=9)
    axis.legend(fontsize=8, ncols=len(PARTS) + 1, loc="upper center", bbox_to_anchor=(0.5, -0.15))
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(run(BlockPlan.from_json(sys.argv[1])))
