"""combine: bring the expert outputs back to their tokens and sum them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jax_ep import _compat, autodiff, quantize_shapes, shapes
from jax_ep.layout import Handle


def combine(
    y: jax.Array,
    handle: Handle,
    *,
    weights: jax.Array | None = None,
    bias: jax.Array | None = None,
    quantize: str | None = None,
) -> jax.Array:
    """Sums the expert outputs of each token at the rank that dispatched it.

    With row(t, k) the row of recv.x that entry (t, k) of the dispatch became::

        out[t] = sum over ranks d of round(sum over k with expert on d of weights[row] * y[row]) + bias[t]

    Both sums are in float32 and in this order (ranks ascending, k ascending, starting at +0); `round` is to the
    dtype of y, as is the result. In layout "token" the inner sum is the row itself. Entries that were not routed
    or were dropped add nothing; a token without any gives 0 (plus bias). With several nodes
    (`Config.ranks_per_node`) the ranks' sums are added up in two levels::

        out[t] = sum over nodes of round(sum over ranks d of the node of round(...)) + bias[t]

    Example:
      The two ranks of `dispatch`'s example; expert e multiplies by e + 1.

      >>> import jax, jax.numpy as jnp, jax_ep
      >>> from jax.sharding import Mesh, PartitionSpec as P
      >>> x = jnp.array([[1.0] * 4, [2.0] * 4, [3.0] * 4, [4.0] * 4])
      >>> topk_idx = jnp.array([[0, 2], [1, 0], [3, -1], [0, 3]])
      >>> topk_weights = jnp.array([[0.75, 0.25], [0.5, 0.5], [1.0, 0.0], [0.25, 0.75]])
      >>> def layer(x, topk_idx, topk_weights):
      ...     recv = jax_ep.dispatch(x, topk_idx, topk_weights, num_experts=4, axis_name="ep")
      ...     expert = 2 * jax.lax.axis_index("ep") + jnp.repeat(jnp.arange(2), recv.group_sizes, total_repeat_length=8)
      ...     y = recv.x * (expert + 1)[:, None]
      ...     return jax_ep.combine(y, recv.handle, weights=recv.weights)
      >>> mesh = Mesh(jax.devices()[:2], ("ep",))
      >>> out = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))(x, topk_idx, topk_weights)
      >>> out[:, 0].tolist()  # 0.75*1*1 + 0.25*3*1, 0.5*2*2 + 0.5*1*2, 1*4*3, 0.25*1*4 + 0.75*4*4
      [1.5, 3.0, 12.0, 13.0]

    Args:
      y: [capacity, hidden] (layout "batched": [num_local_experts, capacity, hidden]) bfloat16, float16 or float32,
        rows as in recv.x; hidden and dtype may differ from x's, rows are a positive multiple of 16 bytes. Rows that
        hold no token are never read.
      handle: `recv.handle` of the dispatch whose rows y are. An older handle stays right after newer dispatches.
      weights: [capacity] ("batched": [num_local_experts, capacity]) any float type, used as float32, usually
        recv.weights; None: 1. In layout "token" it is a TypeError: the expert computation applies recv.weights there.
      bias: [num_tokens, hidden] in y's dtype, added once in float32; None: nothing.
      quantize: None, or "fp8_wire": the rounded sum of each rank crosses as `jax_ep.quantize(..., "fp8")` makes it and
        is dequantised to float32 where it arrives (hidden is a multiple of 128). Each adds an error of at most
        2**-4 + 2**-13 of itself, or 2**-10 + 2**-20 of its block's scale (largest magnitude / 448) where that is
        more; to a whole token at most 0.0627 times the sum of the norms of its sums, usually 1 to 3 % of its norm.
        The sums of nodes are rounded to y's dtype and not quantised.

    Returns:
      [num_tokens, hidden] in y's dtype, on the rank that dispatched the tokens.

    Raises:
      ValueError, TypeError: while tracing, for static mistakes; the text says what was got, what was expected
        and what to change.
      NotImplementedError: under vmap (use `jax.lax.map`).
      EpError: see `jax_ep.errors`; from a call on CUDA devices that fails at run time, or from its set-up.

    Notes:
      Call it inside the `jax.shard_map` that made the handle; axis, implementation and config are inherited.
      Differentiable in y, weights and bias, reverse mode. The cotangent of weights reaches topk_weights through
      recv.weights. Gradients pass straight through "fp8_wire" and are not quantised.
      Deterministic: equal bits on every run. Unweighted sums are also equal between implementations; weighted
      ones within num_topk * 2**-23 * sum |w*y| plus one ulp per rounding, because XLA may fuse multiply and add.
      Under `jax.checkpoint` the result is named "jax_ep_out".
      Memory: the result, and in throughput mode [num_ranks * num_tokens, hidden] of partial sums, except in layout
      "token" without quantize.

    Source:
      The contract follows DeepEP's combine (https://github.com/deepseek-ai/DeepEP), with weights applied here on
      request and a rounding order that does not depend on arrival.
    """
    return combine_call("combine", y, handle, weights, bias, quantize).done()


def combine_call(op: str, y, handle: Handle, weights, bias, quantize: str | None) -> CombineCall:
    """The arguments of `combine`, checked, before anything moves; errors begin with `op`."""
    handle = dataclasses.replace(shapes.handle(op, handle), load=None)  # no residual of the backward pass
    spec = handle.spec
    num_tokens, num_topk = handle.topk_idx.shape
    y = shapes.expert_rows(op, y, spec)
    if quantize is not None:
        quantize_shapes.kind(op, quantize, ("fp8_wire",))
        quantize_shapes.quantizable(op, "y", y)
    weights = shapes.combine_weights(op, weights, spec)
    bias = shapes.bias(op, bias, num_tokens, y)
    scalars = jnp.zeros((0, num_topk) if spec.layout == "token" else 0, jnp.float32)
    return CombineCall(*_compat.vary_with_handle((y, weights, scalars, bias), handle), quantize)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CombineCall:
    """A combine: what its primitive takes."""

    y: jax.Array  # flat
    weights: jax.Array  # empty where there are none, as are the next two
    scalars: jax.Array
    bias: jax.Array
    handle: Handle
    quantize: str | None = dataclasses.field(metadata={"static": True})

    @property
    def _operands(self) -> tuple:
        return self.y, self.weights, self.scalars, self.bias, self.handle

    def start(self) -> jax.Array:
        """Sends the sums; the ticket for `done`."""
        return autodiff.combine_start(self.quantize, *self._operands)

    def done(self, ticket: jax.Array | None = None) -> jax.Array:
        """The sums of all ranks, of which this one sends its own where there is no ticket."""
        return autodiff.combine(self.quantize, ticket, *self._operands)[0]
