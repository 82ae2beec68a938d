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

namespace jax_ep {

struct TokenRange { int begin, end; };

__device__ __forceinline__ TokenRange block_tokens(int num_tokens) {
  const int64_t n = num_tokens;
  return {int(n * blockIdx.x / gridDim.x), int(n * (blockIdx.x + 1) / gridDim.x)};
}

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
  int32_t *invalid;   // [1]
  int num_warps;      // warps that route
};

// Entries of whole tokens side by side in a warp: lane = token * K + k.
struct Entry {
  int token, k, expert, rank; // expert and rank -1: not routed
  bool is_valid, is_first;    // first entry of its token for its rank
  unsigned same_expert, same_rank_first;

  __device__ Entry(const DispatchParams &p, const int32_t *ids, int first_token, int end, int lane) {
    const int num_topk = p.call.num_topk, per_warp = kWarpSize / num_topk;
    token = first_token + lane / num_topk, k = lane % num_topk;
    const bool is_active = lane < per_warp * num_topk && token < end;
    raw = is_active ? ids[int64_t(token) * num_topk + k] : -1;
    is_valid = raw >= 0 && raw < p.num_experts;
    expert = is_valid ? raw : -1;
    rank = is_valid ? raw / p.num_local_experts : -1;
    is_in_range = is_active;
    const unsigned below = (1u << lane) - 1;
    // Lanes without an entry get a key of their own (the sign bit keeps it apart from ids).
    const unsigned alone = 0x80000000u | lane;
    same_expert = __match_any_sync(kFullWarp, is_valid ? unsigned(expert) : alone);
    const unsigned same_token_rank =
        __match_any_sync(kFullWarp, is_valid ? unsigned(lane / num_topk) << 16 | unsigned(rank) : alone);
    is_first = is_valid && (same_token_rank & below) == 0;
    same_rank_first = __match_any_sync(kFullWarp, is_first ? unsigned(rank) : alone);
  }
  int raw;
  bool is_in_range;
};

