"""How a primitive becomes a CUDA custom call, and when it does."""

from __future__ import annotations

import dataclasses
import functools
import logging

import jax
import numpy as np
from jax.extend.mlir.dialects import stablehlo

from jax_ep import _compat, _ffi, bootstrap, tuning
from jax_ep import group as group_lib
from jax_ep.layout import FUSED_SLOTS, Spec, split_slots

_DTYPE_CODE = {"bfloat16": 0, "float16": 1, "float32": 2}
_OPAQUE = 3  # rows that are moved and never summed
_LAYOUT_CODE = {"expert": 0, "token": 1, "batched": 2}
_MAX_NODES = 32  # kMaxNodes of cuda/layout.h
_QUANTIZE_CODE = {None: 0, "fp8": 1, "fp8_ue8m0": 2, "fp8_wire": 3}


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of an operation as a whole, whichever part of it is lowered."""

    op: str  # "dispatch" | "redispatch" | "combine"
    part: str  # "": all of it; "start" | "done": a half
    operands: tuple  # abstract values of all that the operation takes and gives
    results: tuple
    spec: Spec
    quantize: str | None

    @property
    def name(self) -> str:
        """Of the primitive."""
        return "_".join(filter(None, ("jax_ep", self.op, self.part)))

    @property
    def num_topk(self) -> int:
        """Columns of topk_idx: the third operand of dispatch, the first handle array of the others."""
        return self.operands[{"dispatch": 2, "redispatch": 3, "combine": 4}[self.op]].shape[1]

    @property
    def num_tokens(self) -> int:
        """Tokens of a rank."""
        return (self.results if self.op == "combine" else self.operands)[0].shape[0]

    @property
    def row_bytes(self) -> int:
        """Of a received row, or a row of the sum."""
        return _row_bytes(self.results[0])

    @property
    def side_bytes(self) -> int:
        """Of what lies beside a received row."""
        return 0 if self.op == "combine" else _row_bytes(self.results[1])

    @property
    def crossing_bytes(self) -> int:
        """Of a row on its way, with what lies beside it: what a staging window must hold one of (call.h, layout.h)."""
        if self.quantize == "fp8_wire":  # WireRow: FP8 in groups of 512 channels, each with its four scales
            return -(-self.results[0].shape[1] // 512) * 528
        return self.row_bytes + -(-self.side_bytes // 16) * 16

    @property
    def sizes(self) -> dict[str, int]:
        """What tuning.py asks for, whatever the mode."""
        return dict(
            num_ranks=self.spec.num_ranks,
            num_experts=self.spec.num_experts,
            num_topk=self.num_topk,
            num_tokens=self.num_tokens,
            row_bytes=self.crossing_bytes,
        )

    def arena_shape(self, num_slots: int) -> tuple[int, int, int, int]:
        """The size class of own memory that serves this call; without slots that of throughput mode."""
        ranks, nodes = self.spec.num_ranks, self.spec.num_nodes
        experts, topk = self.spec.num_experts, self.num_topk
        if num_slots:
            sizes = ranks, nodes, experts, self.crossing_bytes, topk, self.num_tokens
            return _ffi.latency_arena_shape(*sizes, num_slots)
        if nodes > 1:  # between nodes sums are not quantised
            row_bytes = self.row_bytes + -(-self.side_bytes // 16) * 16
            return _ffi.node_arena_shape(ranks, nodes, experts, row_bytes, topk, self.spec.config.node_bytes)
        return _ffi.arena_shape(ranks, experts, self.crossing_bytes, topk, self.spec.config.staging_bytes)


def choose(call: Call, ctx):
    """The lowering rule of the CUDA call, or None where the reference serves."""
    spec = call.spec
    if spec.implementation == "xla":
        return None
    several_nodes = _not_over_nodes(call)
    if several_nodes and spec.implementation == "cuda":
        raise NotImplementedError(
            f'{call.name}: implementation="cuda" was asked for, but {several_nodes}; use implementation="xla" or None'
        )
    groups = group_lib.lowering_groups(ctx.module_context.axis_context, spec.axis_name)
    too_many = _too_many_experts(spec, "max_latency_experts" if call.part else "max_experts")
    if spec.implementation is None:
        # What the spec alone decides goes first: nobody then waits for records.
        reason = several_nodes or bootstrap.can_use_cuda(groups, spec.config, spec.num_nodes) or too_many
        if reason:
            _log_once(f"using the pure-JAX implementation: {reason}")
            return None
    if too_many:
        raise ValueError(f'implementation="cuda" was asked for, but {too_many}; use fewer experts, or "xla"')
    automatic = group_lib.automatic_axes(ctx.module_context.axis_context)
    if call.part and automatic:  # XLA would say "Side-effect ops cannot be replicated"
        raise NotImplementedError(
            f"{call.name}: this shard_map leaves mesh axes {', '.join(map(repr, automatic))} automatic, over which XLA "
            "splits no call with side effects, as the halves of an exchange are; name all axes in its axis_names, or "
            f"use {'combine' if call.op == 'combine' else 'dispatch'}"
        )
    bootstrap.prepare(groups, spec.config, spec.num_nodes)
    return functools.partial(_lower, call, groups)


def _not_over_nodes(call: Call) -> str:
    """Why the kernels do not serve a call over several nodes, or ""."""
    spec = call.spec
    if spec.num_nodes == 1:
        return ""
    problem = ""
    if spec.num_ranks % spec.ranks_per_node:
        problem = "the kernels need as many ranks on every node"
    elif spec.num_nodes > _MAX_NODES:
        problem = f"the kernels take at most {_MAX_NODES}"
    elif (spec.config.num_sms or 0) > tuning.NODE_MOST_BLOCKS:
        problem = (
            f"the kernels take at most {tuning.NODE_MOST_BLOCKS} SMs there, of Config(num_sms={spec.config.num_sms})"
        )
    elif spec.config.staging == "always":
        problem = 'nothing is staged over nodes; leave out Config(staging="always")'
    if not problem:
        return ""
    nodes = f"splits {spec.num_ranks} ranks into {spec.num_nodes} nodes"
    return f"Config.ranks_per_node={spec.ranks_per_node} {nodes}, and {problem}"


def _too_many_experts(spec: Spec, limit: str) -> str:
    if _ffi.available():
        return ""
    most = getattr(_ffi.module(), limit)(spec.num_ranks)
    if spec.num_experts <= most:
        return ""
    kernels = "the kernels of latency mode" if "latency" in limit else "the kernels"
    return f"num_experts is {spec.num_experts}, and {kernels} count at most {most} over {spec.num_ranks} ranks"


def _num_slots(call: Call, groups) -> int:
    """Slots of the call's arena; 0: it takes the throughput kernels. The same on all ranks."""
    spec = call.spec
    if call.part:
        return split_slots(spec.config)
    if spec.mode == "throughput" or (spec.num_nodes > 1 and spec.mode == "auto"):
        return 0
    too_many = _too_many_experts(spec, "max_latency_experts")
    if spec.mode == "latency":
        if too_many and spec.implementation == "cuda":
            raise ValueError(f'mode="latency" was asked for, but {too_many}; use mode="auto", or fewer experts')
        if too_many:
            _log_once(f'using mode="throughput": {too_many}')
        return 0 if too_many else FUSED_SLOTS
    placement = bootstrap.placement(groups, spec.config)
    if too_many or placement is None:
        return 0
    _, slots_bytes, *_ = call.arena_shape(FUSED_SLOTS)
    prefers = tuning.prefers_latency(placement, op=_direction(call), slots_bytes=slots_bytes, **call.sizes)
    return FUSED_SLOTS if prefers else 0


