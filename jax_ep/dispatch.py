"""dispatch: send each token to the ranks that hold its experts."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jax_ep import _compat, autodiff, debug_checks, experts, quantize_shapes, shapes
from jax_ep import layout as layout_lib
from jax_ep.config import Config
from jax_ep.layout import Handle, Recv, Spec
from jax_ep.quantize import Quantized

_STATIC = {"static": True}


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
    num_physical_experts: int | None = None,
    window: jax.Array | int | None = None,
    config: Config | None = None,
    implementation: str | None = None,
) -> Recv:
    """Sends each token's row to the ranks that hold its experts.

    Expert e lives on rank e // (num_experts / num_ranks), where ranks are positions along `axis_name`. A rank
    receives every row that was routed to one of its experts, in an order that all implementations share::

        layout="expert":  for e in local experts: for source rank: for token: for k:
                              if topk_idx[token, k] == e: next row = x[token]
                          (then pad the group of e with zero rows to a multiple of expert_alignment)
        layout="token":   for source rank: for token:
                              if some topk_idx[token, :] is local: next row = x[token]
        layout="batched": as "expert", but every local expert has `capacity` rows of its own, x[e, 0], x[e, 1], ...

    Weights travel with their rows and are not applied. A token that has several experts on one rank becomes one row
    in layout "token", one row per expert in the others.

    Example:
      Two ranks with two tokens each and four experts; experts 0 and 1 live on rank 0, 2 and 3 on rank 1.

      >>> import jax, jax.numpy as jnp, jax_ep
      >>> from jax.sharding import Mesh, PartitionSpec as P
      >>> x = jnp.array([[1.0] * 4, [2.0] * 4, [3.0] * 4, [4.0] * 4])  # tokens 1, 2 on rank 0; 3, 4 on rank 1
      >>> topk_idx = jnp.array([[0, 2], [1, 0], [3, -1], [0, 3]])  # token 3 has one expert only
      >>> topk_weights = jnp.array([[0.75, 0.25], [0.5, 0.5], [1.0, 0.0], [0.25, 0.75]])
      >>> def receive(x, topk_idx, topk_weights):
      ...     recv = jax_ep.dispatch(x, topk_idx, topk_weights, num_experts=4, axis_name="ep")
      ...     return recv.x[:, 0], recv.weights, recv.group_sizes
      >>> mesh = Mesh(jax.devices()[:2], ("ep",))
      >>> run = jax.jit(jax.shard_map(receive, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
      >>> rows, weights, group_sizes = run(x, topk_idx, topk_weights)
      >>> rows.reshape(2, 8).tolist()  # expert 0: tokens 1, 2, 4; expert 1: token 2; then expert 2, expert 3
      [[1.0, 2.0, 4.0, 2.0, 0.0, 0.0, 0.0, 0.0], [1.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0]]
      >>> weights.reshape(2, 8).tolist()
      [[0.75, 0.5, 0.25, 0.5, 0.0, 0.0, 0.0, 0.0], [0.25, 1.0, 0.75, 0.0, 0.0, 0.0, 0.0, 0.0]]
      >>> group_sizes.reshape(2, 2).tolist()
      [[3, 1], [1, 2]]

    Args:
      x: [num_tokens, hidden] bfloat16, float16 or float32; rows are a positive multiple of 16 bytes. num_tokens
        is the same on all ranks and may be 0; ragged inputs use -1 in topk_idx. Or a `jax_ep.Quantized` pair of any
        format, which travels as opaque bytes: data [num_tokens, any] of whole 16 bytes a row, scale [num_tokens, any
        width] or None, carrier [num_tokens, hidden] or None. recv.x is such a pair then.
      topk_idx: [num_tokens, num_topk] any integer type, global expert ids. -1: not routed, nothing is sent for
        this entry and its weight is never read. Ids outside [-1, num_experts) count as -1 and in num_invalid (an
        error under `Config.debug_checks`). The same expert twice in a token is two rows. num_topk is at most 32 and at
        most num_experts.
      topk_weights: [num_tokens, num_topk] any float type, used as float32; None: recv.weights is None.
      num_experts: experts of the whole group; a multiple of the number of ranks, except with expert_map.
      axis_name: mesh axis of the expert-parallel group, or a tuple of axes (major first).
      handle: `recv.handle` of an earlier dispatch: sends a second tensor along the same routing, without
        exchanging it again. Only x, quantize and zero_tail go with it; everything else comes from the handle.
      layout: "expert" (rows grouped by local expert, what grouped matrix products take), "token" (one row per
        token that reaches this rank, with its local ids and weights beside it) or "batched" (equally many rows for
        every local expert, what batched matrix products take).
      mode: the protocol of this call and of all that use its handle; results are the same, bit for bit. "throughput":
        rows go straight into the receivers' results, once the ranks have told each other how many they are. "latency":
        rows go at once into memory that the receiver keeps for them (`buffer_bytes`), which it then copies; for few
        tokens. "auto": by the sizes of each call and by where the ranks are (docs/concepts.md, Modes). In the pure-JAX
        implementation all are the same.
      capacity: rows of the receive array, a multiple of expert_alignment. None: the worst case, so that nothing
        is ever dropped: num_ranks * num_tokens * num_topk rows plus padding ("expert"), num_ranks * num_tokens
        ("token"). In layout "batched" it counts the rows of each local expert, None: num_ranks * num_tokens, which
        drops nothing unless an expert repeats within a token. That is large; recv.demand says how many rows a step
        really wanted. Rows beyond the capacity are dropped in the order above: they give 0 in combine and in
        gradients, and count in num_dropped.
      expert_alignment: layout "expert": every group starts at a multiple of it. Default 1: no padding.
      zero_tail: whether rows past the last group ("batched": past counts[e] of each expert) are 0 rather than
        undefined. Default True; the cost is one write of these rows. Padding inside groups is always 0, and
        gradients are exact either way.
      quantize: None, or how rows are quantised before they cross, each with one scale per 128 channels (hidden is a
        multiple of 128; `jax_ep.quantize` states the arithmetic). "fp8": float8_e4m3fn with float32 scales, recv.x is
        `jax_ep.Quantized`. "fp8_ue8m0": likewise with power-of-two scales. "fp8_wire": as "fp8", and recv.x is
        dequantised to x's dtype, which takes one more pass over the rows at the receiver.
      expert_map: [num_experts, max_replicas] any integer type, may be traced, the same on all ranks: physical ids
        of each logical expert's replicas, padded with -1 (see `jax_ep.balance`). topk_idx and num_experts are then
        logical; rows, groups and ids at the receiver are physical, and physical expert p lives on rank
        p // (num_physical_experts / num_ranks). Entry (token, k) of rank r takes replica number
        (r + token) % (replicas of its expert). Ids outside [0, num_physical_experts) are no replicas; entries of an
        expert without any count as -1 and in num_masked. None: each expert is its own only replica.
      num_physical_experts: static int, a multiple of the number of ranks; goes with expert_map only.
      window: int or traced integer scalar, equal on all ranks: delivers rows [window * capacity, (window + 1) *
        capacity) of the order above ("batched": of each expert's) instead of the first ones. recv.num_windows such
        windows hold all rows; one past them is empty. Rows of other windows are neither dropped nor kept here: they
        give 0 in combine, so that the sum over windows is complete (`windowed` makes it). None: window 0, and what is
        beyond it is dropped.
      config: `jax_ep.Config`, the same on all ranks; None: its defaults.
      implementation: "cuda" (never falls back), "xla" (pure JAX, every backend), or None: cuda where all ranks of
        the group can use it, else xla, logged once.

    Returns:
      `Recv`. Valid rows of recv.x are those of the groups; see there for each field.

    Raises:
      ValueError, TypeError: while tracing, for static mistakes (shapes, dtypes, an axis that is not bound here,
        ...); the text says what was got, what was expected and what to change. ValueError also with
        implementation="cuda" when a program is lowered for another backend.
      NotImplementedError: under vmap (use `jax.lax.map`), and with implementation="cuda" when a program is
        lowered that the kernels do not run over several nodes (`Config.ranks_per_node`).
      EpError: see `jax_ep.errors`; from a call on CUDA devices that fails at run time, or from its set-up.

    Notes:
      Call it inside `jax.shard_map` that binds `axis_name`; other mesh axes may be manual or automatic. All
      ranks of a group call it equally often, with equal static arguments.
      Differentiable in x and topk_weights, reverse mode; the backward pass reuses the handle. Deterministic:
      equal inputs give equal bits on every run and implementation.
      Through FP8 the gradient goes straight: the cotangent of `recv.x.dequantize()` returns, not quantised, to x, or
      to the carrier of a pair. Where rows promise 0, data and scale of a pair have bytes 0.
      Under `jax.checkpoint` the handle's arrays are named "jax_ep_handle" and the received rows and weights
      "jax_ep_recv". A policy that saves both keeps the backward pass from dispatching again; otherwise it does so
      with equal results.
      Memory: the result, and on CUDA per group flags and a staging window (`Config.staging_bytes`), in latency mode
      slots, over several nodes chunks (`Config.node_bytes`): `buffer_bytes` counts them. The pure-JAX implementation
      also gathers [num_ranks * num_tokens, hidden].

    Source:
      The contract follows DeepEP's dispatch (https://github.com/deepseek-ai/DeepEP); row order and group sizes
      are those that `jax.lax.ragged_dot` takes. Unlike there, rows are grouped by expert on request, any number
      of ranks works, and the routing travels in a handle of plain arrays.
    """
    return dispatch_call(
        "dispatch",
        x,
        topk_idx,
        topk_weights,
        num_experts=num_experts,
        axis_name=axis_name,
        handle=handle,
        layout=layout,
        mode=mode,
        capacity=capacity,
        expert_alignment=expert_alignment,
        quantize=quantize,
        zero_tail=zero_tail,
        expert_map=expert_map,
        num_physical_experts=num_physical_experts,
        window=window,
        config=config,
        implementation=implementation,
    ).done()


def dispatch_call(
    op, x, topk_idx, topk_weights, *, num_experts, axis_name, handle, layout, mode, capacity, expert_alignment,
    quantize, zero_tail, expert_map, num_physical_experts, window, config, implementation,
) -> DispatchCall | RedispatchCall:  # fmt: skip
    """The arguments of `dispatch`, checked, before anything moves; errors begin with `op`."""
    if handle is not None:
        shapes.only_with_routing(
            op,
            topk_idx=(topk_idx, None),
            topk_weights=(topk_weights, None),
            num_experts=(num_experts, None),
            axis_name=(axis_name, None),
            layout=(layout, "expert"),
            mode=(mode, "auto"),
            capacity=(capacity, None),
            expert_alignment=(expert_alignment, 1),
            expert_map=(expert_map, None),
            num_physical_experts=(num_physical_experts, None),
            window=(window, None),
            config=(config, None),
            implementation=(implementation, None),
        )
        return _again(op, x, handle, shapes.zero_tail(op, zero_tail), quantize)

    layout = shapes.layout(op, layout)
    mode = shapes.mode(op, mode)
    names = shapes.axis_names(op, axis_name)
    num_ranks = shapes.num_ranks(op, names)
    expert_map, num_experts, num_physical = shapes.physical_experts(
        op, expert_map, num_physical_experts, num_experts, num_ranks, names
    )
    x, x_shape = _rows(op, x, quantize)
    idx = shapes.topk_idx(op, topk_idx, num_experts, x_shape[0])
    weights = shapes.topk_weights(op, topk_weights, idx.shape)
    num_tokens, num_topk = idx.shape
    spec = Spec(
        axis_name=names,
        num_ranks=num_ranks,
        num_experts=num_physical,
        layout=layout,
        capacity=shapes.capacity(
            op, capacity, expert_alignment, layout, num_ranks, num_tokens, num_topk, num_physical // num_ranks
        ),
        expert_alignment=int(expert_alignment),
        zero_tail=shapes.zero_tail(op, zero_tail),
        mode=mode,
        implementation=shapes.implementation(op, implementation),
        config=shapes.config(op, config),
    )
    if spec.config.debug_checks:
        debug_checks.watch_ids(idx, num_experts, names)
    logical_idx, num_masked = None, None
    if expert_map is not None:
        logical_idx = idx
        idx, num_masked = experts.choose_replicas(idx, expert_map, num_physical, names)
    x, idx, weights, window = _compat.vary_together((x, idx, weights, shapes.window(op, window)), names)
    has_weights = topk_weights is not None
    return DispatchCall(x, idx, weights, window, logical_idx, num_masked, spec, num_experts, quantize, has_weights)


def _again(op: str, x, handle: Handle, zero_tail: bool, quantize: str | None) -> RedispatchCall:
    handle = shapes.handle(op, handle)
    num_tokens, num_topk = handle.topk_idx.shape
    x, x_shape = _rows(op, x, quantize)
    shapes.num_rows_of_handle(op, "x", x_shape, num_tokens, "num_tokens")
    weights = jnp.zeros((0, num_topk), jnp.float32)
    x, weights, routing = _compat.vary_with_handle((x, weights), dataclasses.replace(handle, load=None))
    return RedispatchCall(x, weights, dataclasses.replace(routing, load=handle.load), zero_tail, quantize)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DispatchCall:
    """A dispatch that routes: what its primitive takes, and what to make of the results."""

    x: jax.Array | Quantized
    topk_idx: jax.Array  # physical ids
    weights: jax.Array  # [0, num_topk] where there are none
    window: jax.Array
    logical_idx: jax.Array | None  # with an expert_map; else topk_idx has them
    num_masked: jax.Array | None
    spec: Spec = dataclasses.field(metadata=_STATIC)
    num_experts: int = dataclasses.field(metadata=_STATIC)  # logical
    quantize: str | None = dataclasses.field(metadata=_STATIC)
    has_weights: bool = dataclasses.field(metadata=_STATIC)

    def start(self) -> jax.Array:
        """Sends the rows; the ticket for `done`."""
        operands = self.x, self.topk_idx, self.weights, self.window
        return autodiff.dispatch_start(self.spec, _quantized_as(self.quantize), *operands)

    def done(self, ticket: jax.Array | None = None) -> Recv:
        """Receives the rows, which it sends itself where there is no ticket."""
        operands = self.x, self.topk_idx, self.weights, self.window
        x, weights, handle = autodiff.dispatch(self.spec, _quantized_as(self.quantize), ticket, *operands)
        logical_idx = self.topk_idx if self.logical_idx is None else self.logical_idx
        handle = experts.with_load(handle, logical_idx, self.num_experts, self.num_masked)
        num_tokens, num_topk = self.topk_idx.shape
        if not self.has_weights:
            weights = None
        elif num_tokens == 0:  # no rank has a token, and the primitive cannot tell empty weights from absent ones
            rows = self.spec.num_rows
            weights = jnp.zeros_like(weights, shape=(rows, num_topk) if self.spec.layout == "token" else (rows,))
        return _recv(x, weights, handle, self.quantize)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RedispatchCall:
    """A dispatch along a handle, likewise."""

    x: jax.Array | Quantized
    weights: jax.Array  # [0, num_topk]: a second tensor has none
    handle: Handle
    zero_tail: bool = dataclasses.field(metadata=_STATIC)
    quantize: str | None = dataclasses.field(metadata=_STATIC)

    def start(self) -> jax.Array:
        """Sends the rows; the ticket for `done`."""
        routing = dataclasses.replace(self.handle, load=None)
        return autodiff.redispatch_start(self.zero_tail, _quantized_as(self.quantize), self.x, self.weights, routing)

    def done(self, ticket: jax.Array | None = None) -> Recv:
        """Receives the rows, which it sends itself where there is no ticket."""
        routing = dataclasses.replace(self.handle, load=None)
        operands = ticket, self.x, self.weights, routing
        recv_x, _ = autodiff.redispatch(self.zero_tail, _quantized_as(self.quantize), *operands)
        return _recv(recv_x, None, self.handle, self.quantize)


def _rows(op: str, x, quantize: str | None) -> tuple[jax.Array | Quantized, tuple[int, int]]:
    """The rows, checked, and their shape."""
    if isinstance(x, Quantized):
        x = Quantized(*shapes.opaque_rows(op, "x", x.data, x.scale, x.carrier, quantize))
        return x, x.data.shape
    x = shapes.payload(op, "x", x, "[num_tokens, hidden]")
    if quantize is not None:
        quantize_shapes.kind(op, quantize, (*quantize_shapes.KINDS, "fp8_wire"))
        quantize_shapes.quantizable(op, "x", x)
    return x, x.shape


def _quantized_as(quantize: str | None) -> str | None:
    return "fp8" if quantize == "fp8_wire" else quantize


def _recv(recv_x, recv_weights, handle: Handle, quantize: str | None) -> Recv:
    if quantize == "fp8_wire":
        recv_x = recv_x.dequantize()
    spec = handle.spec
    is_token = spec.layout == "token"
    if spec.layout == "batched":  # the primitives know flat rows only
        shape = (spec.num_local_experts, spec.capacity)
        recv_x = jax.tree.map(lambda a: a.reshape(*shape, a.shape[1]), recv_x)
        recv_weights = None if recv_weights is None else recv_weights.reshape(shape)
    return Recv(
        x=recv_x,
        weights=recv_weights,
        topk_idx=handle.slot_meta if is_token else None,
        group_sizes=handle.group_sizes if spec.layout == "expert" else None,
        counts=handle.counts,
        demand=handle.stats[layout_lib.DEMAND],
        num_dropped=handle.stats[layout_lib.NUM_DROPPED],
        num_invalid=handle.stats[layout_lib.NUM_INVALID],
        num_masked=handle.stats[layout_lib.NUM_MASKED],
        num_windows=handle.stats[layout_lib.NUM_WINDOWS],
        load=handle.load,
        handle=handle,
    )
