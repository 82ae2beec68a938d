"""Runs the measurements on the ranks of this program: every function here is called by all processes alike."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_ep
from jax_ep import bootstrap, group, tuning
from jax_ep.cli.benchlib import findings, implementations, timing, workloads
from jax_ep.cli.benchlib.implementations import AXIS, OURS
from jax_ep.cli.benchlib.plan import Plan
from jax_ep.cli.benchlib.workloads import Traffic, Workload

PAUSE_S = 2.0  # a device and its links go to sleep long before


def mesh() -> Mesh:
    """All devices of the program as one EP group."""
    return Mesh(np.array(jax.devices()), (AXIS,))


def mesh_of_ones() -> Mesh:
    """Every device as an EP group of its own."""
    return Mesh(np.array(jax.devices())[:, None], ("dp", AXIS))


def compiler(over: Mesh):
    """Wraps a per-rank function in shard_map and jit; everything is split along its first axis."""

    def compile_(fn):
        spec = PartitionSpec(over.axis_names)
        return jax.jit(jax.shard_map(fn, mesh=over, in_specs=spec, out_specs=spec, check_vma=False))

    return compile_


def inputs(workload: Workload, idx: np.ndarray, over: Mesh):
    """X (or the pair that it was quantised to), topk_idx, topk_weights, sharded over the devices; x is made there."""
    sharding = NamedSharding(over, PartitionSpec(over.axis_names))
    flat = idx.reshape(-1, idx.shape[-1])
    idx_global = jax.make_array_from_callback(flat.shape, sharding, lambda where: flat[where])

    def generate(idx):
        key = jax.random.fold_in(jax.random.key(0), jax.lax.axis_index(over.axis_names))
        x = jax.random.normal(key, (workload.num_tokens, workload.hidden), jnp.float32).astype(workload.dtype)
        weights = jax.random.uniform(jax.random.fold_in(key, 1), idx.shape, jnp.float32)
        return jax_ep.Quantized(*_pair(x)) if workload.sent == "pair" else x, weights

    x, weights = compiler(over)(generate)(idx_global)
    return x, idx_global, weights


def _pair(x):
    quantized = jax_ep.quantize(x)
    return quantized.data, quantized.scale


def prepare(impl, compile_, args, is_split: bool = False):
    """Checks `impl`, start and done too if asked, and gives operands for its combine.

    Returns:
      rows and state of dispatch and expert, and the largest error of combine's results against sum(weights) * x,
      relative to the largest value.

    Raises:
      ValueError: a result is wrong.
    """
    workload = impl.workload
    has_fp8 = workload.sent != "rows"

    def roundtrip(x, idx, weights):
        rows, state = impl.dispatch(x, idx, weights)
        rows = impl.expert(rows, state)
        outs = [impl.combine(rows, state)]
        if has_fp8 and isinstance(impl, implementations.JaxEp):
            outs.append(impl.combine_fp8(rows, state))
        if is_split:
            there = impl.dispatch_split(x, idx, weights)
            outs.append(impl.combine_split(impl.expert(*there), there[1]))
        x = x.dequantize(jnp.float32) if isinstance(x, jax_ep.Quantized) else x.astype(jnp.float32)
        expected = x * jnp.where(idx < 0, 0, weights).sum(1, keepdims=True)
        largest = jnp.maximum(jnp.abs(expected).max(), 1e-6)
        errors = [jnp.abs(out.astype(jnp.float32) - expected).max() / largest for out in outs]
        return rows, state, jnp.stack(errors).max()[None]

    rows, state, errors = compile_(roundtrip)(*args)
    error = max(timing.exchange(float(max(np.asarray(s.data)[0] for s in errors.addressable_shards))))
    if not error < (0.15 if has_fp8 else 0.05):  # e4m3 rounds by up to 1/16, here up to twice
        raise ValueError(f"wrong result, error {error:.3g}")
    return rows, state, error


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

    def limit_us(self, plan: Plan, case: Case, op: str) -> float:
        """The wire rows over the link, or what is read and written on the device that the ranks share.

        With the default capacity a dispatch also writes the zeros of the tail.
        """
        workload, traffic = case.setting.workload, case.setting.traffic
        tail = 0
        if op in ("dispatch", "again") and case.choice == "default":
            num_rows = workloads.num_rows(workload, traffic, case.layout, case.capacity)
            tail = traffic.tail_rows(case.layout, num_rows) * workload.crossing_bytes(op)
        num_ranks = traffic.num_ranks
        if self.link_gb_s is not None:
            wire_us = traffic.wire_rows() * workload.crossing_bytes(op) / self.link_gb_s / 1e3
            return max(wire_us, tail / num_ranks / self.copy_gb_s / 1e3)
        share = min(plan.ranks_per_device, num_ranks) / num_ranks
        moved = traffic.memory_bytes(op, case.layout, workload) + tail
        return moved * share / self.copy_gb_s / 1e3


@dataclass(frozen=True)
class Setting:
    """A workload on a mesh, with its operands."""

    workload: Workload
    traffic: Traffic
    over: Mesh
    args: tuple

    @staticmethod
    def of(workload: Workload, over: Mesh) -> Setting:
        """All devices as one group."""
        idx = workloads.topk_idx(workload, over.devices.size)
        return Setting(workload, Traffic.of(idx, workload.num_experts), over, inputs(workload, idx, over))

    def of_one(self) -> Setting:
        """What "alone" costs without peers: the same routing, every rank a group of its own."""
        num_ranks = self.over.devices.size
        idx = workloads.topk_idx(self.workload, num_ranks)
        workload = dataclasses.replace(self.workload, num_experts=self.workload.num_experts // num_ranks)
        over = mesh_of_ones()
        return Setting(workload, Traffic.of(idx[:1], workload.num_experts), over, inputs(workload, idx, over))


@dataclass(frozen=True)
class Case:
    """What the rows of one implementation have in common."""

    setting: Setting
    name: str
    layout: str
    choice: str  # of the capacity
    mode: str = "throughput"
    is_recorded: bool | None = None  # into command buffers
    ranks_per_node: int | None = None  # of simulated nodes; None: one node
    transport: str = "auto"

    @property
    def is_ours(self) -> bool:
        """Whether layout, capacity, mode and SMs concern it."""
        return self.name in OURS

    @property
    def capacity(self) -> int:
        """Rows of the receive array, per expert in layout "batched"."""
        return workloads.capacity(self.setting.workload, self.setting.traffic, self.layout, self.choice)

    @property
    def num_bytes(self) -> int:
        """Of a rank's memory, roughly: received rows twice, partial sums, x and results."""
        workload, traffic = self.setting.workload, self.setting.traffic
        rows = 2 * workloads.num_rows(workload, traffic, self.layout, self.capacity)
        rows += 0 if self.layout == "token" else traffic.num_ranks * workload.num_tokens
        return (rows + 4 * workload.num_tokens) * workload.row_bytes

    def implementation(self):
        """Who does it."""
        setting, has_tail = self.setting, self.choice == "default"  # which also is what zero_tail is by default
        return implementations.make(
            self.name,
            setting.workload,
            setting.traffic,
            self.layout,
            self.capacity,
            has_tail,
            mode=self.mode,
            is_recorded=self.is_recorded,
            ranks_per_node=self.ranks_per_node,
            transport=self.transport,
        )

    @staticmethod
    def first(plan: Plan, setting: Setting) -> Case:
        """Of each of the plan's choices the first; several nodes where the plan has any."""
        choice = plan.implementations[0], plan.layouts[0], plan.capacities[0], plan.modes[0]
        return Case(setting, *choice, plan.is_recorded, *plan.nodes(setting.traffic.num_ranks)[:2][-1])