def _lower(call: Call, groups, ctx, *operands):
    num_slots = _num_slots(call, groups)
    attributes = _attributes(call, groups, num_slots)
    results = list(ctx.avals_out)
    num_public = len(results)
    if call.op == "combine" and not num_slots:
        # Sums of each (source, token) on this rank, which peers fetch: memory that XLA owns for this call.
        has_sums = call.spec.layout != "token" or call.quantize
        rows = call.spec.num_slots(call.num_tokens) if has_sums else 0
        results.append(_compat.result_aval(results[0], (rows, call.crossing_bytes), np.uint8))
    target = f"{call.name}_latency" if num_slots and not call.part else call.name
    if _is_recordable(call, groups):
        target += "_graph"
    # Without a side effect for XLA a start could run once for several dones, or outside the loop of its done.
    rule = jax.ffi.ffi_lowering(target, has_side_effect=bool(call.part))
    values = rule(ctx.replace(avals_out=results), *operands, **attributes)[:num_public]
    # XLA (of jax 0.11.2 at least) makes a call write what a scan keeps of it straight into the kept array, and lets the
    # call run a second time for everything else that uses its results, side effect or not. It does not look past this.
    return stablehlo.OptimizationBarrierOp(values).results


def _is_recordable(call: Call, groups) -> bool:
    """Whether XLA may record the call into a command buffer. The same on all ranks.

    The only place that says which calls are not.
    """
    wanted = call.spec.config.command_buffers
    if not (tuning.COMMAND_BUFFERS if wanted is None else wanted):
        return False
    if call.spec.num_nodes > 1:
        problem = "calls over several nodes launch a kernel on a stream of their own"
    elif group_lib.most_devices(groups) > 1:
        # A device may still be making its graph, which allocates, while a kernel of another one waits for it.
        problem = "a process has several devices of the mesh, which do not wait for each other's recording"
    else:
        problem = bootstrap.why_not_recorded(groups, call.spec.config)
    if problem and wanted:
        _log_once(f"Config(command_buffers=True) has no effect: {problem}")
    return not problem


