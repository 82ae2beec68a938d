"""routing_layout: how many tokens go where, without sending any."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jax_ep import layout as layout_lib
from jax_ep import shapes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoutingLayout:
    """Where this rank's tokens go."""

    num_tokens_per_rank: jax.Array  # i32 [num_ranks] distinct tokens with an expert on that rank
    num_tokens_per_expert: jax.Array  # i32 [num_experts] entries, so an expert twice in a token counts twice
    is_token_in_rank: jax.Array  # bool [num_tokens, num_ranks]


def routing_layout(topk_idx: jax.Array, *, num_experts: int, axis_name: str | tuple[str, ...]) -> RoutingLayout:
    """Counts this rank's tokens per destination rank and per expert, without any communication.

    With e = topk_idx[t, k] and rank(e) = e // (num_experts / num_ranks)::

        is_token_in_rank[t, d]   = any_k(rank(e) == d)
        num_tokens_per_rank[d]   = number of t with is_token_in_rank[t, d]
        num_tokens_per_expert[n] = number of (t, k) with e == n

    Example:
      The two ranks of `dispatch`'s example.

      >>> import jax, jax.numpy as jnp, jax_ep
      >>> from jax.sharding import Mesh, PartitionSpec as P
      >>> def count(topk_idx):
      ...     return jax_ep.routing_layout(topk_idx, num_experts=4, axis_name="ep")
      >>> mesh = Mesh(jax.devices()[:2], ("ep",))
      >>> run = jax.jit(jax.shard_map(count, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
      >>> routing = run(jnp.array([[0, 2], [1, 0], [3, -1], [0, 3]]))
      >>> routing.num_tokens_per_rank.reshape(2, 2).tolist()
      [[2, 1], [1, 2]]
      >>> routing.num_tokens_per_expert.reshape(2, 4).tolist()
      [[2, 1, 1, 0], [1, 0, 0, 2]]
      >>> routing.is_token_in_rank.tolist()
      [[True, True], [True, False], [False, True], [True, True]]

    Args:
      topk_idx: [num_tokens, num_topk] any integer type, global expert ids; -1 and ids outside [-1, num_experts)
        are not counted.
      num_experts: experts of the whole group; a multiple of the number of ranks.
      axis_name: mesh axis of the expert-parallel group, or a tuple of axes (major first).

    Returns:
      `RoutingLayout` of this rank's own tokens.

    Raises:
      ValueError, TypeError: while tracing, for static mistakes, as `dispatch` raises them.

    Notes:
      Call it inside `jax.shard_map` that binds `axis_name`, whose size it needs. Integers only, so nothing to
      differentiate. Deterministic.

    Source:
      DeepEP's `get_dispatch_layout` (https://github.com/deepseek-ai/DeepEP).
    """
    names = shapes.axis_names("routing_layout", axis_name)
    num_ranks = shapes.num_ranks("routing_layout", names)
    num_experts = shapes.num_experts("routing_layout", num_experts, num_ranks, names)
    idx = shapes.topk_idx("routing_layout", topk_idx, num_experts)
    idx, _ = layout_lib.sanitise(idx, num_experts)
    in_rank = layout_lib.token_in_rank(idx, num_experts, num_ranks)
    return RoutingLayout(
        num_tokens_per_rank=jnp.sum(in_rank, axis=0, dtype=jnp.int32),
        num_tokens_per_expert=layout_lib.count_experts(idx, num_experts),
        is_token_in_rank=in_rank,
    )
