// Routing in latency mode. One block of each rank, the router, counts the rank's own tokens and tells every rank which of
// them arrive there and in which places among this source's; from all sources' counts every block then knows every place.
//
// Counting is by bitmaps [E + R][tokens]: a bit says that a token goes to an expert, or to a rank, so the number of bits
// before it is its place. No order of threads matters. An expert that repeats within a token is counted apart.
#pragma once

#include "cuda/kernels/latency.cuh"
#include "cuda/kernels/receive.cuh"

namespace jax_ep {

// Shared memory of routing, planned on the host: counting first, then receiving, in the same room.
struct SlotRoutePlan {
  int segment; // tokens that are counted at a time, a multiple of 32
  int bytes;

  static SlotRoutePlan make(int num_ranks, int num_experts, int num_topk, int64_t num_tokens, int64_t room) {
    const int64_t columns = int64_t(num_experts) + num_ranks;
    SlotRoutePlan plan{int(round_up(num_tokens < 512 ? num_tokens : 512, 32)), 0};
    if (plan.segment < 32) plan.segment = 32;
    auto count_bytes = [&] {
      return columns * 4 * (1 + plan.segment / 32) + int64_t(plan.segment) * (2 * num_topk + num_ranks) * 4;
    };
    while (plan.segment > 32 && count_bytes() > room) plan.segment -= 32;
    const int64_t receive_bytes = 4 * (4 * int64_t(num_experts) + 2 * num_ranks);
    plan.bytes = int(count_bytes() > receive_bytes ? count_bytes() : receive_bytes);
    return plan;
  }
};

// What receiving needs, in shared memory.
struct SlotRoute {
  int32_t *start, *total; // [E] as in RouteShared
  int32_t *before_own;    // [E] rows of an expert from sources before this rank
  int32_t *before_here;   // [R, L] of this rank's experts, from sources before each source
  int32_t *slots;         // [R] slots of each rank
  int32_t *own_slot;      // [R] ... from sources before this rank
  int32_t *first_slot;    // [R + 1] of each source, among this rank's
  int32_t *invalid;       // [1] ids out of range; in the router block
  int64_t first_row;      // of the window

