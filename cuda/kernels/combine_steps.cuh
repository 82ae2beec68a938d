// What the kernels of combine share: combine_peer.cu, combine_nodes.cu.
#pragma once

#include "cuda/kernels/bulk.h"
#include "cuda/kernels/combine_sum.cuh"
#include "cuda/kernels/staging.cuh"

namespace jax_ep::combine_steps {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kReduceBatch = 2048;        // slots that a block looks through at a time
constexpr int kItemsPerWarp = 4;          // with fewer tokens per warp their rows are cut into pieces
constexpr int kPieceBytes = 48 * 1024;    // and larger sums, too: measured, see docs/performance.md
constexpr int kSmallestPiece = 2048;

// Dynamic shared memory, planned on the host. Reduce and pull use the stages one after the other.
struct Plan {
  int table, bars, list, room, bytes;
  GatherPlan reduce, pull;
};

// `plan_more(room, pieces)`: of another sum that uses the same room, gives its bytes.
template <class PlanMore> Plan make_plan(const CombineParams &p, PlanMore plan_more) {
  Plan plan{};
  int64_t at = 0;
  auto take = [&](int64_t bytes) { const int64_t here = at; at = round_up(at + bytes, 128); return int(here); };
  plan.table = take(int64_t(p.call.num_ranks) * sizeof(PeerBuffers));
  plan.bars = take(2 * kWarps * sizeof(BulkBarrier));
  plan.list = take(has_partials(p.layout, p.quantize) ? kReduceBatch * sizeof(uint16_t) : 0);
  plan.room = int(at);
  const int64_t room = kBulkSharedBytes - at;
  const bool is_wire = p.quantize == Quantize::kFp8Wire;
  const int holders = p.call.num_ranks < p.call.num_topk ? p.call.num_ranks : p.call.num_topk;
  // Pieces: one per kPieceBytes of all its rows, and enough for every warp to get a few.
  auto pieces = [&](int64_t row_bytes, int64_t rows_per_sum) {
    const int64_t likely = (rows_per_sum < GatherPlan::kLikelyRows ? rows_per_sum : GatherPlan::kLikelyRows) * row_bytes;
    const int64_t few = int64_t(kItemsPerWarp) * kWarps * p.num_blocks / (p.num_tokens + 1), by_size = likely / kPieceBytes;
    const int64_t wanted = 1 + (few > by_size ? few : by_size), most = row_bytes / kSmallestPiece;
    return int(wanted < most ? wanted : most < 1 ? 1 : most);
  };
  const bool is_token_layout = p.layout == Layout::kToken;
  // Of single rows whole steps of the quantiser are taken; of several, as little at a time as leaves room for many warps.
  plan.reduce = GatherPlan::make(p.y_bytes, is_token_layout ? kQuantUnit : kVectorUnit, is_token_layout ? 1 : p.call.num_topk,
                                 pieces(p.y_bytes, p.call.num_topk), kWarps, room, p.use_bulk);
  plan.pull = GatherPlan::make(p.call.row_bytes, is_wire ? WireRow::kGroupBytes : kVectorUnit, holders,
                               pieces(p.call.row_bytes, holders), kWarps, room, p.use_bulk);
  const int64_t reduce = plan.reduce.shared_bytes(), pull = plan.pull.shared_bytes();
  const int64_t both = has_partials(p.layout, p.quantize) && reduce > pull ? reduce : pull, more = plan_more(room, pieces);
  plan.bytes = int(at + (both > more ? both : more));
  return plan;
}
inline Plan make_plan(const CombineParams &p) {
  return make_plan(p, [](int64_t, auto) { return int64_t(0); });
}

// Sums the rows of this rank's slots that have at least `min_rows` of them into `partial`.
template <DType kType, bool kBulk, bool kWire>
__device__ void reduce_slots(const CombineParams &p, const Plan &plan, char *shared, int min_rows, unsigned &parity) {
  constexpr int kUnroll = kBulk ? 1 : 2;
  __shared__ int s_count;
  uint16_t *list = reinterpret_cast<uint16_t *>(shared + plan.list);
  BulkBarrier *bars = reinterpret_cast<BulkBarrier *>(shared + plan.bars);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, num_topk = p.call.num_topk;
  const bool is_token_layout = p.layout == Layout::kToken;
  const int64_t num_slots = p.recv_offsets[p.call.num_ranks];
  const int end = int(num_slots * (blockIdx.x + 1) / gridDim.x);
  for (int batch = int(num_slots * blockIdx.x / gridDim.x); batch < end; batch += kReduceBatch) {
    if (threadIdx.x == 0) s_count = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < min(kReduceBatch, end - batch); i += kThreads) {
      int rows = is_token_layout;
      for (int k = 0; k < num_topk && !is_token_layout; ++k) rows += p.slot_meta[int64_t(batch + i) * num_topk + k] >= 0;
      if (rows >= min_rows) list[atomicAdd(&s_count, 1)] = uint16_t(i); // in any order: sums do not depend on it
    }
    __syncthreads();
    auto ask = [&](int index) { // which row of y lane k adds
      const int64_t slot = batch + list[index];
      if (is_token_layout) return lane == 0 ? int(slot) : -1;
      return lane < num_topk ? p.slot_meta[slot * num_topk + lane] : -1;
    };
    auto rows_of = [&](int, int row) {
      const float weight = row >= 0 && p.weights ? p.weights[row] : 1.f;
      const unsigned below = __ballot_sync(kFullWarp, row >= 0) & ((1u << lane) - 1);
      return in_order(row >= 0, __popc(below), p.y + row * p.y_bytes, weight, p.weights != nullptr);
    };
    auto sum_into = [&](auto store) {
      gather_sums<kBulk>(plan.reduce, {unsigned(warp), unsigned(plan.reduce.num_warps)}, s_count, shared + plan.room, bars, parity, ask,
                         rows_of, [&](GatherStep s, auto fetch) {
                           s.index = batch + list[s.index];
                           store(s, fetch);
                         });
    };
    const InOrder sums{p.partial, p.call.row_bytes};
    if constexpr (kWire) sum_into(StoreWire<kType, InOrder>{sums});
    else sum_into(StorePartial<kType, kUnroll, InOrder>{sums});
    __syncthreads(); // the list is read no more
  }
}

