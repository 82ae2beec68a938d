"""How a primitive becomes a CUDA custom call, and when it does."""

from __future__ import annotations

import functools
import logging

import jax
import numpy as np

from jax_ep import _compat, _ffi, bootstrap, tuning
from jax_ep import group as group_lib
from jax_ep.layout import Spec

_DTYPE_CODE = {"bfloat16": 0, "float16": 1, "float32": 2}
_OPAQUE = 3  # rows that are moved and never summed
_LAYOUT_CODE = {"expert": 0, "token": 1, "batched": 2}
_QUANTIZE_CODE = {None: 0, "fp8": 1, "fp8_ue8m0": 2, "fp8_wire": 3}


def choose(target: str, ctx, spec: Spec):
    """The lowering rule of the CUDA call, or None where the reference serves."""
    if spec.implementation == "xla":
        return None
    several_nodes = _several_nodes(spec)
    if several_nodes and spec.implementation == "cuda":
        raise NotImplementedError(
            f'{target}: implementation="cuda" was asked for, but {several_nodes}; use implementation="xla" or None'
        )
    groups = group_lib.lowering_groups(ctx.module_context.axis_context, spec.axis_name)
    too_many = _too_many_experts(spec)
    if spec.implementation is None:
        # What the spec alone decides goes first: nobody then waits for records.
        reason = several_nodes or bootstrap.can_use_cuda(groups, spec.config) or too_many
        if reason:
            _log_once(reason)
            return None
    if too_many:
        raise ValueError(f'implementation="cuda" was asked for, but {too_many}; use fewer experts, or "xla"')
    bootstrap.prepare(groups, spec.config)
    return functools.partial(_lower, target, groups)


def _several_nodes(spec: Spec) -> str:
    if spec.num_nodes == 1:
        return ""
    return (
        f"Config.ranks_per_node={spec.ranks_per_node} splits {spec.num_ranks} ranks into {spec.num_nodes} nodes, and "
        "the CUDA transport over nodes comes with the nvshmem transport, which is not there yet"
    )


def _too_many_experts(spec: Spec) -> str:
    if _ffi.available():
        return ""
    most = _ffi.module().max_experts(spec.num_ranks)
    if spec.num_experts <= most:
        return ""
    return f"num_experts is {spec.num_experts}, and the kernels count at most {most} over {spec.num_ranks} ranks"


def _lower(target: str, groups, ctx, *operands, spec: Spec, quantize: str | None):
    attributes = _attributes(target, groups, ctx, spec, quantize)
    results = list(ctx.avals_out)
    num_public = len(results)
    if target == "jax_ep_combine":
        # Sums of each (source, token) on this rank, which peers fetch: memory that XLA owns for this call.
        rows = spec.num_slots(results[0].shape[0]) if spec.layout != "token" or quantize else 0
        results.append(_compat.result_aval(results[0], (rows, _crossing_bytes(results[0], 0, quantize)), np.uint8))
    rule = jax.ffi.ffi_lowering(target, has_side_effect=False)
    return rule(ctx.replace(avals_out=results), *operands, **attributes)[:num_public]


def _attributes(target: str, groups, ctx, spec: Spec, quantize: str | None) -> dict:
    """The attributes that every target takes; equal in all processes, so none of them says who we are."""
    config = spec.config
    row_bytes = _row_bytes(ctx.avals_out[0])
    side_bytes = 0 if target == "jax_ep_combine" else _row_bytes(ctx.avals_out[1])
    num_topk = _num_topk(target, ctx.avals_in)
    crossing = _crossing_bytes(ctx.avals_out[0], side_bytes, quantize)
    shape = _ffi.arena_shape(spec.num_ranks, spec.num_experts, crossing, num_topk, config.staging_bytes)
    numbers = dict(
        num_ranks=spec.num_ranks,
        num_experts=spec.num_experts,
        num_topk=num_topk,
        row_bytes=row_bytes,
        side_bytes=side_bytes,
        dtype=_DTYPE_CODE.get(ctx.avals_in[0].dtype.name, _OPAQUE),
        quantize=_QUANTIZE_CODE[quantize],
        layout=_LAYOUT_CODE[spec.layout],
        expert_alignment=spec.expert_alignment,
        zero_tail=spec.zero_tail,
        num_sms=config.num_sms or _default_num_sms(target, groups, ctx, spec, num_topk, crossing),
        staging_bytes=config.staging_bytes,
        force_staged=config.staging == "always",
        force_vector=config.copies == "vector",
        setup_timeout_ns=_nanoseconds(config.setup_timeout_s),
        first_timeout_ns=_nanoseconds(config.first_call_timeout_s),
        timeout_ns=_nanoseconds(config.timeout_s),
    )
    key = group_lib.arena_key(groups, shape)
    # XLA's instantiate binds too, but XLA does not call it for executables from the persistent cache (jax 0.11.2).
    bootstrap.bind(key, groups, spec.num_ranks, *shape, config.num_sms or 0, config.setup_timeout_s)
    return dict(
        key=key,
        groups=group_lib.flat_groups(groups),
        **{name: np.int64(value) for name, value in numbers.items()},
    )


def _default_num_sms(target: str, groups, ctx, spec: Spec, num_topk: int, row_bytes: int) -> int:
    """By the model of tuning.py; 0, the runtime's own default, in a program for another machine."""
    placement = bootstrap.placement(groups, spec.config)
    if placement is None:
        return 0
    is_combine = target == "jax_ep_combine"
    return tuning.default_num_sms(
        placement,
        op="combine" if is_combine else "dispatch",
        layout=spec.layout,
        num_ranks=spec.num_ranks,
        num_experts=spec.num_experts,
        num_topk=num_topk,
        num_tokens=(ctx.avals_out if is_combine else ctx.avals_in)[0].shape[0],
        row_bytes=row_bytes,
    )


def _row_bytes(rows) -> int:
    return rows.shape[1] * rows.dtype.itemsize


def _crossing_bytes(rows, side_bytes: int, quantize: str | None) -> int:
    """Of a row on its way, with what lies beside it: what a staging window must hold one of (call.h, layout.h)."""
    if quantize == "fp8_wire":  # WireRow: FP8 in groups of 512 channels, each with its four scales
        return -(-rows.shape[1] // 512) * 528
    return _row_bytes(rows) + -(-side_bytes // 16) * 16


def _num_topk(target: str, avals_in) -> int:
    """Columns of topk_idx: the third operand of dispatch, the first handle array of the others."""
    first = {"jax_ep_dispatch": 2, "jax_ep_redispatch": 3, "jax_ep_combine": 4}[target]
    return avals_in[first].shape[1]


def _nanoseconds(seconds: float) -> int:
    return max(1, min(round(seconds * 1e9), 2**58))


@functools.cache
def _log_once(reason: str) -> None:
    logging.getLogger("jax_ep").warning("using the pure-JAX implementation: %s", reason)