def attempt(fn):
    """`fn()`'s result, or the error text of the first process that failed; all processes agree."""
    result, problem = None, ""
    try:
        result = fn()
    except Exception as e:  # e.g. out of memory, or no lowering on this platform: a row of the table, not the end
        problem = f"{type(e).__name__}: {str(e).splitlines()[0][:200]}"
    problems = [p for p in timing.exchange(problem) if p]
    return result, (problems[0] if problems else "")


def _too_large(case: Case) -> str:
    """Why a case is not tried: a rank that runs out of memory in the middle of a call leaves its peers waiting."""
    limits = timing.exchange([(device.memory_stats() or {}).get("bytes_limit", 0) for device in jax.local_devices()])
    least = min(limit for process in limits for limit in process)
    if not least or case.num_bytes <= least:
        return ""
    return f"needs about {case.num_bytes / 2**30:.1f} GiB of a rank's {least / 2**30:.1f}: not tried"


def steady(plan: Plan, show: Callable[[dict], None], say: Callable[[str], None]) -> dict:
    """All rows of the table and what follows from them; `show` gets all there is after each row."""
    over = mesh()
    compile_, num_ranks = compiler(over), over.devices.size
    machine = Machine.measure(plan, over)
    nothing = jnp.zeros((num_ranks, 8))
    try:  # a few microseconds: more calls than the rows get, and no reason to give up
        chain_us = timing.steady_us(compile_, lambda x: (x,), (nothing,), 8 * plan.num_calls, plan.repeats)
    except timing.TooNoisy:
        chain_us = 0.0
    link = f", ppermute {machine.link_gb_s:.0f} GB/s each way" if machine.link_gb_s else ""
    say(f"device copy {machine.copy_gb_s:.0f} GB/s (read plus write){link}; the chain's own cost {chain_us:.1f} us")
    rows: list[dict] = []
    result = {"machine": vars(machine), "chain_us": chain_us, "num_ranks": num_ranks, "rows": rows, "notes": []}
    for workload in plan.workloads:
        setting = Setting.of(workload, over)
        for case in _cases(plan, setting):
            for row in _case_rows(plan, machine, case, setting):
                rows.append(row)
                show(result)
    result["notes"] = findings.notes(rows)
    for note in result["notes"]:
        say(note)
    return result


