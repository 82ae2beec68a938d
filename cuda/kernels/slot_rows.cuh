// Dispatch in latency mode: which rows a block stores into the slots of other ranks, and which it takes out of its own.
// Both are sources for move.cuh; a row may be cut into equal pieces, so that few rows keep all warps busy.
#pragma once

#include "cuda/kernels/latency.cuh"
#include "cuda/kernels/move.cuh"

namespace jax_ep {

// One warp of a block: the weights of the block's share of tokens, to every rank. Blocks [0, num_blocks) have one.
__device__ __forceinline__ void send_weights(const DispatchParams &p, Parts parts, const SlotShape &shape, int num_blocks,
                                             int lane) {
  if (!p.weights) return;
  const int32_t *ids = p.topk_idx ? p.topk_idx : p.topk_clean;
  const TokenRange mine = share_of(p.num_tokens, blockIdx.x, num_blocks);
  const int64_t end = int64_t(mine.end) * p.call.num_topk;
  for (int64_t i = int64_t(mine.begin) * p.call.num_topk + lane; i < end; i += kWarpSize) {
    const bool is_valid = ids[i] >= 0 && ids[i] < p.num_experts;
    const float weight = is_valid ? p.weights[i] : 0.f; // elsewhere it may be anything
    for (int r = 0; r < p.call.num_ranks; ++r) reinterpret_cast<float *>(parts[r] + shape.scalars())[i] = weight;
  }
}

// Rows of the operand, to the slots of all ranks that a token reaches. A rank's own are taken from the operand later, unless
// they are quantised on the way. The ids of the next item are asked for while the latest one moves, and those of the first
// before the call is entered.
template <bool kQuantizes> struct SlotRows {
  struct Item { int token, piece, rank; bool is_end; }; // rank: of this lane, -1: none
  static constexpr bool kQuantize = kQuantizes;
  const DispatchParams &p;
  Parts parts;
  SlotShape shape;
  const int32_t *ids;
  int index, step, num_pieces, id; // id: of this lane's entry of the token of `index`

  // Blocks [0, num_blocks) send. `parts` come later, before the first item.
  __device__ SlotRows(const DispatchParams &p_, const SlotShape &shape_, int pieces, int num_warps, int num_blocks)
      : p(p_), parts{}, shape(shape_), ids(p_.topk_idx ? p_.topk_idx : p_.topk_clean),
        index(int(threadIdx.x / kWarpSize) * num_blocks + int(blockIdx.x)), step(num_warps * num_blocks),
        num_pieces(pieces) {
    look(int(threadIdx.x % kWarpSize));
  }

  __device__ void look(int lane) {
    const bool is_entry = index < p.num_tokens * num_pieces && lane < p.call.num_topk;
    id = is_entry ? ids[int64_t(index / num_pieces) * p.call.num_topk + lane] : -1;
  }
  __device__ Item next(int lane) {
    while (index < p.num_tokens * num_pieces) {
      const int token = index / num_pieces, piece = index % num_pieces;
      int rank = id >= 0 && id < p.num_experts ? id / p.num_local_experts : -1;
      const unsigned same = __match_any_sync(kFullWarp, rank >= 0 ? unsigned(rank) : 0x80000000u | lane);
      if ((same & ((1u << lane) - 1)) || (!kQuantize && rank == p.call.rank)) rank = -1;
      const bool is_any = __any_sync(kFullWarp, rank >= 0);
      index += step;
      look(lane);
      if (is_any) return {token, piece, rank, false};
    }
    return {0, 0, -1, true};
  }
  __device__ bool is_end(const Item &item) const { return item.is_end; }
  __device__ int bytes() const { return int(p.x_bytes) / num_pieces; }
  __device__ const char *src(const Item &item) const { return p.x + item.token * p.x_bytes + item.piece * int64_t(bytes()); }
  __device__ char *dst(const Item &item) const {
    if (item.rank < 0) return nullptr;
    return parts[item.rank] + shape.rows() + item.token * shape.row_bytes + item.piece * (shape.row_bytes / num_pieces);
  }
  __device__ void finish(const Item &item, const char *scales, int lane) const {
    if (!shape.side_bytes || (!kQuantize && item.piece)) return;
    const int64_t bytes = kQuantize ? shape.side_bytes / num_pieces : shape.side_bytes;
    char *side = item.rank < 0 ? nullptr
                               : parts[item.rank] + shape.sides() + item.token * shape.side_stride() + item.piece * bytes;
    copy_side(kQuantize ? scales : p.side + item.token * shape.side_bytes, side, bytes, lane);
  }
};

// Rows of this rank's slots [begin, end) (numbers as in the handle), to their places in the result. What the handle says of
// the next item is asked for while the latest one moves, and of the first one before the block waits for rows.
template <bool kQuantizes> struct SlotRowsReceived {
  struct Item { int slot, source, token, piece, row; bool is_end; }; // row: of this lane, -1: none
  static constexpr bool kQuantize = false;
  const DispatchParams &p;
  const char *sent; // [R] parts of this rank's slot
  SlotShape shape;
  const int32_t *first_slot; // [R + 1] of each source, shared memory
  int index, end, step, num_pieces;
  int next_token, next_row; // of the slot of `index`; the row of this lane

  __device__ SlotRowsReceived(const DispatchParams &p_, const char *sent_, const SlotShape &shape_,
                              const int32_t *first_slot_, TokenRange slots, int pieces, int num_warps)
      : p(p_), sent(sent_), shape(shape_), first_slot(first_slot_),
        index(slots.begin * pieces + int(threadIdx.x / kWarpSize)), end(slots.end * pieces), step(num_warps),
        num_pieces(pieces) {
    look(int(threadIdx.x % kWarpSize));
  }

  __device__ void look(int lane) {
    const int slot = index / num_pieces, num_topk = p.call.num_topk;
    const bool is_here = index < end;
    next_token = is_here ? p.slot_token[slot] : 0;
    if (p.is_token_layout()) next_row = is_here && lane == 0 ? slot : -1;
    else next_row = is_here && lane < num_topk ? p.slot_meta[int64_t(slot) * num_topk + lane] : -1;
  }
  __device__ Item next(int lane) {
    while (index < end) {
      const int slot = index / num_pieces, piece = index % num_pieces, token = next_token, row = next_row;
      index += step;
      look(lane);
      int source = 0;
      for (int r = lane; r - lane < p.call.num_ranks; r += kWarpSize)
        source += __popc(__ballot_sync(kFullWarp, r < p.call.num_ranks && first_slot[r + 1] <= slot));
      const bool is_any = __any_sync(kFullWarp, row >= 0); // none: all its rows are outside the window
      if (is_any) return {slot, source, token, piece, row, false};
    }
    return {0, 0, 0, 0, -1, true};
  }
  __device__ const char *part_of(const Item &item) const { return sent + item.source * shape.bytes(); }
  __device__ bool is_own(const Item &item) const { return !kQuantizes && item.source == p.call.rank; }
  __device__ bool is_end(const Item &item) const { return item.is_end; }
  __device__ int bytes() const { return int(shape.row_bytes) / num_pieces; }
  __device__ const char *src(const Item &item) const {
    const char *rows = is_own(item) ? p.x : part_of(item) + shape.rows();
    return rows + item.token * shape.row_bytes + item.piece * int64_t(bytes());
  }
  __device__ char *dst(const Item &item) const {
    return item.row < 0 ? nullptr : p.recv_x + item.row * shape.row_bytes + item.piece * int64_t(bytes());
  }
  __device__ void finish(const Item &item, const char *, int lane) const {
    if (item.piece) return;
    if (p.recv_side) {
      const char *side = is_own(item) ? p.side + item.token * shape.side_bytes
                                      : part_of(item) + shape.sides() + item.token * shape.side_stride();
      copy_side(side, item.row < 0 ? nullptr : p.recv_side + item.row * shape.side_bytes, shape.side_bytes, lane);
    }
    const int num_topk = p.call.num_topk;
    if (!p.recv_weights || lane >= num_topk) return;
    const float *weights = reinterpret_cast<const float *>(part_of(item) + shape.scalars());
    const float weight = weights[int64_t(item.token) * num_topk + lane];
    const int64_t at = int64_t(item.slot) * num_topk + lane;
    if (p.is_token_layout()) p.recv_weights[at] = p.slot_meta[at] >= 0 ? weight : 0.f;
    else if (item.row >= 0) p.recv_weights[item.row] = weight;
  }
};

} // namespace jax_ep
