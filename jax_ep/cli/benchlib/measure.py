"""Runs the measurements on the ranks of this program: every function here is called by all processes alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_ep
from jax_ep.cli.benchlib import implementations, timing, workloads
from jax_ep.cli.benchlib.plan import Plan
from jax_ep.cli.benchlib.workloads import Traffic, Workload

AXIS = implementations.AXIS
OURS = ("cuda", "xla")


def mesh() -> Mesh:
    """All devices of the program as one EP group."""
    return Mesh(np.array(jax.devices()), (AXIS,))


def compiler(over: Mesh):
    """Wraps a per-rank function in shard_map and jit; everything is split along its first axis."""

    def compile_(fn):
        spec = PartitionSpec(AXIS)
        return jax.jit(jax.shard_map(fn, mesh=over, in_specs=spec, out_specs=spec, check_vma=False))

    return compile_


def inputs(workload: Workload, idx: np.ndarray, over: Mesh):
    """x, topk_idx, topk_weights, sharded over the ranks; x is made on the devices."""
    num_ranks = idx.shape[0]
    sharding = NamedSharding(over, PartitionSpec(AXIS))
    flat = idx.reshape(-1, idx.shape[-1])
    idx_global = jax.make_array_from_callback(flat.shape, sharding, lambda where: flat[where])

    def generate(idx):
        key = jax.random.fold_in(jax.random.key(0), jax.lax.axis_index(AXIS))
        x = jax.random.normal(key, (workload.num_tokens, workload.hidden), jnp.float32)
        weights = jax.random.uniform(jax.random.fold_in(key, 1), idx.shape, jnp.float32)
        return x.astype(workload.dtype), weights

    x, weights = compiler(over)(generate)(idx_global)
    assert x.shape[0] == num_ranks * workload.num_tokens
    return x, idx_global, weights


def check(impl, compile_, args) -> float:
    """Largest error of combine(expert(dispatch(x))) against sum(weights) * x, relative to the largest value."""

    def roundtrip(x, idx, weights):
        rows, state = impl.dispatch(x, idx, weights)
        out = impl.combine(impl.expert(rows, state), state).astype(jnp.float32)
        expected = x.astype(jnp.float32) * jnp.where(idx < 0, 0, weights).sum(1, keepdims=True)
        return (jnp.abs(out - expected).max() / jnp.maximum(jnp.abs(expected).max(), 1e-6))[None]

    error = compile_(roundtrip)(*args)
    return max(timing.exchange(float(max(np.asarray(s.data)[0] for s in error.addressable_shards))))


@dataclass(frozen=True)
class Machine:
    """Rates measured in this run, which the limits are computed from."""

    copy_gb_s: float
    link_gb_s: float | None  # None: the ranks share one device, no link is involved

    @staticmethod
    def measure(plan: Plan, over: Mesh) -> Machine:
        num_ranks = over.devices.size
        copy_bytes = (1 << 29) if jax.default_backend() == "gpu" else (1 << 24)  # larger than any GPU's L2
        link = None
        if plan.ranks_per_device == 1 and num_ranks > 1:
            sharding = NamedSharding(over, PartitionSpec(AXIS))
            x = jax.jit(lambda: jnp.zeros((num_ranks, copy_bytes // 8), jnp.int32), out_shardings=sharding)()
            link = timing.link_gb_s(compiler(over), x, AXIS, num_ranks)
        return Machine(timing.device_copy_gb_s(copy_bytes), link)

    def limit_us(self, plan: Plan, workload: Workload, traffic: Traffic, op: str, layout: str) -> float:
        """The wire rows over the link, or every row read and written once on the device that the ranks share."""
        if self.link_gb_s is not None:
            return traffic.wire_rows() * workload.row_bytes / self.link_gb_s / 1e3
        num_ranks = traffic.sent.shape[0]
        share = min(plan.ranks_per_device, num_ranks) / num_ranks
        rows = traffic.memory_rows(op, layout, workload.num_tokens) * share
        return rows * workload.row_bytes / self.copy_gb_s / 1e3


def _attempt(fn):
    """`fn()`'s result, or the error text of the first process that failed; all processes agree."""
    result, problem = None, ""
    try:
        result = fn()
    except Exception as e:  # e.g. out of memory, or no lowering on this platform: a row of the table, not the end
        problem = f"{type(e).__name__}: {str(e).splitlines()[0][:200]}"
    problems = [p for p in timing.exchange(problem) if p]
    return result, (problems[0] if problems else "")


