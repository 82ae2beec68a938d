"""What a call knows statically (`Spec`), what it hands on (`Handle`, `Recv`), and the routing arithmetic.

The arithmetic is the executable definition of row order: kernels, reference and oracle agree with it bit for bit.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.config import Config

if TYPE_CHECKING:
    from jax_ep.quantize import Quantized

# Positions in the primitive's `stats` result, i32 [8]; the rest is reserved.
DEMAND, NUM_DROPPED, NUM_INVALID, NUM_MASKED, NUM_WINDOWS, NUM_SLOTS = range(6)
NUM_STATS = 8
FUSED_SLOTS = 2  # of latency mode: a fused call waits for its own rows only, so two calls take turns


def split_slots(config: Config) -> int:
    """Slots of an arena for start and done. Never FUSED_SLOTS: fused calls wait for no credit and have arenas apart."""
    return max(2 * config.max_pending, FUSED_SLOTS + 1)


@dataclasses.dataclass(frozen=True)
class Spec:
    """Static facts of a call: hashable, equal on all ranks, part of the compiled program."""

    axis_name: tuple[str, ...]
    num_ranks: int
    num_experts: int  # physical ones, where dispatch had an expert_map
    layout: str  # "expert" | "token" | "batched"
    capacity: int
    expert_alignment: int
    zero_tail: bool
    mode: str  # "throughput" | "latency" | "auto": chosen when each call is lowered
    implementation: str | None  # "cuda" | "xla" | None: chosen when the program is lowered
    config: Config

    @property
    def num_local_experts(self) -> int:
        """Experts of each rank."""
        return self.num_experts // self.num_ranks

    @property
    def num_rows(self) -> int:
        """Rows of the receive array, flat: row i of local expert l is l * capacity + i in layout "batched"."""
        return self.num_local_experts * self.capacity if self.layout == "batched" else self.capacity

    @property
    def ranks_per_node(self) -> int:
        """Ranks of each node, of which rank r belongs to number r // ranks_per_node; the last may have fewer."""
        return min(self.config.ranks_per_node or self.num_ranks, self.num_ranks)

    @property
    def num_nodes(self) -> int:
        """Nodes over which combine sums in two levels; 1: in one."""
        return -(-self.num_ranks // self.ranks_per_node)

    def num_slots(self, num_tokens: int) -> int:
        """Rows of the slot arrays; a slot is a distinct (source, token) that reaches this rank."""
        return self.capacity if self.layout == "token" else self.num_ranks * num_tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Handle:
    """Routing of one dispatch: all that combine, a second dispatch and the backward pass need.

    A pytree of i32 arrays with static metadata, plain data without addresses: it may be a scan carry, a
    checkpoint residual, donated or exported. Sizes: T tokens, K = num_topk, R ranks, L local experts,
    S = capacity (layout "token") or R*T (the others) slots. Slots are ordered by (source rank, token). Rows are
    numbered flat: expert * capacity + position in layout "batched".
    -1 means "none" everywhere. Under `jax.checkpoint` the arrays carry the name "jax_ep_handle".
    """

    topk_idx: jax.Array  # [T, K] global (physical) expert; entries outside [0, num_experts) are -1
    slot: jax.Array  # [T, R] slot of token t on rank d
    dst_row: jax.Array  # [T, K] row of entry (t, k) in recv.x of its expert's rank; -1: dropped or not routed
    slot_meta: jax.Array  # [S, K] "token": local expert; the others: row in recv.x of (slot, k)
    slot_token: jax.Array  # [S] token index at the source
    recv_offsets: jax.Array  # [R + 1] first slot of each source; the last entry is the number of slots
    group_sizes: jax.Array  # [L] "expert": rows per local expert, padded, after dropping; the others: zeros
    counts: jax.Array  # [L] kept rows, or kept (token, expert) pairs ("token")
    stats: jax.Array  # [8] demand, num_dropped, num_invalid, num_masked, num_windows, num_slots, 0, 0
    spec: Spec = dataclasses.field(metadata={"static": True})
    load: jax.Array | None = None  # as in `Recv`, for later ones; no operation reads it

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """The arrays that the primitives take, in their order."""
        return (
            self.topk_idx,
            self.slot,
            self.dst_row,
            self.slot_meta,
            self.slot_token,
            self.recv_offsets,
            self.group_sizes,
            self.counts,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Recv:
    """What dispatch returns on each rank. C = capacity, H = hidden, K = num_topk, L = num_local_experts.

    Which rows of `x` hold a token, and what the others hold::

        "expert":  group e begins at sum(group_sizes[:e]); its first counts[e] rows hold tokens, the rest of it is 0.
                   Rows from sum(group_sizes) on are the tail.
        "token":   the first handle.recv_offsets[-1] rows, which is min(demand, C) unless there was window=.
                   Rows after them are the tail.
        "batched": x[e, :counts[e]]. x[e, counts[e]:] is the tail of expert e.

    The tail is 0, and undefined with `dispatch(zero_tail=False)`. In rows without a token weights are 0 and topk_idx is
    -1, always.

    Example:
      The two ranks of `dispatch`'s example in the other layouts, the first channel of each row.

      >>> import jax, jax.numpy as jnp, jax_ep
      >>> from jax.sharding import Mesh, PartitionSpec as P
      >>> x = jnp.array([[1.0] * 4, [2.0] * 4, [3.0] * 4, [4.0] * 4])
      >>> topk_idx = jnp.array([[0, 2], [1, 0], [3, -1], [0, 3]])
      >>> topk_weights = jnp.array([[0.75, 0.25], [0.5, 0.5], [1.0, 0.0], [0.25, 0.75]])
      >>> mesh = Mesh(jax.devices()[:2], ("ep",))
      >>> def run(layout, capacity, *fields):
      ...     def receive(*tokens):
      ...         kwargs = dict(num_experts=4, axis_name="ep", layout=layout, capacity=capacity)
      ...         recv = jax_ep.dispatch(*tokens, **kwargs)
      ...         return [recv.x[..., 0], *(jnp.atleast_1d(getattr(recv, field)) for field in fields)]
      ...     exchange = jax.jit(jax.shard_map(receive, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
      ...     return [a.tolist() for a in exchange(x, topk_idx, topk_weights)]
      >>> rows, topk, weights, demand = run("token", 4, "topk_idx", "weights", "demand")
      >>> rows  # four rows a rank, three of them with a token
      [1.0, 2.0, 4.0, 0.0, 1.0, 3.0, 4.0, 0.0]
      >>> demand
      [3, 3]
      >>> topk[:4], weights[:4]  # of rank 0: its experts 0 and 1
      ([[0, -1], [1, 0], [0, -1], [-1, -1]], [[0.75, 0.0], [0.5, 0.5], [0.25, 0.0], [0.0, 0.0]])
      >>> rows, counts, dropped = run("batched", 2, "counts", "num_dropped")
      >>> rows  # experts 0, 1, 2, 3; expert 0 wanted three rows
      [[1.0, 2.0], [2.0, 0.0], [1.0, 0.0], [3.0, 4.0]]
      >>> counts, dropped
      ([2, 1, 1, 2], [1, 0])
    """

    x: jax.Array | Quantized  # [C, H] rows sent to this rank; "batched": [L, C, H]
    weights: jax.Array | None  # f32 [C] ("expert"), [L, C] ("batched") or [C, K], 0 where not local ("token")
    topk_idx: jax.Array | None  # "token": i32 [C, K] local expert, -1 elsewhere; the others: None
    group_sizes: jax.Array | None  # "expert": i32 [L] padded rows per local expert, what ragged_dot takes
    counts: jax.Array  # i32 [L] kept rows, or kept (token, expert) pairs ("token")
    demand: jax.Array  # i32 scalar: rows wanted before dropping, padded; "batched": of the fullest local expert
    num_dropped: jax.Array  # i32 scalar: rows of this rank that did not fit into C; with window= always 0
    num_invalid: jax.Array  # i32 scalar: ids outside [-1, num_experts) among this rank's own entries
    num_masked: jax.Array  # i32 scalar: this rank's own entries whose expert has no replica in expert_map
    num_windows: jax.Array  # i32 scalar: windows of C rows that hold all rows of all ranks, at least 1
    load: jax.Array  # i32 [num_experts] this rank's own entries per logical expert, before dropping
    handle: Handle


def sanitise(topk_idx: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """Entries outside [-1, num_experts) become -1; returns them and how many there were."""
    is_invalid = (topk_idx < -1) | (topk_idx >= num_experts)
    return jnp.where(is_invalid, -1, topk_idx), jnp.sum(is_invalid, dtype=jnp.int32)


def count_experts(topk_idx: jax.Array, num_experts: int) -> jax.Array:
    """Entries per expert, [num_experts] i32. -1 is not counted (`bincount` would count it as expert 0)."""
    bins = jnp.where(topk_idx < 0, num_experts, topk_idx).reshape(-1)
    return jnp.zeros(num_experts, jnp.int32).at[bins].add(1, mode="drop")


def token_in_rank(topk_idx: jax.Array, num_experts: int, num_ranks: int) -> jax.Array:
    """Whether token t has an expert on rank d, bool [num_tokens, num_ranks]."""
    rank = jnp.where(topk_idx < 0, num_ranks, topk_idx // (num_experts // num_ranks))
    token = jnp.arange(topk_idx.shape[0], dtype=jnp.int32)[:, None]
    return jnp.zeros((topk_idx.shape[0], num_ranks), bool).at[token, rank].set(True, mode="drop")


def place_in_expert(topk_idx: jax.Array, counts: jax.Array) -> jax.Array:
    """Number of earlier entries, in (token, k) order, that have the same expert, [num_tokens, num_topk] i32.

    `counts` are those of `count_experts`; at entries that are -1 the result means nothing.
    """
    position = jnp.arange(topk_idx.size, dtype=jnp.int32)
    key = jnp.where(topk_idx < 0, counts.shape[0], topk_idx).reshape(-1)
    key, order = lax.sort((key, position), num_keys=2)
    first = exclusive_sum(counts)
    place = jnp.zeros_like(key).at[order].set(position - first[key], unique_indices=True)
    return place.reshape(topk_idx.shape)


def exclusive_sum(counts: jax.Array, axis: int = 0) -> jax.Array:
    """Sum of the counts before each one."""
    return jnp.cumsum(counts, axis=axis, dtype=jnp.int32) - counts


def group_starts(num_rows: jax.Array, spec: Spec) -> tuple[jax.Array, jax.Array]:
    """First row and padded size of every expert's group on its rank, before dropping, [num_experts] each.

    In layout "batched" every expert has rows of its own, and they start at 0.
    """
    if spec.layout == "batched":
        return jnp.zeros_like(num_rows), num_rows
    align = spec.expert_alignment
    padded = (num_rows + (align - 1)) // align * align
    return exclusive_sum(padded.reshape(spec.num_ranks, -1), axis=1).reshape(-1), padded


def demands(padded: jax.Array, num_slots: jax.Array, spec: Spec) -> jax.Array:
    """Rows that every rank wants, [num_ranks] i32: what `capacity` is compared with.

    `padded` [num_experts] is that of `group_starts`, `num_slots` [num_ranks] counts the distinct tokens of each rank.
    """
    if spec.layout == "token":
        return num_slots
    padded = padded.reshape(spec.num_ranks, -1)
    if spec.layout == "batched":
        return jnp.max(padded, axis=1)
    return jnp.sum(padded, axis=1, dtype=jnp.int32)


def num_windows(demands: jax.Array, capacity: int) -> jax.Array:
    """Windows of `capacity` rows that serve all ranks, at least 1; equal on all ranks."""
    most = jnp.max(demands)
    return jnp.maximum((most - 1) // max(capacity, 1) + 1, 1)


def window_rows(window: jax.Array, num_windows: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """First row of a window (negative: of window 0) and how many rows it may hold: none past the last window."""
    window = jnp.maximum(window, 0)
    first = jnp.minimum(window, num_windows - 1) * capacity  # below the largest demand: no overflow
    return first, jnp.where(window < num_windows, capacity, 0)


def is_row_kept(handle: Handle) -> jax.Array:
    """Except in layout "token": whether a row holds a token (not padding, not the tail), bool [num_rows], flat."""
    row = jnp.arange(handle.spec.capacity, dtype=jnp.int32)
    if handle.spec.layout == "batched":
        return (row[None] < handle.counts[:, None]).reshape(-1)
    ends = jnp.cumsum(handle.group_sizes, dtype=jnp.int32)
    # Number of ends <= row, by bisection. (jnp.searchsorted sorts by default, and its unrolled form does not
    # trace inside a shard_map with automatic axes on jax 0.12.)
    group = jnp.zeros_like(row)
    for bit in reversed(range(len(ends).bit_length())):
        further = group + (1 << bit)
        is_past = ends.at[further - 1].get(mode="fill", fill_value=jnp.iinfo(jnp.int32).max) <= row
        group = jnp.where(is_past, further, group)
    past_counts = (ends - handle.group_sizes + handle.counts).at[group].get(mode="fill", fill_value=0)
    return row < past_counts
