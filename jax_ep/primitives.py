"""The three primitives, their result types, and the implementation that each platform gets.

No JAX effect but the use of the mesh axes, and no side effect: equal calls may merge and unused ones vanish,
equally on all ranks; order comes from data flow.

Index arrays are i32. T tokens, K = num_topk, H = hidden, R ranks, L local experts, C = capacity,
S = C (layout "token") or R*T (layout "expert").

    dispatch_p(x [T,H], topk_idx [T,K], weights f32 [T,K] or [0,K]) ->
        recv_x [C,H], recv_weights f32 ([C] expert, [C,K] token, [0] / [0,K] without weights),
        slot_meta [S,K], slot_token [S], group_sizes [L], counts [L], stats [8],
        topk_idx [T,K] sanitised, slot [T,R], dst_row [T,K], recv_offsets [R+1]
    redispatch_p(x [T,H], weights f32 [T,K] or [0,K], *handle.arrays) -> recv_x, recv_weights
    combine_p(y [C,H], weights f32 [C] or [0], scalars f32 ([C] expert, [C,K] token) or [0] / [0,K],
              bias [T,H] or [0,H], *handle.arrays) ->
        out [T,H], out_scalars f32 [T,K] ([0,K] without scalars)

out_scalars[t,k] is the scalar of entry (t,k)'s row, 0 for entries that are not routed or were dropped: the way
of the cotangent of recv.weights back to its source.
"""

from __future__ import annotations

import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.interpreters import batching, mlir

from jax_ep import _compat, lowering, reference
from jax_ep.layout import NUM_STATS, Spec

__all__ = ["Spec", "combine_p", "dispatch_p", "redispatch_p"]


def _dispatch_results(x, topk_idx, weights, *, spec: Spec):
    num_tokens, num_topk = topk_idx.shape
    num_slots = spec.num_slots(num_tokens)
    return [
        *_recv_results(x, weights, num_topk, spec),
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


def _recv_results(x, weights, num_topk: int, spec: Spec):
    rows = spec.capacity if weights.shape[0] > 0 else 0
    weights_shape = (rows, num_topk) if spec.layout == "token" else (rows,)
    return [((spec.capacity, x.shape[1]), x.dtype), (weights_shape, jnp.float32)]


def _redispatch_results(x, weights, *handle, spec: Spec):
    return _recv_results(x, weights, handle[0].shape[1], spec)


def _combine_results(y, weights, scalars, bias, *handle, spec: Spec):
    num_tokens, num_topk = handle[0].shape
    rows = num_tokens if scalars.shape[0] > 0 else 0
    return [((num_tokens, y.shape[1]), y.dtype), ((rows, num_topk), jnp.float32)]


def _refuse_vmap(args, dims, **params):
    raise NotImplementedError(
        "jax_ep.dispatch and combine cannot be vmapped: each call is an exchange between ranks; "
        "use jax.lax.map (one exchange after the other), or fold the batch into num_tokens"
    )


def _make(name: str, results, implementation) -> jex_core.Primitive:
    """A primitive that exchanges data over `spec.axis_name`."""
    primitive = jex_core.Primitive(name)
    primitive.multiple_results = True

    def abstract_eval(*operands, spec: Spec):
        avals = [_compat.result_aval(operands[0], *r) for r in results(*operands, spec=spec)]
        return avals, {_compat.NamedAxisEffect(axis) for axis in spec.axis_name}

    primitive.def_effectful_abstract_eval(abstract_eval)
    batching.primitive_batchers[primitive] = _refuse_vmap
    reference_rule = _compat.lower_fun_unchecked(implementation)

    def lower_anywhere(ctx, *operands, spec: Spec):
        if spec.implementation == "cuda":
            raise ValueError(
                f'{name}: implementation="cuda" was asked for, but this program is lowered for '
                f'{"/".join(ctx.module_context.platforms)}; use implementation=None or "xla" there'
            )
        return reference_rule(ctx, *operands, spec=spec)

    def lower_cuda(ctx, *operands, spec: Spec):
        rule = lowering.choose(name, ctx, spec) or reference_rule
        return rule(ctx, *operands, spec=spec)

    mlir.register_lowering(primitive, lower_anywhere)
    mlir.register_lowering(primitive, lower_cuda, platform="cuda")
    return primitive


dispatch_p = _make("jax_ep_dispatch", _dispatch_results, reference.dispatch)
redispatch_p = _make("jax_ep_redispatch", _redispatch_results, reference.redispatch)
combine_p = _make("jax_ep_combine", _combine_results, reference.combine)
