// Dispatch, the receiver's side: which rows of its own result a rank gets, their sizes, and zeros where nobody writes.
#pragma once

#include "cuda/kernels/route.cuh"

namespace jax_ep {

// Own groups as every block needs them for zeroing: group l holds rows [start, start + kept), then nothing up to `end_of`.
struct OwnRows {
  const int32_t *start, *kept; // [L], shared memory
  int num_slots;               // slots kept
  int end;                     // expert layout: rows past the last group begin here; token layout: rows past the slots
};

// Sum over the lanes below, and over all lanes.
struct WarpSums { int32_t before, total; };
__device__ __forceinline__ WarpSums warp_sums(int32_t value, int lane) {
  int32_t upto = value;
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) {
    const int32_t below = __shfl_up_sync(kFullWarp, upto, step);
    if (lane >= step) upto += below;
  }
  return {upto - value, __shfl_sync(kFullWarp, upto, kWarpSize - 1)};
}

// `at` of all rows in the window of the result, which begins with row `first`, cut to it.
__device__ __forceinline__ int in_capacity(const DispatchParams &p, int64_t first, int64_t at) {
  return int(min(max(at - first, int64_t(0)), int64_t(p.capacity)));
}

// `first_row`: of the window.
template <bool kRoute>
__device__ OwnRows own_rows(const DispatchParams &p, int64_t first_row, RouteShared sh, int32_t *start, int32_t *kept) {
  __shared__ int s_end;
  const int first = p.call.rank * p.num_local_experts, num_local = p.num_local_experts;
  const int lane = threadIdx.x % kWarpSize;
  const bool is_batched = p.layout == Layout::kBatched;
  int num_slots = 0;
  if constexpr (kRoute) {
    for (int l = threadIdx.x; l < num_local; l += blockDim.x) {
      const int64_t at = sh.start[first + l];
      const int begin = in_capacity(p, first_row, at);
      start[l] = is_batched ? l * p.capacity : begin;
      kept[l] = in_capacity(p, first_row, at + sh.total[first + l]) - begin;
    }
    const int last = first + num_local - 1;
    if (threadIdx.x == 0) s_end = in_capacity(p, first_row, int64_t(sh.start[last]) + padded_rows(p, sh.total[last]));
    const int slots = sh.slots[p.call.rank];
    num_slots = p.is_token_layout() ? in_capacity(p, first_row, slots) : min(slots, p.num_slots);
  } else { // a handle is reused: its sizes are already cut to the window
    num_slots = p.recv_offsets[p.call.num_ranks];
    if (threadIdx.x < kWarpSize && !p.is_token_layout()) {
      int at = 0;
      for (int l = lane; l - lane < num_local; l += kWarpSize) {
        const WarpSums sums = warp_sums(l < num_local ? p.group_sizes[l] : 0, lane);
        if (l < num_local) start[l] = is_batched ? l * p.capacity : at + sums.before, kept[l] = p.counts[l];
        at += sums.total;
      }
      if (lane == 0) s_end = at;
    }
  }
  __syncthreads();
  return {start, kept, num_slots, p.is_token_layout() ? num_slots : s_end};
}

// Block 0, routing: the receiver's view of the exchange. One warp per kind of number. `slots_from(s)`: how many of source
// s's tokens come here.
template <class SlotsFrom>
__device__ void write_sizes(const DispatchParams &p, int64_t first_row, SlotsFrom slots_from, RouteShared sh,
                            const OwnRows &own) {
  const int first = p.call.rank * p.num_local_experts, num_local = p.num_local_experts, num_ranks = p.call.num_ranks;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const bool is_token_layout = p.is_token_layout(), is_batched = p.layout == Layout::kBatched;
  const int slots = sh.slots[p.call.rank];
  if (warp == 0) { // first slot of each source
    int32_t at = 0;
    for (int s = lane; s - lane < num_ranks; s += kWarpSize) {
      const WarpSums sums = warp_sums(s < num_ranks ? slots_from(s) : 0, lane);
      const int64_t slot = at + sums.before;
      if (s < num_ranks) p.recv_offsets[s] = is_token_layout ? in_capacity(p, first_row, slot) : int(min(slot, int64_t(p.num_slots)));
      at += sums.total;
    }
    if (lane == 0) {
      p.recv_offsets[num_ranks] = own.num_slots;
      p.stats[5] = own.num_slots;
    }
  } else if (warp == 1) { // groups, and what of them was kept
    int32_t rows = 0, kept = 0, padded = 0, fullest = 0;
    for (int l = lane; l - lane < num_local; l += kWarpSize) {
      if (l >= num_local) continue;
      const int64_t at = sh.start[first + l];
      const int32_t total = sh.total[first + l], size = padded_rows(p, total);
      p.group_sizes[l] = p.layout == Layout::kExpert ? in_capacity(p, first_row, at + size) - in_capacity(p, first_row, at) : 0;
      // Token layout: right unless slots are outside the window; count_pairs corrects that case at the end.
      p.counts[l] = is_token_layout ? total : own.kept[l];
      rows += total, kept += own.kept[l], padded += size, fullest = max(fullest, total);
    }
    const int dropped = __reduce_add_sync(kFullWarp, rows - kept), all = __reduce_add_sync(kFullWarp, padded);
    fullest = __reduce_max_sync(kFullWarp, fullest);
    if (lane == 0) {
      p.stats[0] = is_token_layout ? slots : is_batched ? fullest : all; // demand
      // With a window that was asked for, another one carries the others.
      p.stats[1] = p.window && *p.window >= 0 ? 0 : is_token_layout ? slots - own.num_slots : dropped; // num_dropped
      p.stats[2] = *sh.invalid;                                          // num_invalid
      p.stats[3] = 0;                                                    // num_masked
      p.stats[6] = p.stats[7] = 0;
    }
  } else if (warp == 2) { // the largest demand of any rank
    int32_t most = 0;
    if (is_batched) {
      for (int e = lane; e < p.num_experts; e += kWarpSize) most = max(most, sh.total[e]);
    } else {
      for (int d = lane; d < num_ranks; d += kWarpSize) {
        const int last = (d + 1) * num_local - 1;
        most = max(most, is_token_layout ? sh.slots[d] : sh.start[last] + padded_rows(p, sh.total[last]));
      }
    }
    most = __reduce_max_sync(kFullWarp, most);
    if (lane == 0) p.stats[4] = max(1, int32_t((int64_t(most) + p.capacity - 1) / p.capacity)); // num_windows
  }
}

