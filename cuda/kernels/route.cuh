// Routing: where does each (token, k) go? A stable counting sort over all ranks without atomics.
//
// Tokens are cut into contiguous chunks, one per block, and again one per warp. Each warp counts its chunk per
// expert and per rank (a token counts once per rank); prefix sums over warps, blocks (workspace) and ranks
// (announced counts) turn every position inside a chunk into a final row. The order is (expert, source rank,
// token, k) for rows and (source rank, token) for slots, whatever the number of blocks.
#pragma once

#include <cub/warp/warp_scan.cuh>

#include "cuda/device/sync.cuh"
#include "cuda/kernels/dispatch_peer.h"
#include "cuda/kernels/staging.cuh"

namespace jax_ep {

// A block's part of tokens, or of slots, of which `blocks` take one each; nothing for those beyond.
__device__ __forceinline__ TokenRange share_of(int64_t n, unsigned block, unsigned blocks) {
  if (block >= blocks) return {0, 0};
  if (uint64_t(n) * blocks >> 32 == 0) // a GPU divides 32 bits in a quarter of the time of 64
    return {int(uint32_t(n) * block / blocks), int(uint32_t(n) * (block + 1) / blocks)};
  return {int(n * block / blocks), int(n * (block + 1) / blocks)};
}
__device__ __forceinline__ TokenRange block_share(int64_t n) { return share_of(n, blockIdx.x, gridDim.x); }

__device__ __forceinline__ TokenRange warp_tokens(TokenRange block, int warp, int num_warps) {
  const int per = (block.end - block.begin + num_warps - 1) / num_warps;
  const int begin = min(block.begin + warp * per, block.end);
  return {begin, min(begin + per, block.end)};
}

// Columns of a count row: experts, then ranks, then (workspace only) invalid ids.
struct RouteShared {
  int32_t *positions; // [num_warps][E + R]: counts, then exclusive prefixes, then final bases
  int32_t *start;     // [E] first row of each expert's group on its rank
  int32_t *total;     // [E] rows of each expert from all ranks
  int32_t *slots;     // [R] slots of each rank from all sources
  int32_t *invalid;   // [1]
  int num_warps;      // warps that route
};

// Entries of whole tokens side by side in a warp: lane = token * K + k. `at` is the entry's place in [T, K].
struct Entry {
  int token, k, expert, rank; // expert and rank -1: not routed
  int64_t at;
  bool is_in_range, is_valid, is_first; // first entry of its token for its rank
  unsigned same_token_rank;             // lanes of the token's entries for this rank

  // The id that a lane looks at; asked for before it is needed, so that loads overlap.
  __device__ static int id(const DispatchParams &p, const int32_t *ids, int first_token, int end, int lane) {
    const int token = first_token + lane / p.call.num_topk;
    const bool is_active = lane < kWarpSize / p.call.num_topk * p.call.num_topk && token < end;
    return is_active ? ids[int64_t(token) * p.call.num_topk + lane % p.call.num_topk] : -1;
  }

  __device__ Entry(const DispatchParams &p, int id, int first_token, int end, int lane) {
    const int num_topk = p.call.num_topk;
    token = first_token + lane / num_topk, k = lane % num_topk;
    at = int64_t(token) * num_topk + k;
    is_in_range = lane < kWarpSize / num_topk * num_topk && token < end;
    is_valid = id >= 0 && id < p.num_experts;
    expert = is_valid ? id : -1;
    rank = is_valid ? id / p.num_local_experts : -1;
    same_token_rank = same(lane / num_topk << 16 | rank, is_valid, lane); // by all lanes
    is_first = is_valid && (same_token_rank & ((1u << lane) - 1)) == 0;
  }

