"""Expert computation of the layer in `nn`, one function per layout of the received rows.

Grouped products take the layouts "expert" and "token", where rows past the last one may hold anything; a batched
product takes "batched", where rows that hold no token are 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jax_ep.grouped_gemm import grouped_matmul
from jax_ep.layout import Recv

if TYPE_CHECKING:
    from jax_ep.nn import MoEConfig, MoEParams


def apply_experts(params: MoEParams, recv: Recv, config: MoEConfig) -> jax.Array:
    """Runs the local experts on what `dispatch` delivered.

    Args:
      params: the layer's; of `router` nothing is read.
      recv: rows in `config.layout`.
      config: the layer's.

    Returns:
      Rows for `combine`, of the shape and dtype of recv.x. In layout "token" the weights are applied.
    """
    if config.layout == "token":
        return _apply_to_tokens(params, recv.x, recv.topk_idx, recv.weights, config)
    if config.layout == "batched":
        return _apply_to_batches(params, recv.x, config)
    return _apply_to_groups(params, recv.x, recv.group_sizes, config)


def _apply_to_groups(params: MoEParams, rows: jax.Array, group_sizes: jax.Array, config: MoEConfig) -> jax.Array:
    """Experts on `rows` [m, hidden] sorted by local expert; rows past the last group give 0."""

    def matmul(a, w):
        return grouped_matmul(a, w.astype(rows.dtype), group_sizes, implementation=config.grouped_matmul)

    return _expert(params, rows, matmul, config)


def _apply_to_batches(params: MoEParams, rows: jax.Array, config: MoEConfig) -> jax.Array:
    """Experts on `rows` [num_local_experts, capacity, hidden]; rows that hold no token must be 0."""
    return _expert(params, rows, lambda a, w: jnp.einsum("ech,ehf->ecf", a, w.astype(rows.dtype)), config)


def _expert(params: MoEParams, rows: jax.Array, matmul: Callable, config: MoEConfig) -> jax.Array:
    up = matmul(rows, params.w_up)
    inner = jax.nn.silu(matmul(rows, params.w_gate)) * up if config.activation == "swiglu" else jax.nn.gelu(up)
    return matmul(inner, params.w_down)


def _apply_to_tokens(params: MoEParams, x, topk_idx, weights, config: MoEConfig) -> jax.Array:
    """Layout "token": sorts the (token, k) pairs by local expert, applies the experts, sums per token in f32."""
    num_tokens, num_topk = topk_idx.shape
    num_local = params.w_up.shape[0]
    key = jnp.where(topk_idx < 0, num_local, topk_idx).reshape(-1)
    # The router never picks an expert twice for a token, so not every pair can be local.
    num_rows = num_tokens * min(num_topk, num_local)
    order = jnp.argsort(key, stable=True)[:num_rows].astype(jnp.int32)
    pairs = jnp.arange(num_rows, dtype=jnp.int32)
    place = jnp.full(key.shape, -1, jnp.int32).at[order].set(pairs)
    place = jnp.where(topk_idx < 0, -1, place.reshape(topk_idx.shape))
    group_sizes = jnp.sum(key[:, None] == jnp.arange(num_local, dtype=jnp.int32)[None], axis=0, dtype=jnp.int32)

    token = jnp.where(pairs < jnp.sum(group_sizes), order // num_topk, -1)
    rows = _apply_to_groups(params, _expand(x, token, place), group_sizes, config)
    weighted = rows.astype(jnp.float32) * weights.reshape(-1)[order][:, None]
    return _contract(weighted, token, place).astype(x.dtype)


# Rows of tokens to rows of pairs and back: pair p belongs to token[p], (token t, k) is pair place[t, k], -1 is none.
# Each is the transpose of the other and both are gathers: summing by scatter-add would make the result depend on the
# order of atomics.
@jax.custom_vjp
def _expand(x: jax.Array, token: jax.Array, place: jax.Array) -> jax.Array:
    """`out[p] = x[token[p]]`, 0 where token is -1."""
    del place
    return jnp.where(token[:, None] >= 0, x[jnp.maximum(token, 0)], jnp.zeros((), x.dtype))


@jax.custom_vjp
def _contract(rows: jax.Array, token: jax.Array, place: jax.Array) -> jax.Array:
    """`out[t] = sum_k rows[place[t, k]]` in f32, in k order; place -1 adds 0."""
    del token
    total = jnp.zeros((place.shape[0], rows.shape[1]), jnp.float32)
    for k in range(place.shape[1]):
        row = rows[jnp.maximum(place[:, k], 0)]
        total = total + jnp.where(place[:, k, None] >= 0, row, 0).astype(jnp.float32)
    return total.astype(rows.dtype)


_expand.defvjp(
    lambda x, token, place: (_expand(x, token, place), (token, place)),
    lambda saved, g: (_contract(g, *saved), None, None),
)
_contract.defvjp(
    lambda rows, token, place: (_contract(rows, token, place), (token, place)),
    lambda saved, g: (_expand(g, *saved), None, None),
)