def _cases(plan: Plan, setting: Setting) -> Iterator[Case]:
    """Layouts, capacities, modes and nodes are ours only."""
    settings = [setting]
    if setting.workload.routing == "alone" and setting.over.devices.size > 1:
        settings.append(setting.of_one())
    for name in plan.implementations:
        for layout in plan.layouts if name in OURS else ("token",):  # the layout whose limit is smallest
            for choice in plan.capacities if name in OURS else ("demand",):
                for mode in plan.modes if name in OURS else ("",):
                    # A group of one is what an empty peer of ours is compared with.
                    yield from (
                        Case(s, name, layout, choice, mode, plan.is_recorded)
                        for s in (settings if name in OURS else settings[:1])
                    )
                    for nodes in plan.nodes(setting.traffic.num_ranks)[1:]:
                        if name in OURS:
                            yield Case(setting, name, layout, choice, mode, plan.is_recorded, *nodes)


def _case_rows(plan: Plan, machine: Machine, case: Case, full: Setting) -> Iterator[dict]:
    """Rows of all ops and numbers of SMs. `full`: the setting over all ranks, which the default number is taken of."""
    setting = case.setting
    workload, compile_ = setting.workload, compiler(setting.over)
    impl = case.implementation()
    # Halves do not depend on the mode, and are measured on one node only.
    is_split = case.is_ours and plan.is_split and case.mode == plan.modes[0] and case.ranks_per_node is None
    ready, problem = None, _too_large(case) if case.is_ours else ""
    if not problem:
        ready, problem = attempt(partial(prepare, impl, compile_, setting.args, is_split))
    for op, step, operands, num_linked in _steps(plan, impl, setting.args, ready, is_split):
        mode = chosen_mode(case, op, compile_, partial(step, impl), None if problem else operands)
        default, most = None, None
        if case.name == "cuda":
            default, most = default_num_sms(full, case.layout, op, mode, case.ranks_per_node)
        for num_sms in sms_values(plan.num_sms, default, most) if case.is_ours else (None,):
            row = {"workload": workload.name, "implementation": case.name + plan.suffix, "op": op}
            row |= {"num_ranks": setting.traffic.num_ranks, "of": dataclasses.asdict(workload)}
            row |= {"layout": case.layout, "capacity": case.choice} if case.is_ours else {"layout": "", "capacity": ""}
            row |= {"mode": "latency" if is_half(op) else case.mode, "chosen_mode": mode}
            row |= {"ranks_per_node": case.ranks_per_node, "transport": case.transport, "node_sms": None}
            # Over nodes the default is not asked for, since fewer may carry then; of groups of one `full`'s has to be.
            asked = None if case.ranks_per_node is not None and num_sms == default else num_sms
            if case.name == "cuda":
                row["node_sms"] = num_carriers(full, case.layout, op, case.ranks_per_node, asked, mode)
            row |= {"capacity_rows": case.capacity if case.is_ours else None}
            row |= {"num_sms": num_sms, "is_default": num_sms is not None and num_sms == default}
            trouble = problem
            if not problem:
                chosen = dataclasses.replace(impl, num_sms=asked) if case.is_ours else impl
                timed = partial(timing.steady_us, compile_, partial(step, chosen), operands)
                us, trouble = attempt(partial(timed, plan.num_calls, plan.repeats, num_linked))
            row["error"] = trouble
            if not trouble:
                limit_us = machine.limit_us(plan, case, op)
                wire_bytes = setting.traffic.wire_rows() * workload.crossing_bytes(op)
                row |= {"us": us, "wire_gb_s": wire_bytes / us / 1e3, "limit_us": limit_us}
                row |= {"percent_of_limit": 100 * limit_us / us, "max_error": ready[2]}
            yield row


