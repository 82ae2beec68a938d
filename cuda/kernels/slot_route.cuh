// Routing in latency mode: every block works out alone, from the ids that all ranks left in this rank's slot, where rows go.
//
// The tokens of all ranks, by source, are cut into chunks, one or more for each source; a warp counts a chunk at a time,
// sums over the chunks before give its places (route.cuh: the same counting, the same order). Each block then writes
// what its share of this rank's tokens, and its share of all tokens, put into the handle.
#pragma once

#include "cuda/kernels/latency.cuh"
#include "cuda/kernels/receive.cuh"

namespace jax_ep {

// Chunks of all tokens for `num_warps` warps.
JAX_EP_HD int chunks_per_source(int num_ranks, int num_warps) { return num_ranks < num_warps ? num_warps / num_ranks : 1; }

__device__ __forceinline__ TokenRange share_of(int64_t n) {
  return {int(n * blockIdx.x / gridDim.x), int(n * (blockIdx.x + 1) / gridDim.x)};
}

// Last warp of a block: ids (of calls that route) and weights of the block's share of tokens, to every rank.
template <bool kRoute>
__device__ __forceinline__ void send_table(const DispatchParams &p, char *const *parts, const SlotShape &shape, int lane) {
  const TokenRange mine = share_of(p.num_tokens);
  const int32_t *ids = kRoute ? p.topk_idx : p.topk_clean;
  for (int64_t i = int64_t(mine.begin) * p.call.num_topk + lane; i < int64_t(mine.end) * p.call.num_topk; i += kWarpSize) {
    const int id = ids[i];
    const bool is_valid = id >= 0 && id < p.num_experts;
    const float weight = p.weights && is_valid ? p.weights[i] : 0.f; // elsewhere it may be anything
    for (int r = 0; r < p.call.num_ranks; ++r) {
      if (kRoute) reinterpret_cast<int32_t *>(parts[r] + shape.ids())[i] = is_valid ? id : -1;
      if (p.weights) reinterpret_cast<float *>(parts[r] + shape.scalars())[i] = weight;
    }
  }
}

// The ids of all sources: in place, or a copy in shared memory where there is room for it.
struct Table {
  const char *sent; // [R] parts of this rank's slot
  const int32_t *copy; // [R, T, K] or null
  SlotShape shape;
  __device__ const int32_t *in_place(int source) const {
    return reinterpret_cast<const int32_t *>(sent + source * shape.bytes() + shape.ids());
  }
  __device__ const int32_t *ids_of(int source) const {
    return copy ? copy + source * shape.num_tokens * shape.num_topk : in_place(source);
  }
  __device__ void fill(int32_t *to, int num_ranks) const {
    const int64_t per = shape.num_tokens * shape.num_topk;
    for (int64_t i = threadIdx.x; i < num_ranks * per; i += blockDim.x)
      to[i] = in_place(int(i / per))[i % per];
  }
};

// Counts all tokens: `sh.positions` [chunks][E + R] become the first places of each chunk, `sh.start` and the totals are
// filled, and `first_slot` [R + 1] of each source in this rank's slots.
__device__ __forceinline__ void count_table(const DispatchParams &p, const Table &table, RouteShared sh, int32_t *first_slot) {
  const int num_ranks = p.call.num_ranks, columns = p.num_experts + num_ranks;
  const int warp = threadIdx.x / kWarpSize, num_warps = blockDim.x / kWarpSize;
  const int per_source = chunks_per_source(num_ranks, num_warps), chunks = num_ranks * per_source;
  for (int i = threadIdx.x; i < chunks * columns; i += blockDim.x) sh.positions[i] = 0;
  if (threadIdx.x == 0) *sh.invalid = 0;
  __syncthreads();
  for (int c = warp; c < chunks; c += num_warps) {
    const int64_t n = p.num_tokens, part = c % per_source;
    const TokenRange tokens{int(n * part / per_source), int(n * (part + 1) / per_source)};
    walk_tokens(p, table.ids_of(c / per_source), tokens, sh.positions + c * columns, [](const Entry &, int, int, int) {});
  }
  if (blockIdx.x == 0) // only its own ids can be told from -1
    for (int64_t i = threadIdx.x; i < int64_t(p.num_tokens) * p.call.num_topk; i += blockDim.x)
      if (p.topk_idx[i] < -1 || p.topk_idx[i] >= p.num_experts) atomicAdd(sh.invalid, 1);
  __syncthreads();
  for (int c = threadIdx.x; c < columns; c += blockDim.x) {
    const bool is_own_slot = c == p.num_experts + p.call.rank;
    int32_t sum = 0;
    for (int chunk = 0; chunk < chunks; ++chunk) {
      if (is_own_slot && chunk % per_source == 0) first_slot[chunk / per_source] = sum;
      const int32_t n = sh.positions[chunk * columns + c];
      sh.positions[chunk * columns + c] = sum;
      sum += n;
    }
    if (is_own_slot) first_slot[num_ranks] = sum;
    if (c < p.num_experts) sh.total[c] = sum;
    else sh.slots[c - p.num_experts] = sum;
  }
  __syncthreads();
  start_groups(p, sh);
}

// Writes this block's share of the handle, and returns which of this rank's slots are its own to fill.
__device__ __forceinline__ TokenRange place_table(const DispatchParams &p, const Table &table, RouteShared sh) {
  __shared__ int s_begin, s_end;
  const int num_ranks = p.call.num_ranks, columns = p.num_experts + num_ranks, num_topk = p.call.num_topk;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, num_warps = blockDim.x / kWarpSize;
  const int per_source = chunks_per_source(num_ranks, num_warps);
  const TokenRange own = share_of(p.num_tokens), all = share_of(int64_t(p.num_tokens) * num_ranks);
  for (int64_t i = int64_t(own.begin) * num_ranks + threadIdx.x; i < int64_t(own.end) * num_ranks; i += blockDim.x)
    p.slot[i] = -1;
  if (threadIdx.x == 0) s_begin = INT_MAX, s_end = 0;
  __syncthreads();
  const int64_t first = window_start(p);
  const bool is_token_layout = p.is_token_layout(), is_batched = p.layout == Layout::kBatched;
  auto in_window = [&](int64_t row) { return row >= first && row < first + p.capacity ? int(row - first) : -1; };
  for (int c = warp; c < num_ranks * per_source; c += num_warps) {
    const int source = c / per_source;
    const int64_t n = p.num_tokens, part = c % per_source;
    TokenRange tokens{int(n * part / per_source), int(n * (part + 1) / per_source)};
    // Only what comes before the end of a share must be gone through.
    const TokenRange arriving{int(max(int64_t(all.begin) - source * n, int64_t(0))), int(min(all.end - source * n, n))};
    const TokenRange leaving = source == p.call.rank ? own : TokenRange{0, 0};
    auto overlap = [&](TokenRange r) { return max(r.begin, tokens.begin) < min(r.end, tokens.end) ? min(r.end, tokens.end) : 0; };
    tokens.end = max(overlap(arriving), overlap(leaving));
    if (tokens.end <= tokens.begin) continue;
    walk_tokens(p, table.ids_of(source), tokens, sh.positions + c * columns, [&](const Entry &e, int, int row, int place) {
      if (is_token_layout) place = e.is_first ? in_window(place) : -1;
      // A token's slot on a rank is counted at its first entry for it.
      const int slot = __shfl_sync(kFullWarp, place, e.is_valid ? __ffs(e.same_token_rank) - 1 : lane);
      const unsigned firsts_here = __ballot_sync(kFullWarp, e.is_first && e.rank == p.call.rank);
      const unsigned of_token = (num_topk == kWarpSize ? kFullWarp : (1u << num_topk) - 1) << (lane / num_topk * num_topk % kWarpSize);
      const int from = __ffs(firsts_here & of_token) - 1;
      const int here = __shfl_sync(kFullWarp, place, from < 0 ? lane : from);
      if (is_token_layout) row = e.is_valid ? slot : -1;
      else if (e.is_valid) row = in_window(row + sh.start[e.expert]);
      if (is_batched && row >= 0) row += e.expert % p.num_local_experts * p.capacity;
      if (!e.is_in_range) return;
      if (source == p.call.rank && e.token >= own.begin && e.token < own.end) {
        p.topk_clean[e.at] = e.expert;
        p.dst_row[e.at] = row;
        if (e.is_first) p.slot[int64_t(e.token) * num_ranks + e.rank] = slot;
      }
      if (from < 0 || here < 0 || e.token < arriving.begin || e.token >= arriving.end) return;
      const bool is_here = e.is_valid && e.rank == p.call.rank;
      const int meta = is_token_layout ? e.expert - p.call.rank * p.num_local_experts : row;
      p.slot_meta[int64_t(here) * num_topk + e.k] = is_here ? meta : -1;
      if (e.k != 0) return;
      p.slot_token[here] = e.token;
      atomicMin(&s_begin, here), atomicMax(&s_end, here + 1);
    });
  }
  __syncthreads();
  return {min(s_begin, s_end), s_end};
}

} // namespace jax_ep
