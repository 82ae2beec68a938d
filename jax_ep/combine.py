"""combine: bring the expert outputs back to their tokens and sum them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_ep import _compat, autodiff, shapes
from jax_ep.layout import Handle


def combine(
    y: jax.Array,
    handle: Handle,
    *,
    weights: jax.Array | None = None,
    bias: jax.Array | None = None,
    quantize: str | None = None,
) -> jax.Array:
    """Sums the expert outputs of each token at the rank that dispatched it."""
    shapes.not_implemented("combine", quantize=quantize)
    handle = shapes.handle("combine", handle)
    spec = handle.spec
    num_tokens, num_topk = handle.topk_idx.shape
    y = shapes.rows_of_handle("combine", "y", y, spec.capacity, "capacity")
    weights = shapes.combine_weights("combine", weights, spec)
    bias = shapes.bias("combine", bias, num_tokens, y)
    scalars = jnp.zeros((0, num_topk) if spec.layout == "token" else 0, jnp.float32)
    y, weights, scalars, bias, handle = _compat.vary_with_handle((y, weights, scalars, bias), handle)
    out, _ = autodiff.combine(y, weights, scalars, bias, handle)
    return out
