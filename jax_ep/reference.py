"""The pure-JAX implementation: runs on every XLA backend and is the executable specification.

dispatch: count, exchange the counts, place every entry by prefix sums, gather rows.
combine:  f32 sum of a token's rows on the rank that holds them, rounded to the payload dtype; exchange; f32
          sum in rank order, bias, rounded once. Of several nodes: f32 sum of each in rank order, rounded; then of
          these in node order.
quantize: rows before they are sent, sums of each rank before they return.

Rows are gathered from all ranks, so memory is [num_ranks * num_tokens, hidden] beside the results. All index
arithmetic is `layout.py`'s. The primitives lower to these functions; they take and return what those do.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import layout as layout_lib
from jax_ep.layout import Spec
from jax_ep.quantize import from_fp8, to_fp8


def dispatch(x, side, topk_idx, topk_weights, window, *, spec: Spec, quantize: str | None) -> list[jax.Array]:
    """Routes and delivers; results as `primitives.dispatch_p` states."""
    num_tokens = x.shape[0]
    num_ranks, num_experts, capacity = spec.num_ranks, spec.num_experts, spec.capacity
    rank = lax.axis_index(spec.axis_name)

    idx, num_invalid = layout_lib.sanitise(topk_idx, num_experts)
    in_rank = layout_lib.token_in_rank(idx, num_experts, num_ranks)
    own_counts = layout_lib.count_experts(idx, num_experts)
    own = jnp.concatenate([own_counts, jnp.sum(in_rank, axis=0, dtype=jnp.int32)])
    table = lax.all_gather(own, spec.axis_name)  # [source, experts then ranks]
    expert_table, token_table = table[:, :num_experts], table[:, num_experts:]

    # What every rank wants, and the window of it that this call carries.
    num_rows = jnp.sum(expert_table, axis=0, dtype=jnp.int32)
    starts, padded = layout_lib.group_starts(num_rows, spec)
    demands = layout_lib.demands(padded, jnp.sum(token_table, axis=0, dtype=jnp.int32), spec)
    num_windows = layout_lib.num_windows(demands, capacity)
    first, size = layout_lib.window_rows(window[0], num_windows, capacity)

    def in_window(row):
        row = row - first
        return jnp.where((row >= 0) & (row < size), row, -1)

    # Slots: distinct tokens per destination, ordered by (source, token).
    first_slot = layout_lib.exclusive_sum(token_table)[rank]
    slot = first_slot[None] + jnp.cumsum(in_rank, axis=0, dtype=jnp.int32) - 1
    slot = jnp.where(in_rank, in_window(slot) if spec.layout == "token" else slot, -1)
    recv_tokens = token_table[:, rank]
    recv_offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(recv_tokens, dtype=jnp.int32)])
    if spec.layout == "token":
        recv_offsets = jnp.clip(recv_offsets - first, 0, size)

    # Rows: where each of this rank's entries lands on the rank of its expert.
    safe_idx = jnp.maximum(idx, 0)
    if spec.layout == "token":
        dst_row = jnp.take_along_axis(slot, safe_idx // spec.num_local_experts, axis=1)
    else:
        first_row = starts + layout_lib.exclusive_sum(expert_table)[rank]
        dst_row = in_window(first_row[safe_idx] + layout_lib.place_in_expert(idx, own_counts))
        if spec.layout == "batched":
            dst_row = jnp.where(dst_row >= 0, safe_idx % spec.num_local_experts * capacity + dst_row, -1)
    dst_row = jnp.where(idx >= 0, dst_row, -1)

    # What this rank receives, in slot order.
    num_slots = spec.num_slots(num_tokens)
    flat_slot = _transpose_ranks(slot.T, spec).reshape(-1)  # [source * token]
    flat_slot = jnp.where(flat_slot >= 0, flat_slot, num_slots)
    sources = jnp.arange(num_ranks * num_tokens, dtype=jnp.int32)
    slot_source = jnp.full(num_slots, -1, jnp.int32).at[flat_slot].set(sources, mode="drop")
    slot_token = jnp.where(slot_source >= 0, slot_source % max(num_tokens, 1), -1)
    local = _gather(idx, spec) - rank * spec.num_local_experts
    is_local = (local >= 0) & (local < spec.num_local_experts)
    meta = jnp.where(is_local, local if spec.layout == "token" else _gather(dst_row, spec), -1)
    slot_meta = _take(meta, slot_source, -1)

    demand = demands[rank]
    if spec.layout == "token":
        counts = layout_lib.count_experts(slot_meta, spec.num_local_experts)
        group_sizes = jnp.zeros_like(counts)
        num_outside = demand - recv_offsets[-1]
    else:
        start, padded, num_rows = slice_of_rank(jnp.stack([starts, padded, num_rows]), rank, spec)
        # Groups and rows as far as they lie in the window. (Their starts, not their ends, are free of overflow.)
        begin = jnp.clip(start - first, 0, size)
        group_sizes = jnp.clip(start + padded - first, 0, size) - begin
        counts = jnp.clip(start + num_rows - first, 0, size) - begin
        num_outside = jnp.sum(num_rows - counts, dtype=jnp.int32)
        if spec.layout == "batched":
            group_sizes = jnp.zeros_like(group_sizes)
    num_dropped = jnp.where(window[0] < 0, num_outside, 0)
    zero = jnp.zeros((), jnp.int32)
    stats = jnp.stack([demand, num_dropped, num_invalid, zero, num_windows, recv_offsets[-1], zero, zero])

    handle = (idx, slot, dst_row, slot_meta, slot_token, recv_offsets, group_sizes, counts)
    return [
        *redispatch(x, side, topk_weights, *handle, spec=spec, quantize=quantize),
        slot_meta, slot_token, group_sizes, counts, stats, idx, slot, dst_row, recv_offsets,
    ]  # fmt: skip


def redispatch(
    x, side, weights,
    topk_idx, slot, dst_row, slot_meta, slot_token, recv_offsets, group_sizes, counts, *, spec: Spec,
    quantize: str | None,
) -> list[jax.Array]:  # fmt: skip
    """Delivers rows, side and weights along a known routing; rows that hold nothing are 0."""
    if quantize is not None:
        x, side = to_fp8(x, quantize)
    num_topk = topk_idx.shape[1]
    source = _slot_sources(slot_token, recv_offsets, x.shape[0])
    has_weights = weights.shape[0] > 0
    all_weights = _gather(weights, spec)

    def deliver(row_source):
        return [_move(x, row_source, spec), _move(side, row_source, spec) if side.shape[1] > 0 else side]

    if spec.layout == "token":
        rows = deliver(source)
        if has_weights:
            return [*rows, jnp.where(slot_meta >= 0, _take(all_weights, source, 0), 0)]
        return [*rows, jnp.zeros((0, num_topk), jnp.float32)]

    # The entry (source, token, k) of each row, through the rows that the slots name.
    entry = jnp.where(source >= 0, source * num_topk, 0)[:, None] + jnp.arange(num_topk, dtype=jnp.int32)[None]
    target = jnp.where(slot_meta >= 0, slot_meta, spec.num_rows)
    row_entry = jnp.full(spec.num_rows, -1, jnp.int32).at[target].set(entry, mode="drop")
    rows = deliver(jnp.where(row_entry >= 0, row_entry // num_topk, -1))
    if has_weights:
        return [*rows, _take(all_weights.reshape(-1), row_entry, 0)]
    return [*rows, jnp.zeros(0, jnp.float32)]


def combine(
    y, weights, scalars, bias,
    topk_idx, slot, dst_row, slot_meta, slot_token, recv_offsets, group_sizes, counts, *, spec: Spec,
    quantize: str | None,
) -> list[jax.Array]:  # fmt: skip
    """Sums the rows of each token back at its source, and fetches one scalar per entry."""
    num_tokens, num_topk = topk_idx.shape
    num_ranks, hidden, dtype = spec.num_ranks, y.shape[1], y.dtype
    source = _slot_sources(slot_token, recv_offsets, num_tokens)
    num_slots = source.shape[0]
    # slot of each (source, token) on this rank
    target = jnp.where(source >= 0, source, num_ranks * num_tokens)
    own_slot = (
        jnp.full(num_ranks * num_tokens, -1, jnp.int32)
        .at[target]
        .set(jnp.arange(num_slots, dtype=jnp.int32), mode="drop")
    )

    def send_back(values):  # [slots, n] of the holder -> [rank, num_tokens, n] at the source
        back = _take(values, own_slot, 0).reshape(num_ranks, num_tokens, values.shape[1])
        return _transpose_ranks(back, spec)

    if spec.layout == "token":
        partial = y
    else:

        def add_expert(k, acc):
            row = slot_meta[:, k]
            term = _to_f32(_take(y, row, 0))
            if weights.shape[0] > 0:
                term = _take(weights, row, 0)[:, None] * term
            return acc + jnp.where((row >= 0)[:, None], term, 0.0)

        acc = jnp.zeros((num_slots, hidden), jnp.float32)
        partial = _round(lax.fori_loop(0, num_topk, add_expert, acc), dtype)

    if quantize is None:
        partials = send_back(partial)
    else:
        data, scale = to_fp8(partial, "fp8")
        data, scale = send_back(lax.bitcast_convert_type(data, jnp.uint8)), send_back(scale)
        # Products are rounded before they are added, but XLA contracts the two where it sees both: inside a loop on CPU
        # in spite of a barrier, so they are made before the loop, which with one rank is none.
        partials = lax.optimization_barrier(
            from_fp8(lax.bitcast_convert_type(data, jnp.float8_e4m3fn), scale, jnp.float32)
        )

    def add_rank(d, acc):
        return acc + jnp.where(slot[:, d, None] >= 0, _to_f32(partials[d]), 0.0)

    zeros = jnp.zeros((num_tokens, hidden), jnp.float32)

    def add_node(node, acc):
        first = node * spec.ranks_per_node
        last = jnp.minimum(first + spec.ranks_per_node, num_ranks)
        return acc + _to_f32(_round(lax.fori_loop(first, last, add_rank, zeros), dtype))

    if spec.num_nodes > 1:
        out = lax.fori_loop(0, spec.num_nodes, add_node, zeros)
    else:
        out = lax.fori_loop(0, num_ranks, add_rank, zeros)
    if bias.shape[0] > 0:
        out = out + _to_f32(bias)
    out = _round(out, dtype)

    if scalars.shape[0] == 0:
        return [out, jnp.zeros((0, num_topk), jnp.float32)]
    values = scalars if spec.layout == "token" else _take(scalars, slot_meta, 0)
    values = send_back(jnp.where(slot_meta >= 0, values, 0))
    owner = jnp.maximum(topk_idx, 0) // spec.num_local_experts
    values = jnp.take_along_axis(values, owner[None], axis=0)[0]
    return [out, jnp.where((topk_idx >= 0) & (dst_row >= 0), values, 0)]


def slice_of_rank(per_expert: jax.Array, rank, spec: Spec) -> jax.Array:
    """[n, num_experts] -> this rank's [n, num_local_experts]."""
    return lax.dynamic_slice_in_dim(per_expert, rank * spec.num_local_experts, spec.num_local_experts, axis=1)


