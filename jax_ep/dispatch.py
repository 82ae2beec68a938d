"""dispatch: send each token to the ranks that hold its experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_ep import _compat, autodiff, shapes
from jax_ep import layout as layout_lib
from jax_ep.config import Config
from jax_ep.layout import Handle, Recv, Spec


def dispatch(
    x: jax.Array,
    topk_idx: jax.Array | None = None,
    topk_weights: jax.Array | None = None,
    *,
    num_experts: int | None = None,
    axis_name: str | tuple[str, ...] | None = None,
    handle: Handle | None = None,
    layout: str = "expert",
    mode: str = "auto",
    capacity: int | None = None,
    expert_alignment: int = 1,
    quantize: str | None = None,
    zero_tail: bool = True,
    expert_map: jax.Array | None = None,
    window: jax.Array | None = None,
    config: Config | None = None,
    implementation: str | None = None,
) -> Recv:
    """Sends each token's row to the ranks that hold its experts."""
    shapes.not_implemented("dispatch", quantize=quantize, expert_map=expert_map, window=window)
    if handle is not None:
        shapes.only_with_routing(
            "dispatch",
            topk_idx=(topk_idx, None),
            topk_weights=(topk_weights, None),
            num_experts=(num_experts, None),
            axis_name=(axis_name, None),
            layout=(layout, "expert"),
            mode=(mode, "auto"),
            capacity=(capacity, None),
            expert_alignment=(expert_alignment, 1),
            config=(config, None),
            implementation=(implementation, None),
        )
        return _dispatch_again(x, handle, zero_tail)

    layout = shapes.layout("dispatch", layout)
    shapes.mode("dispatch", mode)
    names = shapes.axis_names("dispatch", axis_name)
    num_ranks = shapes.num_ranks("dispatch", names)
    num_experts = shapes.num_experts("dispatch", num_experts, num_ranks, names)
    x = shapes.payload("dispatch", "x", x, "[num_tokens, hidden]")
    idx = shapes.topk_idx("dispatch", topk_idx, num_experts, x.shape[0])
    weights = shapes.topk_weights("dispatch", topk_weights, idx.shape)
    num_tokens, num_topk = idx.shape
    spec = Spec(
        axis_name=names,
        num_ranks=num_ranks,
        num_experts=num_experts,
        layout=layout,
        capacity=shapes.capacity(
            "dispatch", capacity, expert_alignment, layout, num_ranks, num_tokens, num_topk, num_experts // num_ranks
        ),
        expert_alignment=int(expert_alignment),
        zero_tail=bool(zero_tail),
        implementation=shapes.implementation("dispatch", implementation),
        config=shapes.config("dispatch", config),
    )
    x, idx, weights = _compat.vary_together((x, idx, weights), names)
    recv_x, recv_weights, handle = autodiff.dispatch(spec, x, idx, weights)
    if topk_weights is None:
        recv_weights = None
    elif num_tokens == 0:  # no rank has a token, and the primitive cannot tell empty weights from absent ones
        shape = (spec.capacity, num_topk) if layout == "token" else (spec.capacity,)
        recv_weights = jnp.zeros_like(recv_weights, shape=shape)
    return _recv(recv_x, recv_weights, handle)


def _dispatch_again(x, handle: Handle, zero_tail: bool) -> Recv:
    handle = shapes.handle("dispatch", handle)
    num_tokens, num_topk = handle.topk_idx.shape
    x = shapes.rows_of_handle("dispatch", "x", x, num_tokens, "num_tokens")
    weights = jnp.zeros((0, num_topk), jnp.float32)
    x, weights, handle = _compat.vary_with_handle((x, weights), handle)
    recv_x, _ = autodiff.redispatch(bool(zero_tail), x, weights, handle)
    return _recv(recv_x, None, handle)


def _recv(recv_x, recv_weights, handle: Handle) -> Recv:
    is_token = handle.spec.layout == "token"
    return Recv(
        x=recv_x,
        weights=recv_weights,
        topk_idx=handle.slot_meta if is_token else None,
        group_sizes=None if is_token else handle.group_sizes,
        counts=handle.counts,
        demand=handle.stats[layout_lib.DEMAND],
        num_dropped=handle.stats[layout_lib.NUM_DROPPED],
        num_invalid=handle.stats[layout_lib.NUM_INVALID],
        num_masked=handle.stats[layout_lib.NUM_MASKED],
        num_windows=handle.stats[layout_lib.NUM_WINDOWS],
        handle=handle,
    )