def is_half(op: str) -> bool:
    """Whether the op is done by start and done, which always go by the slots of latency mode."""
    return op.endswith(" split")


def chosen_mode(case: Case, op: str, compile_, step: Callable, operands) -> str:
    """The mode that a call takes: what "auto" becomes is read from the lowered program, if there is one."""
    if is_half(op):
        return "latency"
    if case.name != "cuda" or case.mode != "auto" or operands is None:
        return case.mode
    lowered, _ = attempt(lambda: compile_(step).trace(*operands).lower(lowering_platforms=("cuda",)).as_text())
    slots = re.findall(r"num_slots = (\d+)", lowered or "")
    return "auto" if not slots else "latency" if int(slots[0]) else "throughput"


def _steps(plan: Plan, impl, args, ready, is_split: bool = False) -> list[tuple]:
    """(op, function of an implementation and operands, operands, how many of their first arrays are linked).

    Linked: x and topk_idx, on which all of dispatch hangs; the rows, on which all of combine's work does.
    """
    num_x = len(jax.tree.leaves(args[0]))
    rows, state, _ = ready or (None, None, None)
    steps = [("dispatch", lambda i, *a: i.dispatch(*a), args, num_x + 1)]
    if isinstance(impl, implementations.JaxEp):
        steps.append(("again", lambda i, *a: i.again(*a), (args[0], state), num_x))
    steps.append(("combine", lambda i, *a: i.combine(*a), (rows, state), 1))
    if isinstance(impl, implementations.JaxEp) and impl.workload.sent != "rows":
        steps.append(("combine fp8", lambda i, *a: i.combine_fp8(*a), (rows, state), 1))
    if is_split:
        steps.append(("dispatch split", lambda i, *a: i.dispatch_split(*a), args, num_x + 1))
        steps.append(("combine split", lambda i, *a: i.combine_split(*a), (rows, state), 1))
    return [step for step in steps if step[0].split()[0] in plan.ops]


def default_num_sms(
    setting: Setting, layout: str, op: str, mode: str, ranks_per_node: int | None = None
) -> tuple[int | None, int | None]:
    """What a CUDA call without `num_sms` takes (see tuning.py), and the most that it could; None: not known.

    `mode` is what the call takes: not "auto".
    """
    placement = bootstrap.placement(group.mesh_groups(setting.over, AXIS))
    if placement is None:
        return None, None
    if mode == "latency":
        num_ranks, num_tokens = setting.traffic.num_ranks, setting.workload.num_tokens
        chosen = tuning.latency_num_sms(placement, num_ranks=num_ranks, num_tokens=num_tokens)
    else:
        chosen = tuning.default_num_sms(placement, **_sizes(setting, layout, op))
    if ranks_per_node is None:
        return chosen, placement.max_num_sms
    carriers = num_carriers(setting, layout, op, ranks_per_node, mode=mode)
    most = min(placement.max_num_sms - 1, tuning.NODE_MOST_BLOCKS)  # a carrier takes one at least
    return tuning.node_num_sms(placement, chosen, carriers), most


