"""The primitives with their derivatives: dispatch and combine are each other's transpose for a fixed routing.

Backward passes reuse the handle, so the routing is never exchanged twice. They call these same functions, so
second derivatives work. Integer operands have no cotangent. The primitives themselves have no derivative and stand
outside of the functions that have it: what JAX drops from a program, or recomputes, it decides about each of them.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_ep import _compat
from jax_ep import layout as layout_lib
from jax_ep.layout import Handle, Spec
from jax_ep.primitives import (
    combine_done_p,
    combine_p,
    combine_start_p,
    dispatch_done_p,
    dispatch_p,
    dispatch_start_p,
    redispatch_done_p,
    redispatch_p,
    redispatch_start_p,
)
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
    saved = checkpoint_name(lax.bitcast_convert_type(a, jnp.uint8), RECV_NAME)
    return lax.bitcast_convert_type(saved, a.dtype)


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


def _exchange(primitives: tuple, ticket, operands, spec: Spec, quantize: str | None):
    """What an exchange gives, or its second half where there is a ticket."""
    whole_p, done_p = primitives
    if ticket is None:
        return whole_p.bind(*operands, spec=spec, quantize=quantize)
    return done_p.bind(ticket, *operands, spec=spec, quantize=quantize)


def _start(start_p, operands, spec: Spec, quantize: str | None) -> jax.Array:
    """The ticket of an exchange, for the function below that has the same operands."""
    (ticket,) = start_p.bind(*operands, spec=spec, quantize=quantize)
    return ticket


def dispatch_start(spec: Spec, quantize: str | None, x, topk_idx, weights, window) -> jax.Array:
    """The ticket for `dispatch`."""
    return _start(dispatch_start_p, (*_operands(x), topk_idx, weights, window), spec, quantize)


def dispatch(
    spec: Spec, quantize: str | None, ticket, x, topk_idx, weights, window
) -> tuple[jax.Array | Quantized, jax.Array, Handle]:
    """Received rows and weights, and the handle; x is an array or a `Quantized`.

    ticket: of the start that sent the rows; None: there was none.
    """
    operands = *_operands(x), topk_idx, weights, window
    *recv, meta, token, sizes, counts, stats, topk_idx, slot, dst_row, offsets = _exchange(
        (dispatch_p, dispatch_done_p), ticket, operands, spec, quantize
    )
    handle = Handle(topk_idx, slot, dst_row, meta, token, offsets, sizes, counts, stats, spec=spec)
    handle = _named(handle, HANDLE_NAME)
    return *_deliver(quantize, x, weights, recv, handle), handle


def redispatch_start(zero_tail: bool, quantize: str | None, x, weights, handle: Handle) -> jax.Array:
    """The ticket for `redispatch`."""
    spec = dataclasses.replace(handle.spec, zero_tail=zero_tail)
    return _start(redispatch_start_p, (*_operands(x), weights, *handle.arrays), spec, quantize)


def redispatch(
    zero_tail: bool, quantize: str | None, ticket, x, weights, handle: Handle
) -> tuple[jax.Array | Quantized, jax.Array]:
    """Received rows and weights along the routing of the handle; x is an array or a `Quantized`, ticket as above."""
    spec = dataclasses.replace(handle.spec, zero_tail=zero_tail)
    operands = *_operands(x), weights, *handle.arrays
    recv = _exchange((redispatch_p, redispatch_done_p), ticket, operands, spec, quantize)
    return _deliver(quantize, x, weights, recv, handle)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _deliver(quantize: str | None, x, weights, recv, handle: Handle) -> tuple[jax.Array | Quantized, jax.Array]:
    """`recv`, rows, side and weights that were sent as x and weights, with their derivative."""
    rows, side, recv_weights = recv
    return _received(x, quantize, rows, side), recv_weights


def _deliver_fwd(quantize, x, weights, recv, handle):
    return _named_recv(*_deliver(quantize, x, weights, recv, handle)), handle


def _deliver_bwd(quantize, handle, cotangents):
    return *_return_rows(quantize, *cotangents, handle), None, None


_deliver.defvjp(_deliver_fwd, _deliver_bwd)


def combine_start(quantize: str | None, y, weights, scalars, bias, handle: Handle) -> jax.Array:
    """The ticket for `combine`."""
    return _start(combine_start_p, (y, weights, scalars, bias, *handle.arrays), handle.spec, quantize)


def combine(quantize: str | None, ticket, y, weights, scalars, bias, handle: Handle) -> tuple[jax.Array, jax.Array]:
    """Sums and scalars of the entries; weights, scalars and bias may be empty, ticket as above."""
    operands = y, weights, scalars, bias, *handle.arrays
    out = _exchange((combine_p, combine_done_p), ticket, operands, handle.spec, quantize)
    return _sum(y, weights, scalars, bias, tuple(out), handle)


@jax.custom_vjp
def _sum(y, weights, scalars, bias, out, handle: Handle) -> tuple[jax.Array, jax.Array]:
    """`out`, sums and scalars of the operands before it, with their derivative."""
    return out


def _sum_fwd(y, weights, scalars, bias, out, handle):
    # Without weights y is not needed backward: do not keep it.
    kept_y = y if weights.shape[0] > 0 else None
    out = _named(_sum(y, weights, scalars, bias, out, handle), OUT_NAME)
    return out, (kept_y, weights, bias.shape[0] > 0, handle)


def _sum_bwd(residuals, cotangents):
    y, weights, has_bias, handle = residuals
    g_out, g_out_scalars = cotangents
    g_rows, g_scalars = redispatch(True, None, None, g_out, g_out_scalars, handle)
    if y is None:
        g_y, g_weights = g_rows, None
    else:
        # Mask what goes into the products: y and weights may hold anything where no token lies.
        is_kept = layout_lib.is_row_kept(handle)
        g = g_rows.astype(jnp.float32)
        g_y = (jnp.where(is_kept, weights, 0)[:, None] * g).astype(y.dtype)
        g_weights = jnp.sum(jnp.where(is_kept[:, None], y.astype(jnp.float32), 0) * g, axis=1)
    return g_y, g_weights, g_scalars, g_out if has_bias else None, None, None


_sum.defvjp(_sum_fwd, _sum_bwd)


def _combine_plain(y, scalars, handle: Handle):
    """Transpose of a dispatch: unweighted sums, and the scalars back to their entries."""
    no_weights, no_bias = jnp.zeros(0, jnp.float32), jnp.zeros((0, y.shape[1]), y.dtype)
    y, no_weights, scalars, no_bias, handle = _compat.vary_with_handle((y, no_weights, scalars, no_bias), handle)
    return combine(None, None, y, no_weights, scalars, no_bias, handle)
