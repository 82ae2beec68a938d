"""The halves of an exchange: start sends, done receives, and what lies between them runs meanwhile."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import jax

from jax_ep.combine import CombineCall, combine_call
from jax_ep.dispatch import DispatchCall, RedispatchCall, dispatch, dispatch_call
from jax_ep.layout import Handle, Recv


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pending:
    """An exchange whose rows were sent and are not yet received: what `dispatch_start` and `combine_start` return.

    A pytree of arrays with static metadata, like `Handle`; its done takes it, once. It holds the operands too, which
    therefore stay in memory until then.
    """

    ticket: jax.Array  # i32 [2] number of the exchange among those of its group, low word first
    call: DispatchCall | RedispatchCall | CombineCall


def dispatch_start(x, topk_idx=None, topk_weights=None, **settings: Any) -> Pending:
    """Sends the rows of a `dispatch`, without waiting for those of the others.

    ::

        dispatch_done(dispatch_start(...)) == dispatch(...)          bit for bit, gradients too

    Between the two no SM is held and nothing of them runs on any rank, so whatever lies there has the GPU to itself,
    while rows are on their way. (Over several nodes `Config.node_sms` SMs are held until all is put there.) XLA
    orders calls by data flow only; barriers say what shall run in between::

        pending = jax_ep.dispatch_start(x, topk_idx, topk_weights, num_experts=8, axis_name="ep")
        pending, shared = jax.lax.optimization_barrier((pending, shared))     # not before start
        shared = shared_expert(shared)
        pending, shared = jax.lax.optimization_barrier((pending, shared))     # not after done
        recv = jax_ep.dispatch_done(pending)

    Example:
      The two ranks of `dispatch`'s example; something else is computed while the rows are under way.

      >>> import jax, jax.numpy as jnp, jax_ep
      >>> from jax.sharding import Mesh, PartitionSpec as P
      >>> x = jnp.array([[1.0] * 4, [2.0] * 4, [3.0] * 4, [4.0] * 4])
      >>> topk_idx = jnp.array([[0, 2], [1, 0], [3, -1], [0, 3]])
      >>> def layer(x, topk_idx):
      ...     pending = jax_ep.dispatch_start(x, topk_idx, num_experts=4, axis_name="ep")
      ...     pending, x = jax.lax.optimization_barrier((pending, x))
      ...     shared = 10 * x
      ...     pending, shared = jax.lax.optimization_barrier((pending, shared))
      ...     recv = jax_ep.dispatch_done(pending)
      ...     pending = jax_ep.combine_start(recv.x, recv.handle)
      ...     return shared + jax_ep.combine_done(pending)
      >>> mesh = Mesh(jax.devices()[:2], ("ep",))
      >>> run = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
      >>> run(x, topk_idx)[:, 0].tolist()  # two experts each, token 3 one
      [12.0, 24.0, 33.0, 48.0]

    Args:
      x: as `dispatch` takes it.
      topk_idx: likewise.
      topk_weights: likewise.
      **settings: every keyword argument of `dispatch`, with its default, `handle=` included. `mode` counts for the
        calls that use the handle: the halves themselves always go by the slots of latency mode. `Config.max_pending`
        says how many exchanges of the group may be pending at a time.

    Returns:
      `Pending`, which `dispatch_done` takes.

    Raises:
      ValueError, TypeError: as `dispatch` raises them.
      NotImplementedError: under vmap (use `jax.lax.map`); when a program is lowered for CUDA whose shard_map leaves
        mesh axes automatic; likewise as `dispatch` raises it.

    Notes:
      Start and done must each run once for an exchange, in the same order on all ranks: a start whose done never runs
      keeps a place of `Config.max_pending` for good. In a loop they belong into the same iteration, and what start
      sends must come from its carry or its slices: JAX moves what does not change out of a scan that is
      differentiated, a start too, but not its done.
      Not more than `Config.max_pending` exchanges may be pending, and XLA may move starts that depend on nothing
      forward: tie independent exchanges together by barriers, or raise max_pending.
      Differentiable through done; the backward pass is that of `dispatch`, not split. What `jax.checkpoint` recomputes
      is a whole `dispatch` too.
      The pure-JAX implementation exchanges everything in done.
      Memory: on CUDA slots for twice `Config.max_pending` exchanges; `buffer_bytes(is_split=True)` says how many bytes.
      The operands live until done.

    Source:
      DeepEP's low-latency kernels split in the same places (https://github.com/deepseek-ai/DeepEP).
    """
    arguments = _DISPATCH.bind(x, topk_idx, topk_weights, **settings)
    arguments.apply_defaults()
    call = dispatch_call("dispatch_start", **arguments.arguments)
    return Pending(call.start(), call)


_DISPATCH = inspect.signature(dispatch)
dispatch_start.__signature__ = _DISPATCH.replace(return_annotation="Pending")  # type: ignore[attr-defined]


def dispatch_done(pending: Pending) -> Recv:
    """Receives the rows of a `dispatch_start`, once they are all there.

    Example: see `dispatch_start`.

    Args:
      pending: what `dispatch_start` returned, through barriers or loops if you like.

    Returns:
      `Recv`, as `dispatch` returns it.

    Raises:
      TypeError: pending is something else.
      EpError: see `jax_ep.errors`.

    Notes:
      Those of `dispatch_start`.
    """
    call = _call("dispatch_done", pending, (DispatchCall, RedispatchCall), "dispatch_start")
    return call.done(pending.ticket)


def combine_start(
    y: jax.Array,
    handle: Handle,
    *,
    weights: jax.Array | None = None,
    bias: jax.Array | None = None,
    quantize: str | None = None,
) -> Pending:
    """Sums the rows of each token on this rank and sends the sums, without waiting for those of the others.

    ::

        combine_done(combine_start(...)) == combine(...)             bit for bit, gradients too

    Example: see `dispatch_start`.

    Args:
      y: as `combine` takes it.
      handle: likewise, of a `dispatch` or `dispatch_done`.
      weights: likewise.
      bias: likewise.
      quantize: likewise.

    Returns:
      `Pending`, which `combine_done` takes.

    Raises:
      ValueError, TypeError: as `combine` raises them.
      NotImplementedError: as `dispatch_start` raises it.

    Notes:
      Those of `dispatch_start`.
    """
    call = combine_call("combine_start", y, handle, weights, bias, quantize)
    return Pending(call.start(), call)


def combine_done(pending: Pending) -> jax.Array:
    """Receives and adds up the sums of a `combine_start`, once they are all there.

    Example: see `dispatch_start`.

    Args:
      pending: what `combine_start` returned.

    Returns:
      [num_tokens, hidden], as `combine` returns it.

    Raises:
      TypeError: pending is something else.
      EpError: see `jax_ep.errors`.

    Notes:
      Those of `dispatch_start`.
    """
    return _call("combine_done", pending, (CombineCall,), "combine_start").done(pending.ticket)


def _call(op: str, pending, kinds: tuple[type, ...], start: str):
    if not isinstance(pending, Pending):
        raise TypeError(f"{op}: got {type(pending).__name__}, expected what {start} returned")
    if not isinstance(pending.call, kinds):
        other = start.replace("dispatch", "combine") if "dispatch" in start else start.replace("combine", "dispatch")
        raise TypeError(
            f"{op}: got the Pending of {other}, expected that of {start}; pass it to {other.replace('start', 'done')}"
        )
    return pending.call
