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
    """Counts this rank's tokens per destination rank and per expert."""
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
