"""The primitives with their derivatives: dispatch and combine are each other's transpose for a fixed routing.

Backward passes reuse the handle, so the routing is never exchanged twice. They call these same functions, so
second derivatives work. Integer operands have no cotangent.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep import _compat
from jax_ep import layout as layout_lib
from jax_ep.layout import Handle, Spec
from jax_ep.primitives import combine_p, dispatch_p, redispatch_p

HANDLE_NAME = "jax_ep_handle"  # routing: small, saves the second exchange of counts under jax.checkpoint
RECV_NAME = "jax_ep_recv"  # received rows and weights: large
OUT_NAME = "jax_ep_out"  # result of combine


def _named(tree, name: str):
    """Names for checkpoint policies: given in the forward rules, since a policy does not see into a call."""
    return jax.tree.map(lambda a: checkpoint_name(a, name), tree)


def no_side() -> jax.Array:
    """The side array of rows that have none."""
    return jnp.zeros((0, 0), jnp.uint8)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def dispatch(
    spec: Spec, quantize: str | None, x, side, topk_idx, weights, window
) -> tuple[jax.Array, jax.Array, jax.Array, Handle]:
    """Received rows, side array and weights, and the handle."""
    recv_x, recv_side, recv_weights, *routing = dispatch_p.bind(
        x, side, topk_idx, weights, window, spec=spec, quantize=quantize
    )
    slot_meta, slot_token, group_sizes, counts, stats, topk_idx, slot, dst_row, recv_offsets = routing
    handle = Handle(topk_idx, slot, dst_row, slot_meta, slot_token, recv_offsets, group_sizes, counts, stats, spec=spec)
    return recv_x, recv_side, recv_weights, handle


def _dispatch_fwd(spec, quantize, x, side, topk_idx, weights, window):
    *recv, handle = dispatch(spec, quantize, x, side, topk_idx, weights, window)
    handle = _named(handle, HANDLE_NAME)
    return (*_named(recv, RECV_NAME), handle), handle


def _dispatch_bwd(spec, quantize, handle, cotangents):
    g_x, _, g_weights, _ = cotangents
    g_x, g_weights = _combine_plain(g_x, g_weights, handle)
    return g_x, None, None, g_weights, None


dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def redispatch(
    zero_tail: bool, quantize: str | None, x, side, weights, handle: Handle
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Received rows, side array and weights along the routing of the handle."""
    spec = dataclasses.replace(handle.spec, zero_tail=zero_tail)
    return tuple(redispatch_p.bind(x, side, weights, *handle.arrays, spec=spec, quantize=quantize))


def _redispatch_fwd(zero_tail, quantize, x, side, weights, handle):
    return _named(redispatch(zero_tail, quantize, x, side, weights, handle), RECV_NAME), handle


def _redispatch_bwd(zero_tail, quantize, handle, cotangents):
    g_x, _, g_weights = cotangents
    g_x, g_weights = _combine_plain(g_x, g_weights, handle)
    return g_x, None, g_weights, None


redispatch.defvjp(_redispatch_fwd, _redispatch_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def combine(quantize: str | None, y, weights, scalars, bias, handle: Handle) -> tuple[jax.Array, jax.Array]:
    """Sums and scalars of the entries; weights, scalars and bias may be empty."""
    return tuple(combine_p.bind(y, weights, scalars, bias, *handle.arrays, spec=handle.spec, quantize=quantize))


def _combine_fwd(quantize, y, weights, scalars, bias, handle):
    # Without weights y is not needed backward: do not keep it.
    kept_y = y if weights.shape[0] > 0 else None
    out = _named(combine(quantize, y, weights, scalars, bias, handle), OUT_NAME)
    return out, (kept_y, weights, bias.shape[0] > 0, handle)


def _combine_bwd(quantize, residuals, cotangents):
    y, weights, has_bias, handle = residuals
    g_out, g_out_scalars = cotangents
    side, handle = _compat.vary_with_handle((no_side(),), handle)
    g_rows, _, g_scalars = redispatch(True, None, g_out, side, g_out_scalars, handle)
    if y is None:
        g_y, g_weights = g_rows, None
    else:
        # Mask what goes into the products: y and weights may hold anything where no token lies.
        is_kept = layout_lib.is_row_kept(handle)
        g = g_rows.astype(jnp.float32)
        g_y = (jnp.where(is_kept, weights, 0)[:, None] * g).astype(y.dtype)
        g_weights = jnp.sum(jnp.where(is_kept[:, None], y.astype(jnp.float32), 0) * g, axis=1)
    return g_y, g_weights, g_scalars, g_out if has_bias else None, None


combine.defvjp(_combine_fwd, _combine_bwd)


def _combine_plain(y, scalars, handle: Handle):
    """Transpose of a dispatch: unweighted sums, and the scalars back to their entries."""
    no_weights, no_bias = jnp.zeros(0, jnp.float32), jnp.zeros((0, y.shape[1]), y.dtype)
    y, no_weights, scalars, no_bias, handle = _compat.vary_with_handle((y, no_weights, scalars, no_bias), handle)
    return combine(None, y, no_weights, scalars, no_bias, handle)
