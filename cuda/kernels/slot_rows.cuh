// Dispatch in latency mode: which rows a block stores into the slots of other ranks, and which it takes out of its own.
// Both are sources for move.cuh; a row may be cut into equal pieces, so that few rows keep all warps busy.
#pragma once

#include "cuda/kernels/latency.cuh"
#include "cuda/kernels/move.cuh"

namespace jax_ep {

// Where the rows for ranks of other nodes lie in what is put to them: one after the other, in the order of tokens. Every
// block counts for itself, from bitmaps of tokens by rank, in shared memory; without room for these a row lies by its token.
struct PackedRows {
  uint32_t *bits; // [R, words] tokens that go there; then i32 [R, words + 1]: how many before each word
  int words;      // 0: by token

  JAX_EP_HD static int words_of(int num_tokens) { return (num_tokens + 31) / 32; }
  JAX_EP_HD static int64_t bytes(int num_ranks, int words) { return int64_t(num_ranks) * (2 * words + 1) * 4; }

  // Of a token that goes to `rank`, and of all.
  __device__ int place(const CallParams &call, int rank, int token) const {
    if (!words || !call.is_remote(rank)) return token;
    const uint32_t below = bits[rank * words + token / 32] & ((1u << token % 32) - 1);
    return *before(call.num_ranks, rank, token / 32) + __popc(below);
  }
  __device__ int rows_for(const DispatchParams &p, int rank) const {
    return words ? *before(p.call.num_ranks, rank, words) : p.num_tokens;
  }
  __device__ int32_t *before(int num_ranks, int rank, int word) const {
    return reinterpret_cast<int32_t *>(bits) + num_ranks * words + rank * (words + 1) + word;
  }
};

// All threads of the block; ends with a barrier.
inline __device__ __noinline__ void count_packed(const DispatchParams &p, PackedRows packed) {
  const int num_ranks = p.call.num_ranks, num_topk = p.call.num_topk, words = packed.words;
  const int32_t *ids = p.topk_idx ? p.topk_idx : p.topk_clean;
  for (int i = threadIdx.x; i < num_ranks * words; i += blockDim.x) packed.bits[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < p.num_tokens * num_topk; i += blockDim.x) {
    const int id = ids[i], token = i / num_topk;
    if (id >= 0 && id < p.num_experts)
      atomicOr(&packed.bits[id / p.num_local_experts * words + token / 32], 1u << token % 32);
  }
  __syncthreads();
  for (int r = threadIdx.x; r < num_ranks; r += blockDim.x) {
    int n = 0;
    for (int w = 0; w < words; ++w) {
      *packed.before(num_ranks, r, w) = n;
      n += __popc(packed.bits[r * words + w]);
    }
    *packed.before(num_ranks, r, words) = n;
  }
  __syncthreads();
}

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
  PackedRows packed;
  const int32_t *ids;
  int index, step, num_pieces, id; // id: of this lane's entry of the token of `index`

  // Blocks [0, num_blocks) send. `parts` come later, before the first item.
  __device__ SlotRows(const DispatchParams &p_, const SlotShape &shape_, PackedRows packed_, int pieces, int num_warps,
                      int num_blocks)
      : p(p_), parts{}, shape(shape_), packed(packed_), ids(p_.topk_idx ? p_.topk_idx : p_.topk_clean),
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
    const int place = packed.place(p.call, item.rank, item.token);
    return parts[item.rank] + shape.rows() + place * shape.row_bytes + item.piece * (shape.row_bytes / num_pieces);
  }
  __device__ void finish(const Item &item, const char *scales, int lane) const {
    if (item.rank >= 0 && item.piece == 0 && p.call.is_remote(item.rank))
      reinterpret_cast<int32_t *>(parts[item.rank] + shape.packed())[item.token] = packed.place(p.call, item.rank, item.token);
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
  // place: of the row in its part; row: of this lane, -1: none
  struct Item { int slot, source, token, place, piece, row; bool is_end; };
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
      if (!is_any) continue;
      int place = token;
      if (p.call.is_remote(source))
        place = reinterpret_cast<const int32_t *>(sent + source * shape.bytes() + shape.packed())[token];
      return {slot, source, token, place, piece, row, false};
    }
    return {0, 0, 0, 0, 0, -1, true};
  }
  __device__ const char *part_of(const Item &item) const { return sent + item.source * shape.bytes(); }
  __device__ bool is_own(const Item &item) const { return !kQuantizes && item.source == p.call.rank; }
  __device__ bool is_end(const Item &item) const { return item.is_end; }
  __device__ int bytes() const { return int(shape.row_bytes) / num_pieces; }
  __device__ const char *src(const Item &item) const {
    const char *rows = is_own(item) ? p.x : part_of(item) + shape.rows(); // the own rows are by token
    return rows + item.place * shape.row_bytes + item.piece * int64_t(bytes());
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