  // Lanes with the same key; lanes without one are alone (the sign bit keeps them apart).
  __device__ static unsigned same(int key, bool has_key, int lane) {
    return __match_any_sync(kFullWarp, has_key ? unsigned(key) : 0x80000000u | lane);
  }
};

// Goes through a warp's tokens in order, `count` (experts, then ranks) with it. For every entry, all lanes together:
// visit(entry, id as it was, number of its expert's entries before it, number of tokens for its rank before: of first
// entries; -1 elsewhere).
template <class Visit>
__device__ __forceinline__ void walk_tokens(const DispatchParams &p, const int32_t *ids, TokenRange tokens, int32_t *count,
                                            Visit visit) {
  const int lane = threadIdx.x % kWarpSize, step = kWarpSize / p.call.num_topk;
  const unsigned below = (1u << lane) - 1;
  int id = Entry::id(p, ids, tokens.begin, tokens.end, lane);
  for (int t = tokens.begin; t < tokens.end; t += step) {
    const int coming = Entry::id(p, ids, t + step, tokens.end, lane);
    const Entry e(p, id, t, tokens.end, lane);
    const unsigned same_expert = Entry::same(e.expert, e.is_valid, lane);
    const unsigned same_rank = Entry::same(e.rank, e.is_first, lane); // first entries only
    int row = -1, slot = -1;
    if (e.is_valid) row = count[e.expert] + __popc(same_expert & below);
    if (e.is_first) slot = count[p.num_experts + e.rank] + __popc(same_rank & below);
    __syncwarp(); // all lanes have read the counts
    if (e.is_valid && (same_expert & below) == 0) count[e.expert] += __popc(same_expert);
    if (e.is_first && (same_rank & below) == 0) count[p.num_experts + e.rank] += __popc(same_rank);
    __syncwarp(); // and the next step sees them advanced
    visit(e, id, row, slot);
    id = coming;
  }
}

// Counts this block's tokens; leaves positions inside the warp's chunk in dst_row and slot.
__device__ __forceinline__ void count_tokens(const DispatchParams &p, const Session &session, RouteShared sh) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int num_ranks = p.call.num_ranks, columns = p.num_experts + num_ranks;
  for (int i = threadIdx.x; i < sh.num_warps * columns; i += blockDim.x) sh.positions[i] = 0;
  if (threadIdx.x == 0) *sh.invalid = 0;
  __syncthreads();
  const TokenRange block = block_share(p.num_tokens);
  if (warp < sh.num_warps) {
    const TokenRange mine = warp_tokens(block, warp, sh.num_warps);
    for (int64_t i = int64_t(mine.begin) * num_ranks + lane; i < int64_t(mine.end) * num_ranks; i += kWarpSize)
      p.slot[i] = -1;
    __syncwarp();
    int num_invalid = 0;
    walk_tokens(p, p.topk_idx, mine, sh.positions + warp * columns, [&](const Entry &e, int id, int row, int slot) {
      num_invalid += __popc(__ballot_sync(kFullWarp, e.is_in_range && !e.is_valid && id != -1));
      if (!e.is_in_range) return;
      p.topk_clean[e.at] = e.expert;
      p.dst_row[e.at] = row;
      if (e.is_first) p.slot[int64_t(e.token) * num_ranks + e.rank] = slot;
    });
    if (lane == 0 && num_invalid) atomicAdd(sh.invalid, num_invalid);
  }
  __syncthreads();
  int32_t *out = session.workspace(blockIdx.x);
  for (int c = threadIdx.x; c < columns; c += blockDim.x) {
    int32_t sum = 0;
    for (int w = 0; w < sh.num_warps; ++w) {
      const int32_t n = sh.positions[w * columns + c];
      sh.positions[w * columns + c] = sum;
      sum += n;
    }
    out[c] = sum;
  }
  if (threadIdx.x == 0) out[columns] = *sh.invalid;
}

// Sum of `value(i)`, i < n, with several loads under way at a time.
template <class Value> __device__ __forceinline__ int32_t sum_of(int n, Value value) {
  int32_t sum = 0, i = 0;
  for (; i + 8 <= n; i += 8) {
    int32_t v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = value(i + j);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += v[j];
  }
  int32_t v[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = i + j < n ? value(i + j) : 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) sum += v[j];
  return sum;
}

// The same with the sum of the first `upto` values, which are among those n.
struct SumAndPart { int32_t all, part; };
template <class Value> __device__ __forceinline__ SumAndPart sums_of(int n, int upto, Value value) {
  constexpr int kUnroll = 8; // loads under way
  SumAndPart sum{0, 0};
  for (int i = 0; i < n; i += kUnroll) {
    int32_t v[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) v[j] = i + j < n ? value(i + j) : 0;
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) sum.all += v[j], sum.part += i + j < upto ? v[j] : 0;
  }
  return sum;
}

// Leader block, after a grid barrier: this rank's totals, to be announced, and its invalid ids behind them. Written
// over `total`/`start`'s room.
__device__ __forceinline__ void sum_blocks(const Session &session, int columns, int32_t *sums) {
  for (int c = threadIdx.x; c <= columns; c += blockDim.x)
    sums[c] = sum_of(gridDim.x, [&](int b) { return session.workspace(b)[c]; });
  __syncthreads();
}

// First row of the window in the numbering of all rows (batched: of each expert's rows; token layout: of slots).
__device__ __forceinline__ int64_t window_start(const DispatchParams &p) {
  return p.window ? int64_t(max(*p.window, 0)) * p.capacity : 0;
}

// Rows of a group with its padding. Numbers of rows fit 32 bits, which divide in a quarter of the time of 64.
__device__ __forceinline__ int32_t padded_rows(const DispatchParams &p, int32_t rows) {
  const uint32_t unit = uint32_t(p.alignment), upto = uint32_t(rows) + unit - 1;
  return int32_t(upto - upto % unit);
}

