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
from jax_ep.quantize import Quantized, zero_carrier

HANDLE_NAME = "jax_ep_handle"  # routing: small, saves the second exchange of counts under jax.checkpoint
RECV_NAME = "jax_ep_recv"  # received rows and weights: large
OUT_NAME = "jax_ep_out"  # result of combine


def _named(tree, name: str):
    """Names for checkpoint policies: given in the forward rules, since a policy does not see into a call."""
    return jax.tree.map(lambda a: checkpoint_name(a, name), tree)


def _named_recv(recv_x, recv_weights):
    """Received rows and weights with their name; a carrier has none, since saving it would give it a cost."""
    if isinstance(recv_x, Quantized):
        data, scale = jax.tree.map(_named_bytes, (recv_x.data, recv_x.scale))
        return dataclasses.replace(recv_x, data=data, scale=scale), _named(recv_weights, RECV_NAME)
    return _named((recv_x, recv_weights), RECV_NAME)


def _named_bytes(a):
    # jax.checkpoint puts `reduce_precision` on the floats that it saves, which makes 256 and more in float8_e4m3fn NaN.
    if not jnp.issubdtype(a.dtype, jnp.floating) or a.dtype.itemsize > 1:
        return checkpoint_name(a, RECV_NAME)
    saved = checkpoint_name(jax.lax.bitcast_convert_type(a, jnp.uint8), RECV_NAME)
    return jax.lax.bitcast_convert_type(saved, a.dtype)


def _operands(x) -> tuple[jax.Array, jax.Array]:
    """Rows and side array of an array or a `Quantized`."""
    rows, scale = (x.data, x.scale) if isinstance(x, Quantized) else (x, None)
    side = jnp.zeros((0, 0), jnp.uint8) if scale is None else scale
    return _compat.vary_together((rows, side), ())


def _received(x, quantize: str | None, rows, side):
    """What `x` became: an array, or a `Quantized` with a carrier where there is a gradient to carry."""
    if isinstance(x, Quantized):
        carrier = None if x.carrier is None else zero_carrier(x.carrier, (len(rows), x.carrier.shape[1]))
        return Quantized(rows, None if x.scale is None else side, carrier)
    if quantize is not None:
        return Quantized(rows, side, zero_carrier(x, rows.shape))
    return rows


def _return_rows(quantize: str | None, g_x, g_weights, handle: Handle):
    """Cotangents of x (an array or a `Quantized`) and topk_weights, for those of what was received."""
    if not isinstance(g_x, Quantized):
        return _combine_plain(g_x, g_weights, handle)
    if g_x.carrier is not None:
        g_rows, g_weights = _combine_plain(g_x.carrier, g_weights, handle)
        return g_rows if quantize is not None else Quantized(None, None, g_rows), g_weights
    if len(g_weights) == 0:
        return None, None
    # Opaque rows without gradient, with weights that have one: rows as narrow as they can be go with them.
    _, g_weights = _combine_plain(zero_carrier(g_weights, (handle.spec.num_rows, 4)), g_weights, handle)
    return None, g_weights


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def dispatch(
    spec: Spec, quantize: str | None, x, topk_idx, weights, window
) -> tuple[jax.Array | Quantized, jax.Array, Handle]:
    """Received rows and weights, and the handle; x is an array or a `Quantized`."""
    rows, side, recv_weights, *routing = dispatch_p.bind(
        *_operands(x), topk_idx, weights, window, spec=spec, quantize=quantize
    )
    slot_meta, slot_token, group_sizes, counts, stats, topk_idx, slot, dst_row, recv_offsets = routing
    handle = Handle(topk_idx, slot, dst_row, slot_meta, slot_token, recv_offsets, group_sizes, counts, stats, spec=spec)
    return _received(x, quantize, rows, side), recv_weights, handle


def _dispatch_fwd(spec, quantize, x, topk_idx, weights, window):
    *recv, handle = dispatch(spec, quantize, x, topk_idx, weights, window)
    handle = _named(handle, HANDLE_NAME)
    return (*_named_recv(*recv), handle), handle


def _dispatch_bwd(spec, quantize, handle, cotangents):
    g_x, g_weights, _ = cotangents
    g_x, g_weights = _return_rows(quantize, g_x, g_weights, handle)
    return g_x, None, g_weights, None


dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def redispatch(
    zero_tail: bool, quantize: str | None, x, weights, handle: Handle
) -> tuple[jax.Array | Quantized, jax.Array]:
    """Received rows and weights along the routing of the handle; x is an array or a `Quantized`."""
    spec = dataclasses.replace(handle.spec, zero_tail=zero_tail)
    rows, side, recv_weights = redispatch_p.bind(*_operands(x), weights, *handle.arrays, spec=spec, quantize=quantize)
    return _received(x, quantize, rows, side), recv_weights


def _redispatch_fwd(zero_tail, quantize, x, weights, handle):
    return _named_recv(*redispatch(zero_tail, quantize, x, weights, handle)), handle


def _redispatch_bwd(zero_tail, quantize, handle, cotangents):
    return (*_return_rows(quantize, *cotangents, handle), None)


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
    g_rows, g_scalars = redispatch(True, None, g_out, g_out_scalars, handle)
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