  __device__ SlotRoute(const DispatchParams &p, char *room, int32_t *first_slot_, int32_t *invalid_, int64_t first_row_)
      : start(reinterpret_cast<int32_t *>(room)), total(start + p.num_experts), before_own(total + p.num_experts),
        before_here(before_own + p.num_experts), slots(before_here + p.num_experts), own_slot(slots + p.call.num_ranks),
        first_slot(first_slot_), invalid(invalid_), first_row(first_row_) {}
  __device__ RouteShared shared() const { return {nullptr, start, total, slots, invalid, 0}; }
};

template <class T> __device__ __forceinline__ T *at_offset(const char *base, int64_t offset) {
  return reinterpret_cast<T *>(const_cast<char *>(base) + offset);
}

// Entries side by side in a warp: lane = item * K + k, like Entry in route.cuh. Calls visit(item, k) for n items with all
// warps of the block.
template <class Visit> __device__ __forceinline__ void for_items(int n, int num_topk, Visit visit) {
  const int lane = threadIdx.x % kWarpSize, step = kWarpSize / num_topk;
  if (lane >= step * num_topk) return;
#pragma unroll 1
  for (int item = int(threadIdx.x / kWarpSize) * step + lane / num_topk; item < n; item += int(blockDim.x / kWarpSize) * step)
    visit(item, lane % num_topk);
}

// Router block, before the call is entered: clears what it counts in, and asks for the first ids.
struct FirstIds {
  static constexpr int kUnroll = 4;
  int id[kUnroll]; // entries threadIdx.x + j * blockDim.x
};
__device__ __forceinline__ FirstIds begin_count(const DispatchParams &p, const SlotRoutePlan &plan, char *room, int32_t *invalid) {
  FirstIds ids;
#pragma unroll
  for (int j = 0; j < FirstIds::kUnroll; ++j) {
    const int64_t i = int64_t(threadIdx.x) + j * int(blockDim.x);
    ids.id[j] = i < int64_t(p.num_tokens) * p.call.num_topk ? p.topk_idx[i] : -1;
  }
  int32_t *const cleared = reinterpret_cast<int32_t *>(room); // counts and bits
#pragma unroll 1
  for (int i = threadIdx.x; i < (p.num_experts + p.call.num_ranks) * (1 + plan.segment / 32); i += blockDim.x) cleared[i] = 0;
  if (threadIdx.x == 0) *invalid = 0;
  return ids;
}

// Router block, after begin_count and a barrier. Counts this rank's tokens. `tells`: every rank its arrivals and the counts (not:
// a done, whose start did). With results, leaves places within this rank's tokens in dst_row and slot; finish_own makes them
// final.
__device__ __noinline__ void count_own(const DispatchParams &p, const SlotRoutePlan &plan, const SlotShape &shape, char *room,
                                       Parts parts, bool tells, int32_t *invalid, FirstIds ahead) {
  const int num_ranks = p.call.num_ranks, num_topk = p.call.num_topk, columns = p.num_experts + num_ranks;
  constexpr int kUnroll = FirstIds::kUnroll;
  const int words = plan.segment / 32;
  int32_t *count = reinterpret_cast<int32_t *>(room);           // [E + R] of the segments before
  uint32_t *bits = reinterpret_cast<uint32_t *>(count + columns); // [E + R][words]
  int32_t *ids = reinterpret_cast<int32_t *>(bits + columns * words); // [segment, K] clean
  int32_t *places = ids + plan.segment * num_topk;                // [segment, K] among this rank's entries for the expert, or -1
  int32_t *arrivals = places + plan.segment * num_topk;           // [segment, R] among this rank's tokens for the rank, or -1
  for (int first = 0; first < p.num_tokens; first += plan.segment) {
    const int tokens = min(plan.segment, p.num_tokens - first), entries = tokens * num_topk;
    if (first) {
      __syncthreads(); // all that was counted is read
#pragma unroll 1
      for (int i = threadIdx.x; i < columns * words; i += blockDim.x) bits[i] = 0;
      __syncthreads();
    }
    bool repeats = false;
#pragma unroll 1
    for (int base = threadIdx.x; base < entries; base += kUnroll * blockDim.x) {
      int loaded[kUnroll]; // under way together
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {
        const int i = base + j * int(blockDim.x);
        if (first == 0 && base == int(threadIdx.x)) loaded[j] = ahead.id[j];
        else loaded[j] = i < entries ? p.topk_idx[int64_t(first) * num_topk + i] : -1;
      }
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {
        const int i = base + j * int(blockDim.x), id = loaded[j], token = i / num_topk;
        if (i >= entries) break;
        const bool is_valid = id >= 0 && id < p.num_experts;
        if (!is_valid && id != -1) atomicAdd(invalid, 1);
        ids[i] = is_valid ? id : -1;
        if (p.topk_clean) p.topk_clean[int64_t(first) * num_topk + i] = ids[i];
        if (!is_valid) continue;
        const uint32_t bit = 1u << token % 32;
        repeats |= (atomicOr(&bits[id * words + token / 32], bit) & bit) != 0;
        atomicOr(&bits[(p.num_experts + id / p.num_local_experts) * words + token / 32], bit);
      }
    }
    const bool has_repeats = __syncthreads_or(repeats);
    auto before = [&](int column, int token) { // bits of the column before the token's, and what earlier segments have
      const uint32_t *row = bits + column * words;
      int n = count[column];
      for (int w = 0; w < token / 32; ++w) n += __popc(row[w]);
      return n + __popc(row[token / 32] & ((1u << token % 32) - 1));
    };
    auto repeated = [&](int id, int end) { // entries [0, end) that repeat this expert within their token
      int n = 0;
#pragma unroll 1
      for (int i = 0; i < end; ++i) {
        if (ids[i] != id) continue;
#pragma unroll 1
        for (int j = i / num_topk * num_topk; j < i; ++j)
          if (ids[j] == id) {
            ++n;
            break;
          }
      }
      return n;
    };
#pragma unroll 1
    for (int i = threadIdx.x; i < entries; i += blockDim.x) {
      const int id = ids[i], token = i / num_topk;
      int place = -1;
      if (id >= 0) {
        place = before(id, token);
        if (has_repeats) {
          place += repeated(id, token * num_topk); // of earlier tokens
#pragma unroll 1
          for (int j = token * num_topk; j < i; ++j) place += ids[j] == id;
        }
        if (p.dst_row) p.dst_row[int64_t(first) * num_topk + i] = place;
      }
      places[i] = place;
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < tokens * num_ranks; i += blockDim.x) {
      const int token = i / num_ranks, rank = i - token * num_ranks, column = p.num_experts + rank;
      const bool goes = bits[column * words + token / 32] >> token % 32 & 1;
      const int arrival = goes ? before(column, token) : -1;
      arrivals[i] = arrival;
      if (p.slot) p.slot[int64_t(first) * num_ranks + i] = arrival;
      if (tells && goes) at_offset<int32_t>(parts[rank], shape.tokens())[arrival] = first + token;
    }
    __syncthreads(); // places and arrivals are known, counts are read
    if (tells)
      for_items(tokens * num_ranks, num_topk, [&](int item, int k) {
        const int arrival = arrivals[item];
        if (arrival < 0) return;
        const int token = item / num_ranks, rank = item - token * num_ranks, entry = token * num_topk + k;
        const int local = ids[entry] - rank * p.num_local_experts; // negative for -1, as it should be
        const bool is_there = local >= 0 && local < p.num_local_experts;
        char *const part = parts[rank];
        const int64_t at = int64_t(arrival) * num_topk + k;
        at_offset<int32_t>(part, shape.experts())[at] = is_there ? local : -1;
        at_offset<int32_t>(part, shape.places())[at] = is_there ? places[entry] : -1;
      });
#pragma unroll 1
    for (int c = threadIdx.x; c < columns; c += blockDim.x) {
      int n = 0;
      for (int w = 0; w < words; ++w) n += __popc(bits[c * words + w]);
      if (has_repeats && c < p.num_experts) n += repeated(c, entries);
      count[c] += n;
    }
  }
  if (tells) {
#pragma unroll 1
    for (int c = threadIdx.x; c < columns; c += blockDim.x) { // those that this thread counted
      const int32_t n = count[c];
#pragma unroll 1
      for (int r = 0; r < num_ranks; ++r) at_offset<int32_t>(parts[r], shape.counts())[c] = n;
    }
  }
  __syncthreads(); // behind all stores of the table; the room is free
}

// All blocks, after wait_routed: `sent` is this rank's slot.
__device__ __forceinline__ void sum_counts(const DispatchParams &p, const SlotShape &shape, const char *sent,
                                           const SlotRoute &route) {
  constexpr int kUnroll = 8; // loads under way
  const int num_ranks = p.call.num_ranks, columns = p.num_experts + num_ranks, first = p.call.rank * p.num_local_experts;
#pragma unroll 1
  for (int c = threadIdx.x; c < columns; c += blockDim.x) {
    const bool is_expert = c < p.num_experts, is_here = is_expert && c >= first && c < first + p.num_local_experts;
    int32_t sum = 0;
    for (int s = 0; s < num_ranks; s += kUnroll) {
      int32_t n[kUnroll];
#pragma unroll
      for (int j = 0; j < kUnroll; ++j)
        n[j] = s + j < num_ranks ? at_offset<const int32_t>(sent + (s + j) * shape.bytes(), shape.counts())[c] : 0;
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {
        if (s + j >= num_ranks) break;
        if (s + j == p.call.rank) (is_expert ? route.before_own[c] : route.own_slot[c - p.num_experts]) = sum;
        if (is_here) route.before_here[(s + j) * p.num_local_experts + c - first] = sum;
        if (c == p.num_experts + p.call.rank) route.first_slot[s + j] = sum;
        sum += n[j];
      }
    }
    if (c == p.num_experts + p.call.rank) route.first_slot[num_ranks] = sum;
    (is_expert ? route.total[c] : route.slots[c - p.num_experts]) = sum;
  }
  __syncthreads();
  start_groups(p, route.shared());
}

// A row of the numbering of all rows, in the window of the result; -1 outside.
__device__ __forceinline__ int in_window(const DispatchParams &p, const SlotRoute &route, int64_t row) {
  row -= route.first_row;
  return row >= 0 && row < p.capacity ? int(row) : -1;
}
__device__ __forceinline__ int final_row(const DispatchParams &p, const SlotRoute &route, int expert, int64_t place) {
  const int row = in_window(p, route, route.start[expert] + place);
  return row >= 0 && p.layout == Layout::kBatched ? row + expert % p.num_local_experts * p.capacity : row;
}

// Router block: this rank's own entries, from what count_own left.
__device__ __forceinline__ void finish_own(const DispatchParams &p, const SlotRoute &route) {
  const int num_ranks = p.call.num_ranks, num_topk = p.call.num_topk;
  for (int64_t i = threadIdx.x; i < int64_t(p.num_tokens) * num_topk; i += blockDim.x) {
    const int expert = p.topk_clean[i], rank = expert / p.num_local_experts;
    int row = -1;
    if (expert >= 0 && p.is_token_layout()) row = in_window(p, route, route.own_slot[rank] + p.slot[i / num_topk * num_ranks + rank]);
    else if (expert >= 0) row = final_row(p, route, expert, int64_t(route.before_own[expert]) + p.dst_row[i]);
    p.dst_row[i] = row;
  }
  __syncthreads(); // the places of slots are read
  for (int64_t i = threadIdx.x; i < int64_t(p.num_tokens) * num_ranks; i += blockDim.x) {
    int slot = p.slot[i];
    if (slot >= 0) slot += route.own_slot[i % num_ranks];
    if (slot >= 0 && p.is_token_layout()) slot = in_window(p, route, slot);
    p.slot[i] = slot;
  }
}

// The share of the slots of this one of `blocks`: writes what the handle says of them; returns which they are. A barrier must
// follow.
__device__ __forceinline__ TokenRange place_arrivals(const DispatchParams &p, const SlotShape &shape, const char *sent,
                                                     const SlotRoute &route, int blocks) {
  const int num_ranks = p.call.num_ranks, num_topk = p.call.num_topk;
  const int64_t all = route.first_slot[num_ranks], first = p.is_token_layout() ? min(route.first_row, all) : 0;
  const int64_t n = (p.is_token_layout() ? min(first + p.capacity, all) : all) - first;
  const TokenRange mine = share_of(n, blockIdx.x, blocks);
  for_items(mine.end - mine.begin, num_topk, [&](int item, int k) {
    const int slot = mine.begin + item;
    int source = 0;
    while (route.first_slot[source + 1] <= first + slot) ++source;
    const char *part = sent + source * shape.bytes();
    const int64_t arrival = first + slot - route.first_slot[source], at = arrival * num_topk + k;
    const int local = at_offset<const int32_t>(part, shape.experts())[at]; // all three under way together
    const int place = at_offset<const int32_t>(part, shape.places())[at];
    const int token = at_offset<const int32_t>(part, shape.tokens())[arrival];
    int meta = local;
    if (local >= 0 && !p.is_token_layout()) {
      const int64_t before = route.before_here[source * p.num_local_experts + local];
      meta = final_row(p, route, p.call.rank * p.num_local_experts + local, before + place);
    }
    p.slot_meta[int64_t(slot) * num_topk + k] = meta;
    if (k == 0) p.slot_token[slot] = token;
  });
  return mine;
}

} // namespace jax_ep