// Where a token's rows wait: lane k, if it is the first kept entry of its rank, holds that rank's row.
struct Holders {
  int expert, row;

  __device__ Holders() {}
  __device__ Holders(const CombineParams &p, int64_t token, int lane) {
    const int num_topk = p.call.num_topk;
    const int64_t at = token * num_topk + lane;
    expert = lane < num_topk ? p.topk_clean[at] : -1;
    row = lane < num_topk ? p.dst_row[at] : -1;
  }

  __device__ __forceinline__ Rows rows(const CombineParams &p, const PeerBuffers *peers, const Rounds &rounds, int round,
                                       int64_t token, int lane, bool reads_singles) const {
    return rows(p, peers, p.slot + token * p.call.num_ranks, lane, reads_singles, [&](int rank) {
      return rounds.record(p.call.arena, round, rank, int(token - int64_t(round) * rounds.tokens_per_round));
    });
  }
  // `slots`: of the token, by rank. `staged(rank)`: where the row of a rank is that cannot be reached.
  template <class Staged>
  __device__ __forceinline__ Rows rows(const CombineParams &p, const PeerBuffers *peers, const int32_t *slots, int lane,
                                       bool reads_singles, Staged staged) const {
    const int rank = expert >= 0 && row >= 0 ? expert / p.num_local_experts : -1;
    const unsigned same = __match_any_sync(kFullWarp, rank >= 0 ? unsigned(rank) : 0x80000000u | lane);
    const bool is_first = rank >= 0 && (same & ((1u << lane) - 1)) == 0;
    const char *src = nullptr;
    float weight = 1.f;
    bool is_scaled = false;
    if (is_first) {
      const PeerBuffers &peer = peers[rank];
      if (!peer.is_reachable()) {
        src = staged(rank);
      } else if (reads_singles && __popc(same) == 1) {
        src = peer.at[kSingles] + row * p.y_bytes;
        is_scaled = p.weights != nullptr;
        if (is_scaled) weight = __ldcs(peer.get<float>(kSingleWeights) + row);
      } else {
        const int64_t slot = p.layout == Layout::kToken ? row : slots[rank];
        src = peer.at[kRows] + slot * p.call.row_bytes;
      }
    }
    int order = 0;
    for (unsigned left = __ballot_sync(kFullWarp, is_first); left; left &= left - 1)
      order += __shfl_sync(kFullWarp, rank, __ffs(left) - 1) < rank;
    return in_order(is_first, order, src, weight, is_scaled);
  }
};

// Scalars of a token (cotangents of weights) come back one by one, unsummed.
__device__ __forceinline__ void pull_scalars(const CombineParams &p, const PeerBuffers *peers, const Rounds &rounds,
                                             int round, TokenRange range) {
  if (!p.out_scalars) return;
  const int num_topk = p.call.num_topk;
  const int64_t end = int64_t(range.end) * num_topk, step = int64_t(gridDim.x) * kThreads;
  for (int64_t at = int64_t(range.begin) * num_topk + int64_t(blockIdx.x) * kThreads + threadIdx.x; at < end; at += step) {
    const int64_t token = at / num_topk, k = at % num_topk;
    const int expert = p.topk_clean[at], row = expert >= 0 ? p.dst_row[at] : -1, rank = expert / p.num_local_experts;
    float value = 0.f;
    if (row >= 0 && peers[rank].is_reachable()) {
      value = __ldcs(peers[rank].get<float>(kScalars) + (p.layout == Layout::kToken ? int64_t(row) * num_topk + k : row));
    } else if (row >= 0) {
      const char *record =
          rounds.record(p.call.arena, round, rank, int(token - int64_t(round) * rounds.tokens_per_round));
      value = reinterpret_cast<const float *>(record + p.call.staging().scalars())[k];
    }
    p.out_scalars[at] = value;
  }
}

// Tokens of `range` summed from wherever their rows are.
template <DType kType, bool kBulk, bool kWire>
__device__ __forceinline__ void pull_tokens(const CombineParams &p, const Plan &plan, char *shared, const PeerBuffers *peers,
                            const Rounds &rounds, int round, TokenRange range, unsigned &parity) {
  constexpr int kUnroll = kBulk ? 1 : 2;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const bool reads_singles = !kWire && p.layout != Layout::kToken;
  auto ask = [&](int index) { return Holders(p, range.begin + index, lane); };
  auto rows_of = [&](int index, const Holders &holders) {
    return holders.rows(p, peers, rounds, round, range.begin + index, lane, reads_singles);
  };
  auto sum_into = [&](auto store) {
    gather_sums<kBulk>(plan.pull,
                       {blockIdx.x * plan.pull.num_warps + warp, gridDim.x * plan.pull.num_warps},
                       range.end - range.begin, shared + plan.room,
                       reinterpret_cast<BulkBarrier *>(shared + plan.bars), parity, ask, rows_of,
                       store);
  };
  if constexpr (kWire) sum_into(StoreOutOfWire<kType>{p.out, p.bias, p.y_bytes, range.begin});
  else sum_into(StoreOut<kType, kUnroll>{p.out, p.bias, p.y_bytes, range.begin});
  pull_scalars(p, peers, rounds, round, range);
}

} // namespace jax_ep::combine_steps