// Block 0, token layout with slots outside the window, after all rows are here: (token, expert) pairs among kept slots.
__device__ __forceinline__ void count_pairs(const DispatchParams &p, const OwnRows &own) {
  for (int l = threadIdx.x; l < p.num_local_experts; l += blockDim.x) p.counts[l] = 0;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < int64_t(own.num_slots) * p.call.num_topk; i += blockDim.x)
    if (p.slot_meta[i] >= 0) atomicAdd(&p.counts[p.slot_meta[i]], 1);
}

// Rows that no source writes: padding inside groups always, the tail if asked; their sides with them, weights and slots
// always.
// Warps from `first_warp` on; `zeros`: a page of them in shared memory (bulk copies).
template <bool kRoute, bool kBulk>
__device__ void zero_rest(const DispatchParams &p, int first_warp, const char *zeros, int zeros_bytes, const OwnRows &own) {
  const int lane = threadIdx.x % kWarpSize;
  const int warps = int(blockDim.x) / kWarpSize - first_warp, warp = int(threadIdx.x / kWarpSize) - first_warp;
  if (warp < 0) return;
  const int64_t id = int64_t(blockIdx.x) * warps + warp, step = int64_t(gridDim.x) * warps;
  const int64_t thread = id * kWarpSize + lane, threads = step * kWarpSize;
  const int64_t row_bytes = p.call.row_bytes, side_bytes = p.call.side_bytes, num_rows = p.num_rows();
  // Loops are not unrolled: most have no step or one, and the code would come from far for nothing.
  auto zero_row = [&](int64_t row) {
    char *dst = p.recv_x + row * row_bytes;
    if constexpr (kBulk) {
#pragma unroll 1
      for (int64_t at = int64_t(lane) * zeros_bytes; at < row_bytes; at += int64_t(kWarpSize) * zeros_bytes)
        bulk_store(dst + at, zeros, unsigned(min(row_bytes - at, int64_t(zeros_bytes))));
    } else {
      warp_zero(dst, row_bytes, lane);
    }
    if (p.recv_side)
#pragma unroll 1
      for (int64_t i = lane; i < side_bytes; i += kWarpSize) p.recv_side[row * side_bytes + i] = 0;
  };
  const bool is_batched = p.layout == Layout::kBatched;
  if (is_batched && p.recv_weights) { // all experts at once: each has only a few
#pragma unroll 1
    for (int64_t row = thread; row < num_rows; row += threads) { // numbers of rows fit 32 bits
      const uint32_t l = uint32_t(row) / uint32_t(p.capacity);
      if (uint32_t(row) - l * uint32_t(p.capacity) >= uint32_t(own.kept[l])) p.recv_weights[row] = 0.f;
    }
  }
  if (!p.is_token_layout() && (!is_batched || p.zero_tail)) {
    // Padding behind each group (batched: the tail of each expert), 32 groups looked at together: most have none.
#pragma unroll 1
    for (int base = 0; base < p.num_local_experts; base += kWarpSize) {
      const int l = base + lane;
      int begin = 0, end = 0;
      if (l < p.num_local_experts) {
        begin = own.start[l] + own.kept[l];
        end = is_batched ? (l + 1) * p.capacity : l + 1 < p.num_local_experts ? own.start[l + 1] : own.end;
      }
      for (unsigned left = __ballot_sync(kFullWarp, begin < end); left; left &= left - 1) {
        const int64_t from = __shfl_sync(kFullWarp, begin, __ffs(left) - 1), to = __shfl_sync(kFullWarp, end, __ffs(left) - 1);
#pragma unroll 1
        for (int64_t row = from + id; row < to; row += step) zero_row(row);
        if (p.recv_weights && !is_batched)
#pragma unroll 1
          for (int64_t row = from + thread; row < to; row += threads) p.recv_weights[row] = 0.f;
      }
    }
  }
  const int64_t tail = is_batched ? num_rows : own.end;
  if (p.zero_tail)
#pragma unroll 1
    for (int64_t row = tail + id; row < num_rows; row += step) zero_row(row);
  if constexpr (kBulk) {
    bulk_commit();
    bulk_wait_stored();
  }
  if (p.recv_weights)
#pragma unroll 1
    for (int64_t i = tail * p.scalars_per_row() + thread; i < num_rows * p.scalars_per_row(); i += threads)
      p.recv_weights[i] = 0.f;
  if constexpr (kRoute) {
    const int num_topk = p.call.num_topk;
#pragma unroll 1
    for (int64_t i = int64_t(own.num_slots) * num_topk + thread; i < int64_t(p.num_slots) * num_topk; i += threads)
      p.slot_meta[i] = -1;
#pragma unroll 1
    for (int64_t i = own.num_slots + thread; i < p.num_slots; i += threads) p.slot_token[i] = -1;
  }
}

} // namespace jax_ep