def _gather(a, spec: Spec):
    """[n, ...] of every rank, one after the other."""
    return a if a.size == 0 else lax.all_gather(a, spec.axis_name, tiled=True)


def _transpose_ranks(a, spec: Spec):
    """[destination, ...] -> [source, ...]."""
    return a if a.size == 0 else lax.all_to_all(a, spec.axis_name, split_axis=0, concat_axis=0, tiled=True)


def _move(rows, row_source, spec: Spec):
    """Row `row_source` of all ranks' rows; zero bits where it is -1 (not every float type has a number 0)."""
    bits = lax.bitcast_convert_type(rows, jnp.dtype(f"uint{jax.dtypes.itemsize_bits(rows.dtype)}"))
    return lax.bitcast_convert_type(_take(_gather(bits, spec), row_source, 0), rows.dtype)


def _slot_sources(slot_token, recv_offsets, num_tokens: int):
    """Number (source * num_tokens + token) of each slot, -1 for unused slots."""
    slot = jnp.arange(slot_token.shape[0], dtype=jnp.int32)
    source = jnp.sum(recv_offsets[1:, None] <= slot[None], axis=0, dtype=jnp.int32)
    return jnp.where(slot_token >= 0, source * num_tokens + slot_token, -1)


def _take(a, index, fill):
    """a[index] with `fill` where index is -1 (indexing itself would take the last element)."""
    if a.shape[0] == 0:
        return jnp.full(index.shape + a.shape[1:], fill, a.dtype)
    return a.at[jnp.where(index >= 0, index, a.shape[0])].get(mode="fill", fill_value=fill)


def _to_f32(a):
    # XLA may keep more precision than bf16 between two converts; the contract counts every rounding.
    return _pin(a).astype(jnp.float32)


def _round(a, dtype):
    return _pin(a.astype(dtype))


def _pin(a):
    if a.dtype == jnp.float32:
        return a
    return lax.optimization_barrier(a)