def steady(plan: Plan, show_row: Callable[[dict], None], say: Callable[[str], None]) -> dict:
    """All rows of the table; each is shown as soon as it is measured."""
    over = mesh()
    compile_, num_ranks = compiler(over), over.devices.size
    machine = Machine.measure(plan, over)
    nothing = jnp.zeros((num_ranks, 8))
    chain_us = timing.steady_us(compile_, lambda x: (x,), (nothing,), plan.num_calls, plan.repeats)
    link = f", ppermute {machine.link_gb_s:.0f} GB/s each way" if machine.link_gb_s else ""
    say(f"device copy {machine.copy_gb_s:.0f} GB/s (read plus write){link}; the chain's own cost {chain_us:.1f} us")
    rows = []
    for workload in plan.workloads:
        idx = workloads.topk_idx(workload, num_ranks)
        traffic = Traffic.of(idx, workload.num_experts)
        wire_bytes = traffic.wire_rows() * workload.row_bytes
        args = inputs(workload, idx, over)
        for name, layout, choice in _cases(plan):
            capacity = workloads.capacity(workload, traffic, layout, choice, num_ranks)
            impl = implementations.make(name, workload, traffic, layout, capacity, plan.num_sms)
            result, problem = _attempt(partial(_measure, impl, compile_, args, plan))
            is_ours = name in OURS
            for op in ("dispatch", "combine"):
                row = {"workload": workload.name, "implementation": name, "op": op, "error": problem}
                row["layout"], row["capacity"] = (layout, choice) if is_ours else ("", "")
                row["capacity_rows"] = capacity if is_ours else None
                if not problem:
                    us, limit_us = result[op], machine.limit_us(plan, workload, traffic, op, layout)
                    row |= {"us": us, "wire_gb_s": wire_bytes / us / 1e3, "limit_us": limit_us}
                    row |= {"percent_of_limit": 100 * limit_us / us, "max_error": result["error"]}
                rows.append(row)
                show_row(row)
    return {"machine": vars(machine), "chain_us": chain_us, "num_ranks": num_ranks, "rows": rows}


def _cases(plan: Plan):
    """(implementation, layout, capacity): layouts and capacities are ours only."""
    for name in plan.implementations:
        if name in OURS:
            yield from ((name, layout, choice) for layout in plan.layouts for choice in plan.capacities)
        else:
            yield name, "token", "demand"  # the layout whose limit is smallest: every row moves once


def _measure(impl, compile_, args, plan: Plan) -> dict:
    error = check(impl, compile_, args)
    if not error < 0.05:
        raise ValueError(f"wrong result, error {error:.3g}")
    received = compile_(impl.dispatch)(*args)
    # Linked: x and topk_idx, on which all of dispatch hangs; the rows, on which all of combine's work does.
    dispatch = timing.steady_us(compile_, impl.dispatch, args, plan.num_calls, plan.repeats, num_linked=2)
    combine = timing.steady_us(compile_, lambda *a: (impl.combine(*a),), received, plan.num_calls, plan.repeats)
    return {"dispatch": dispatch, "combine": combine, "error": error}


def first_call(plan: Plan) -> dict:
    """First call against steady calls of one freshly compiled program, ours and a control, in this process."""
    over = mesh()
    compile_, num_ranks = compiler(over), over.devices.size
    workload, name, layout, choice = plan.workloads[0], plan.implementations[0], plan.layouts[0], plan.capacities[0]
    idx = workloads.topk_idx(workload, num_ranks)
    traffic = Traffic.of(idx, workload.num_experts)
    capacity = workloads.capacity(workload, traffic, layout, choice, num_ranks)
    impl = implementations.make(name, workload, traffic, layout, capacity, plan.num_sms)
    args = inputs(workload, idx, over)
    jax.block_until_ready(args)

    def ours(x, idx, weights):
        return impl.combine(*impl.dispatch(x, idx, weights))

    def control(x, idx, weights):
        half = jax.lax.optimization_barrier(x * 2)
        return half * weights.sum(1, keepdims=True).astype(x.dtype)

    result = {"workload": workload.name, "implementation": name, "layout": layout, "num_ranks": num_ranks}
    times = {}
    for key, fn in (("ours", ours), ("control", control)):  # ours first: nothing has warmed the device for it
        entered_ns = int if key == "control" else lambda: jax_ep.debug.stats()["dispatch_entered_ns"]
        since_call, since_entry = timing.calls_us(
            compile_(fn).lower(*args).compile(), args, plan.repeats + 5, entered_ns
        )
        times[key] = since_call
        if all(since_entry):  # without what JAX and XLA do before they come to the first exchange
            times[f"{key} on the device"] = since_entry
    for key, calls in times.items():
        steady_us = float(np.median(calls[5:]))
        result[key] = {"first_us": calls[0], "steady_us": steady_us, "ratio": calls[0] / steady_us, "calls_us": calls}
    result["measured"] = list(times)
    result["setup_ms"] = max(timing.exchange(jax_ep.debug.stats()["setup_ms"]), key=lambda ms: sum(ms.values()))
    return result
