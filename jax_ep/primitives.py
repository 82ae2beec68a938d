"""The primitives, their result types, and the implementation that each platform gets.

No JAX effect but the use of the mesh axes, and no side effect: equal calls may merge and unused ones vanish,
equally on all ranks; order comes from data flow. The halves of an exchange do have a side effect for XLA, so that each
runs as often as written.

Index arrays are i32. T tokens, K = num_topk, H = hidden, W = width of the side array, R ranks, L local experts,
C = capacity, N = rows (L*C in layout "batched", where row i of expert l is l*C + i; else C), S = C (layout "token") or
R*T slots.

    dispatch_p(x [T,H], side [T,W] or [0,0], topk_idx [T,K], weights f32 [T,K] or [0,K], window [1]) ->
        recv_x [N,H], recv_side ([N,W], [0,0] without side),
        recv_weights f32 ([N], token [N,K]; [0] / [0,K] without weights),
        slot_meta [S,K], slot_token [S], group_sizes [L], counts [L], stats [8],
        topk_idx [T,K] sanitised, slot [T,R], dst_row [T,K], recv_offsets [R+1]
    redispatch_p(x [T,H], side [T,W] or [0,0], weights f32 [T,K] or [0,K], *handle.arrays) ->
        recv_x, recv_side, recv_weights
    combine_p(y [N,H], weights f32 [N] or [0], scalars f32 ([N], token [N,K]) or [0] / [0,K],
              bias [T,H] or [0,H], *handle.arrays) ->
        out [T,H], out_scalars f32 [T,K] ([0,K] without scalars)

The side array travels with the rows, as opaque as they are: any dtype, any width, 0 where no row lies. All three
take the static parameters `spec` and `quantize`: None; dispatches also "fp8" or "fp8_ue8m0", which without side deliver
x as `quantize.to_fp8` makes it (recv_x float8_e4m3fn, recv_side [C, H/128] float32 or float8_e8m0fnu); combine also
"fp8_wire", which sends the sums of each rank so. window: delivers rows [window * C, (window + 1) * C)
of those that are wanted, negative: the first C.

out_scalars[t,k] is the scalar of entry (t,k)'s row, 0 for entries that are not routed or were dropped: the way
of the cotangent of recv.weights back to its source.

Each operation also comes in two halves, which are given the same operands::

    *_start_p(*operands) -> ticket [2]: the number of the exchange, low word first; 0 in pure JAX
    *_done_p(ticket, *operands) -> the operation's results
"""

from __future__ import annotations

import functools

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from jax_ep import _compat, debug_checks, lowering, reference
from jax_ep.layout import NUM_STATS, Spec
from jax_ep.quantize import BLOCK, SCALE_DTYPES

__all__ = [
    "Spec",
    "combine_done_p",
    "combine_p",
    "combine_start_p",
    "dispatch_done_p",
    "dispatch_p",
    "dispatch_start_p",
    "redispatch_done_p",
    "redispatch_p",
    "redispatch_start_p",
]


def _dispatch_results(x, side, topk_idx, weights, window, *, spec: Spec, quantize: str | None):
    num_tokens, num_topk = topk_idx.shape
    num_slots = spec.num_slots(num_tokens)
    return [
        *_recv_results(x, side, weights, num_topk, spec, quantize),
        ((num_slots, num_topk), jnp.int32),
        ((num_slots,), jnp.int32),
        ((spec.num_local_experts,), jnp.int32),
        ((spec.num_local_experts,), jnp.int32),
        ((NUM_STATS,), jnp.int32),
        ((num_tokens, num_topk), jnp.int32),
        ((num_tokens, spec.num_ranks), jnp.int32),
        ((num_tokens, num_topk), jnp.int32),
        ((spec.num_ranks + 1,), jnp.int32),
    ]


def _recv_results(x, side, weights, num_topk: int, spec: Spec, quantize: str | None):
    rows = spec.num_rows if weights.shape[0] > 0 else 0
    weights_shape = (rows, num_topk) if spec.layout == "token" else (rows,)
    width, dtype, side_dtype = side.shape[1], x.dtype, side.dtype
    if quantize is not None:
        width, dtype, side_dtype = x.shape[1] // BLOCK, jnp.float8_e4m3fn, SCALE_DTYPES[quantize]
    side_shape = (spec.num_rows, width) if width > 0 else (0, 0)
    return [((spec.num_rows, x.shape[1]), dtype), (side_shape, side_dtype), (weights_shape, jnp.float32)]