def _attributes(call: Call, groups, num_slots: int) -> dict:
    """The attributes that every target takes; equal in all processes, so none of them says who we are."""
    spec, config = call.spec, call.spec.config
    shape = call.arena_shape(num_slots)
    num_carriers = _num_carriers(call, groups, num_slots)
    numbers = dict(
        num_ranks=spec.num_ranks,
        num_experts=spec.num_experts,
        num_topk=call.num_topk,
        num_tokens=call.num_tokens,
        num_rows=spec.num_rows,
        row_bytes=call.row_bytes,
        side_bytes=call.side_bytes,
        dtype=_DTYPE_CODE.get(call.operands[0].dtype.name, _OPAQUE),
        quantize=_QUANTIZE_CODE[call.quantize],
        layout=_LAYOUT_CODE[spec.layout],
        expert_alignment=spec.expert_alignment,
        zero_tail=spec.zero_tail,
        num_sms=config.num_sms or _default_num_sms(call, groups, num_slots),
        num_slots=num_slots,
        num_nodes=spec.num_nodes,
        num_carriers=num_carriers,
        chunk_tokens=config.node_chunk or 0,
        put_delay_ns=_nanoseconds(config.put_delay_s) if config.put_delay_s else 0,
        staging_bytes=config.node_bytes if spec.num_nodes > 1 else config.staging_bytes,
        force_staged=config.staging == "always",
        force_vector=config.copies == "vector",
        setup_timeout_ns=_nanoseconds(config.setup_timeout_s),
        first_timeout_ns=_nanoseconds(config.first_call_timeout_s),
        timeout_ns=_nanoseconds(config.timeout_s),
    )
    over_nvshmem = bootstrap.over_nvshmem(groups, config, spec.num_nodes)
    key = group_lib.arena_key(groups, shape, over_nvshmem=over_nvshmem)
    # XLA's instantiate binds too, but XLA does not call it for executables from the persistent cache (jax 0.11.2).
    all_sms = config.num_sms or 0
    if spec.num_nodes > 1:  # the carrier is resident beside at least one block
        all_sms = max(all_sms, 1) + num_carriers
    bootstrap.bind(key, groups, spec.num_ranks, *shape, all_sms, config.setup_timeout_s)
    return dict(
        key=key,
        groups=group_lib.flat_groups(groups),
        **{name: np.int64(value) for name, value in numbers.items()},
    )


def _default_num_sms(call: Call, groups, num_slots: int) -> int:
    """By the models of tuning.py; 0, the runtime's own default, in a program for another machine."""
    placement = bootstrap.placement(groups, call.spec.config)
    if placement is None:
        return 0
    if num_slots:
        num_sms = tuning.latency_num_sms(placement, num_ranks=call.spec.num_ranks, num_tokens=call.num_tokens)
    else:
        num_sms = tuning.default_num_sms(placement, op=_direction(call), layout=call.spec.layout, **call.sizes)
    if call.spec.num_nodes > 1:
        return tuning.node_num_sms(placement, num_sms, _num_carriers(call, groups, num_slots))
    return num_sms


def _num_carriers(call: Call, groups, num_slots: int) -> int:
    """SMs of a rank that carry what crosses nodes, beside those of the call."""
    config = call.spec.config
    if call.spec.num_nodes == 1:
        return 0
    if num_slots:
        return tuning.latency_node_sms(bootstrap.placement(groups, config), config.node_sms, config.num_sms)
    sizes = dict(op=_direction(call), layout=call.spec.layout, num_nodes=call.spec.num_nodes, **call.sizes)
    return tuning.node_sms(bootstrap.placement(groups, config), config.node_sms, config.num_sms, **sizes)


def _direction(call: Call) -> str:
    return "combine" if call.op == "combine" else "dispatch"


def _row_bytes(rows) -> int:
    return rows.shape[1] * rows.dtype.itemsize


def _nanoseconds(seconds: float) -> int:
    return max(1, min(round(seconds * 1e9), 2**58))


@functools.cache
def _log_once(text: str) -> None:
    logging.getLogger("jax_ep").warning("%s", text)