// Counts this block's tokens; leaves positions inside the warp's chunk in dst_row and slot.
__device__ __forceinline__ void count_tokens(const DispatchParams &p, const Session &session, RouteShared sh) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int num_ranks = p.call.num_ranks, columns = p.num_experts + num_ranks, num_topk = p.call.num_topk;
  for (int i = threadIdx.x; i < sh.num_warps * columns; i += blockDim.x) sh.positions[i] = 0;
  if (threadIdx.x == 0) *sh.invalid = 0;
  __syncthreads();
  const TokenRange block = block_tokens(p.num_tokens);
  if (warp < sh.num_warps) {
    const TokenRange mine = warp_tokens(block, warp, sh.num_warps);
    for (int64_t i = int64_t(mine.begin) * num_ranks + lane; i < int64_t(mine.end) * num_ranks; i += kWarpSize)
      p.slot[i] = -1;
    __syncwarp();
    int32_t *count = sh.positions + warp * columns;
    const unsigned below = (1u << lane) - 1;
    int num_invalid = 0;
    for (int t = mine.begin; t < mine.end; t += kWarpSize / num_topk) {
      const Entry e(p, p.topk_idx, t, mine.end, lane);
      num_invalid += __popc(__ballot_sync(kFullWarp, e.is_in_range && !e.is_valid && e.raw != -1));
      int row = -1, slot = -1;
      if (e.is_valid) row = count[e.expert] + __popc(e.same_expert & below);
      if (e.is_first) slot = count[p.num_experts + e.rank] + __popc(e.same_rank_first & below);
      __syncwarp(); // all lanes have read the counts
      if (e.is_valid && (e.same_expert & below) == 0) count[e.expert] += __popc(e.same_expert);
      if (e.is_first && (e.same_rank_first & below) == 0) count[p.num_experts + e.rank] += __popc(e.same_rank_first);
      __syncwarp(); // and the next step sees them advanced
      if (e.is_in_range) {
        const int64_t at = int64_t(e.token) * num_topk + e.k;
        p.topk_clean[at] = e.expert;
        p.dst_row[at] = row;
        if (e.is_first) p.slot[int64_t(e.token) * num_ranks + e.rank] = slot;
      }
    }
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

// Leader block, after a grid barrier: this rank's totals, to be announced. Written over `total`/`start`'s room.
__device__ __forceinline__ void sum_blocks(const Session &session, int columns, int32_t *sums) {
  for (int c = threadIdx.x; c < columns; c += blockDim.x) {
    int32_t sum = 0;
    for (int b = 0; b < int(gridDim.x); ++b) sum += session.workspace(b)[c];
    sums[c] = sum;
  }
  __syncthreads();
}

// After agree() and a grid barrier: every block turns the announced counts into bases for its own chunk.
__device__ __forceinline__ void place_groups(const DispatchParams &p, const Session &session, RouteShared sh) {
  const int num_ranks = p.call.num_ranks, columns = p.num_experts + num_ranks;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, num_warps = blockDim.x / kWarpSize;
  for (int c = threadIdx.x; c < p.num_experts; c += blockDim.x) {
    int32_t total = 0;
    for (int s = 0; s < num_ranks; ++s) total += session.counts_of(s)[c];
    sh.total[c] = total;
  }
  __syncthreads();
  // Groups of one rank follow each other, each padded to the alignment: one warp scans one rank.
  for (int d = warp; d < num_ranks; d += num_warps) {
    using Scan = cub::WarpScan<int32_t>;
    __shared__ typename Scan::TempStorage storage[kWarpSize];
    int32_t running = 0;
    for (int l = 0; l < p.num_local_experts; l += kWarpSize) {
      const int e = d * p.num_local_experts + l + lane;
      const bool is_expert = l + lane < p.num_local_experts;
      const int32_t padded = is_expert ? int32_t(round_up(sh.total[e], p.alignment)) : 0;
      int32_t offset, sum;
      Scan(storage[warp]).ExclusiveSum(padded, offset, sum);
      if (is_expert) sh.start[e] = running + offset;
      running += sum;
    }
  }
  __syncthreads();
  for (int c = threadIdx.x; c < columns; c += blockDim.x) {
    int32_t base = c < p.num_experts ? sh.start[c] : 0;
    for (int s = 0; s < p.call.rank; ++s) base += session.counts_of(s)[c];
    for (int b = 0; b < int(blockIdx.x); ++b) base += session.workspace(b)[c];
    for (int w = 0; w < sh.num_warps; ++w) sh.positions[w * columns + c] += base;
  }
  __syncthreads();
}

// Positions inside the chunk -> final rows and slots; beyond the capacity -1.
__device__ __forceinline__ void place_tokens(const DispatchParams &p, RouteShared sh) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int num_ranks = p.call.num_ranks, columns = p.num_experts + num_ranks, num_topk = p.call.num_topk;
  if (warp < sh.num_warps) {
    const TokenRange mine = warp_tokens(block_tokens(p.num_tokens), warp, sh.num_warps);
    const int32_t *base = sh.positions + warp * columns;
    const bool is_token_layout = p.layout == Layout::kToken;
    for (int t = mine.begin; t < mine.end; t += kWarpSize / num_topk) {
      const Entry e(p, p.topk_clean, t, mine.end, lane);
      const int64_t slot_at = e.is_valid ? int64_t(e.token) * num_ranks + e.rank : 0;
      int slot = -1;
      if (e.is_valid) {
        slot = p.slot[slot_at] + base[p.num_experts + e.rank];
        if (is_token_layout && slot >= p.capacity) slot = -1;
      }
      __syncwarp(); // all entries of a token have read its slot before the first one rewrites it
      if (e.is_first) p.slot[slot_at] = slot;
      if (e.is_valid) {
        const int64_t at = int64_t(e.token) * num_topk + e.k;
        int row = slot;
        if (!is_token_layout) {
          row = p.dst_row[at] + base[e.expert];
          if (row >= p.capacity) row = -1;
        }
        p.dst_row[at] = row;
      }
    }
  }
  __syncthreads();
}

} // namespace jax_ep