def _redispatch_results(x, side, weights, *handle, spec: Spec, quantize: str | None):
    return _recv_results(x, side, weights, handle[0].shape[1], spec, quantize)


def _combine_results(y, weights, scalars, bias, *handle, spec: Spec, quantize: str | None):
    num_tokens, num_topk = handle[0].shape
    rows = num_tokens if scalars.shape[0] > 0 else 0
    return [((num_tokens, y.shape[1]), y.dtype), ((rows, num_topk), jnp.float32)]


def _refuse_vmap(args, dims, **params):
    raise NotImplementedError(
        "jax_ep.dispatch and combine cannot be vmapped: each call is an exchange between ranks; "
        "use jax.lax.map (one exchange after the other), or fold the batch into num_tokens"
    )


def _no_tangents(primitive, primals, tangents, **params):
    """The results are constants to JAX: autodiff.py gives them their derivative."""
    results = primitive.bind(*primals, **params)
    return results, [ad.Zero(jax.typeof(r).to_tangent_aval()) for r in results]


def _make(op: str, part: str, results, implementation) -> jex_core.Primitive:
    """A primitive that exchanges data over `spec.axis_name`: all of the operation, or its `part` "start" or "done"."""
    name = "_".join(filter(None, ("jax_ep", op, part)))
    primitive = jex_core.Primitive(name)
    primitive.multiple_results = True
    num_tickets = 1 if part == "done" else 0
    implementation = debug_checks.same_call_first(op, implementation)

    def whole_results(operands, spec: Spec, quantize: str | None):
        shapes = results(*operands, spec=spec, quantize=quantize)
        return [_compat.result_aval(operands[0], *shape) for shape in shapes]

    def abstract_eval(*operands, spec: Spec, quantize: str | None):
        if part == "start":
            avals = [_compat.result_aval(operands[0], (2,), jnp.int32)]
        else:
            avals = whole_results(operands[num_tickets:], spec, quantize)
        return avals, {_compat.NamedAxisEffect(axis) for axis in spec.axis_name}

    def run(*operands, spec: Spec, quantize: str | None):
        if part == "start":
            return [jnp.zeros(2, jnp.int32)]
        return implementation(*operands[num_tickets:], spec=spec, quantize=quantize)

    primitive.def_effectful_abstract_eval(abstract_eval)
    batching.primitive_batchers[primitive] = _refuse_vmap
    ad.primitive_jvps[primitive] = functools.partial(_no_tangents, primitive)
    reference_rule = _compat.lower_fun_unchecked(run)

    def lower_anywhere(ctx, *operands, spec: Spec, quantize: str | None):
        if spec.implementation == "cuda":
            raise ValueError(
                f'{name}: implementation="cuda" was asked for, but this program is lowered for '
                f'{"/".join(ctx.module_context.platforms)}; use implementation=None or "xla" there'
            )
        return reference_rule(ctx, *operands, spec=spec, quantize=quantize)

    def lower_cuda(ctx, *operands, spec: Spec, quantize: str | None):
        whole = tuple(ctx.avals_in[num_tickets:])
        call = lowering.Call(op, part, whole, tuple(whole_results(whole, spec, quantize)), spec, quantize)
        rule = lowering.choose(call, ctx)
        if rule is None:
            return reference_rule(ctx, *operands, spec=spec, quantize=quantize)
        return rule(ctx, *operands)

    mlir.register_lowering(primitive, lower_anywhere)
    mlir.register_lowering(primitive, lower_cuda, platform="cuda")
    return primitive


def _make_all(op: str, results, implementation) -> list[jex_core.Primitive]:
    whole, start, done = (_make(op, part, results, implementation) for part in ("", "start", "done"))
    _compat.keep_halves_together(start, done, whole)
    return [whole, start, done]


dispatch_p, dispatch_start_p, dispatch_done_p = _make_all("dispatch", _dispatch_results, reference.dispatch)
redispatch_p, redispatch_start_p, redispatch_done_p = _make_all("redispatch", _redispatch_results, reference.redispatch)
combine_p, combine_start_p, combine_done_p = _make_all("combine", _combine_results, reference.combine)