// First row of each expert's group on its rank, from the totals. Groups of one rank follow each other, each padded to the
// alignment: one warp scans one rank. Batched: each begins at 0. Token layout: rows are slots, and 0 stands for all.
__device__ __forceinline__ void start_groups(const DispatchParams &p, RouteShared sh) {
  if (p.layout != Layout::kExpert) {
    for (int e = threadIdx.x; e < p.num_experts; e += blockDim.x) sh.start[e] = 0;
    __syncthreads();
    return;
  }
  const int num_ranks = p.call.num_ranks;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, num_warps = blockDim.x / kWarpSize;
  for (int d = warp; d < num_ranks; d += num_warps) {
    using Scan = cub::WarpScan<int32_t>;
    __shared__ typename Scan::TempStorage storage[kWarpSize];
    int32_t running = 0;
    for (int l = 0; l < p.num_local_experts; l += kWarpSize) {
      const int e = d * p.num_local_experts + l + lane;
      const bool is_expert = l + lane < p.num_local_experts;
      const int32_t padded = is_expert ? padded_rows(p, sh.total[e]) : 0;
      int32_t offset, sum;
      Scan(storage[warp]).ExclusiveSum(padded, offset, sum);
      if (is_expert) sh.start[e] = running + offset;
      running += sum;
    }
  }
  __syncthreads();
}

// After agree() and a grid barrier: every block turns the announced counts into bases for its own chunk, within each
// expert's group and each rank's slots.
__device__ __forceinline__ void place_groups(const DispatchParams &p, const Session &session, RouteShared sh) {
  const int num_ranks = p.call.num_ranks, columns = p.num_experts + num_ranks;
  for (int c = threadIdx.x; c < columns; c += blockDim.x) {
    const int32_t blocks = sum_of(blockIdx.x, [&](int b) { return session.workspace(b)[c]; });
    const SumAndPart ranks = sums_of(num_ranks, p.call.rank, [&](int s) { return session.counts_of(s)[c]; });
    if (c < p.num_experts) sh.total[c] = ranks.all;
    else sh.slots[c - p.num_experts] = ranks.all;
    for (int w = 0; w < sh.num_warps; ++w) sh.positions[w * columns + c] += blocks + ranks.part;
  }
  __syncthreads();
  start_groups(p, sh); // ends with a barrier
}

// Positions inside the chunk -> final rows and slots; outside the window -1.
__device__ __forceinline__ void place_tokens(const DispatchParams &p, RouteShared sh) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int num_ranks = p.call.num_ranks, columns = p.num_experts + num_ranks, num_topk = p.call.num_topk;
  if (warp < sh.num_warps) {
    const TokenRange mine = warp_tokens(block_share(p.num_tokens), warp, sh.num_warps);
    const int32_t *base = sh.positions + warp * columns;
    const bool is_token_layout = p.is_token_layout();
    const int64_t first = window_start(p);
    auto in_window = [&](int64_t row) { return row >= first && row < first + p.capacity ? int(row - first) : -1; };
    // Ids are read two steps ahead, what count_tokens left for them one step ahead.
    struct Places { int row, slot; };
    const int step = kWarpSize / num_topk;
    auto places_of = [&](const Entry &e) {
      Places at{0, 0};
      if (e.is_valid) at.slot = p.slot[int64_t(e.token) * num_ranks + e.rank];
      if (e.is_valid && !is_token_layout) at.row = p.dst_row[e.at];
      return at;
    };
    Entry e(p, Entry::id(p, p.topk_clean, mine.begin, mine.end, lane), mine.begin, mine.end, lane);
    int id = Entry::id(p, p.topk_clean, mine.begin + step, mine.end, lane);
    Places at = places_of(e);
    for (int t = mine.begin; t < mine.end; t += step) {
      const Entry next(p, id, t + step, mine.end, lane);
      id = Entry::id(p, p.topk_clean, t + 2 * step, mine.end, lane);
      const Places next_at = places_of(next);
      __syncwarp(); // all entries of the token have read its slot (one step ago) before the first one rewrites it
      if (e.is_valid) {
        int slot = at.slot + base[p.num_experts + e.rank], row = at.row + base[e.expert] + sh.start[e.expert];
        if (is_token_layout) row = slot = in_window(slot);
        else row = in_window(row);
        if (row >= 0 && p.layout == Layout::kBatched) row += e.expert % p.num_local_experts * p.capacity;
        p.dst_row[e.at] = row;
        if (e.is_first) p.slot[int64_t(e.token) * num_ranks + e.rank] = slot;
      }
      e = next, at = next_at;
    }
  }
  __syncthreads();
}

} // namespace jax_ep