def num_carriers(
    setting: Setting,
    layout: str,
    op: str,
    ranks_per_node: int | None,
    num_sms: int | None = None,
    mode: str = "throughput",
) -> int | None:
    """SMs that carry to other nodes beside a call's `num_sms` (None: the default); None: there are none."""
    placement = bootstrap.placement(group.mesh_groups(setting.over, AXIS))
    if placement is None or ranks_per_node is None:
        return None
    if mode == "latency":
        return tuning.latency_node_sms(placement, None, num_sms)
    num_nodes = -(-setting.traffic.num_ranks // ranks_per_node)
    return tuning.node_sms(placement, None, num_sms, num_nodes=num_nodes, **_sizes(setting, layout, op))


def _sizes(setting: Setting, layout: str, op: str) -> dict:
    """What tuning.py asks for."""
    workload = setting.workload
    return dict(
        op=op.split()[0].replace("again", "dispatch"),
        layout=layout,
        num_ranks=setting.traffic.num_ranks,
        num_experts=workload.num_experts,
        num_topk=workload.num_topk,
        num_tokens=workload.num_tokens,
        row_bytes=workload.row_bytes if op.startswith("combine") else workload.crossing_bytes(op),
    )


def sms_values(asked: tuple[int, ...], default: int | None, most: int | None) -> list[int | None]:
    """Numbers of SMs to measure: those asked for that fit; the default, too, when none or several are."""
    fit = {n for n in asked if most is None or n <= most}
    if len(asked) == 1:
        return [*asked]  # too many are refused by the call itself, which says why
    return sorted(fit | ({default} - {None})) or [None]


def exchange_of(impl) -> Callable:
    """A dispatch and its combine in one new function of x, topk_idx and topk_weights."""

    def exchange(x, idx, weights):
        rows, state = impl.dispatch(x, idx, weights)
        if impl.workload.sent != "rows":
            rows = impl.expert(rows, state)
        return impl.combine(rows, state)

    return exchange


def first_call(plan: Plan) -> dict:
    """First call against steady calls of one freshly compiled program, ours and a control, in this process."""
    over = mesh()
    compile_, num_ranks = compiler(over), over.devices.size
    setting = Setting.of(plan.workloads[0], over)
    # Only launched calls say when they begin on the device; XLA would not record a dispatch and a combine alone anyway.
    case = Case.first(dataclasses.replace(plan, is_recorded=bool(plan.is_recorded)), setting)
    impl, args = case.implementation(), case.setting.args
    if case.is_ours and plan.num_sms:
        impl = dataclasses.replace(impl, num_sms=plan.num_sms[0])
    jax.block_until_ready(args)
    ours = exchange_of(impl)

    def control(x, idx, weights):
        x = jax.tree.leaves(x)[0].astype(impl.workload.dtype)
        half = jax.lax.optimization_barrier(x * 2)
        return half * weights.sum(1, keepdims=True).astype(x.dtype)

    result = {"workload": impl.workload.name, "implementation": case.name, "layout": case.layout}
    result |= {"mode": case.mode, "num_ranks": num_ranks}
    result |= {"ranks_per_node": case.ranks_per_node, "transport": case.transport}
    times = {}
    for key, fn in (("ours", ours), ("control", control)):  # ours first: nothing has warmed the device for it
        entered_ns = int if key == "control" else lambda: jax_ep.debug.stats()["dispatch_entered_ns"]
        program = compile_(fn).lower(*args).compile()
        since_call, since_entry = timing.calls_us(program, args, plan.repeats + 5, entered_ns)
        time.sleep(PAUSE_S)
        paused_call, paused_entry = timing.calls_us(program, args, 1, entered_ns)
        times[key] = since_call, paused_call[0]
        if all(since_entry + paused_entry):  # without what JAX and XLA do before they come to the first exchange
            times[f"{key} on the device"] = since_entry, paused_entry[0]
    for key, (calls, paused_us) in times.items():
        steady_us = float(np.median(calls[5:]))
        result[key] = {"first_us": calls[0], "steady_us": steady_us, "ratio": calls[0] / steady_us, "calls_us": calls}
        result[key]["paused_us"] = paused_us
    result["measured"] = list(times)
    result["setup_ms"] = max(timing.exchange(jax_ep.debug.stats()["setup_ms"]), key=lambda ms: sum(ms.values()))
    return result
