// Dispatch, the sender's side: a warp loads a token's row once and stores it to every row that it becomes.
//
// With bulk copies each warp has two stages in shared memory: while the copy engine reads one to the destinations, the
// next part of a row comes into the other. Where the next row goes is read from memory while both are under way. A warp
// that quantises writes its parts into two more, in turns, so that the engine reads one while it fills the other.
#pragma once

#include "cuda/device/quantize.cuh"
#include "cuda/kernels/route.cuh"

namespace jax_ep {

// Dynamic shared memory of the moving warps, planned on the host.
struct MovePlan {
  int num_warps;    // per block that move rows
  int stage_bytes;  // of an operand row that move at a time
  int quant_bytes;  // what they become when quantised, else 0
  int scale_bytes;  // scales of a whole row, else 0
  int taken_bytes;  // bulk copies: of a side row that the copy engine takes along with its row (kTakesSides), else 0
  JAX_EP_HD int64_t side_room() const { return round_up(taken_bytes > scale_bytes ? taken_bytes : scale_bytes, 128); }
  JAX_EP_HD int64_t parts_bytes(bool use_bulk) const {
    return round_up(use_bulk ? 2 * (stage_bytes + quant_bytes) : quant_bytes, 128);
  }
  JAX_EP_HD int warp_bytes(bool use_bulk) const {
    return int(parts_bytes(use_bulk) + (taken_bytes ? 2 : 1) * side_room());
  }
};

// One token as seen by a warp: lane k holds the destination of entry k.
struct Destination {
  int token, expert, rank, row, slot;
  float weight;
  bool is_first; // first entry of the token for this rank
  bool is_kept;  // the entry becomes a row of a rank whose buffers can be reached
  bool has_row;  // ... and the row goes there from here, not as a copy that the receiver makes

  __device__ Destination() : token(INT_MAX) {}
  __device__ Destination(const DispatchParams &p, const PeerBuffers *peers, int token_, int lane) : token(token_) {
    const int num_topk = p.call.num_topk;
    const int64_t at = int64_t(token) * num_topk + lane;
    const bool is_entry = lane < num_topk;
    expert = is_entry ? p.topk_clean[at] : -1;
    row = is_entry ? p.dst_row[at] : -1;
    weight = is_entry && p.recv_weights ? p.weights[at] : 0.f;
    if (expert < 0) row = -1, weight = 0.f; // the weight of an entry that is not routed may be anything
    settle(p, peers, p.slot + int64_t(token) * p.call.num_ranks, lane);
  }
  // The rest, from token, expert, row and weight. `slots`: of the token, by rank.
  __device__ __forceinline__ void settle(const DispatchParams &p, const PeerBuffers *peers, const int32_t *slots, int lane) {
    rank = expert >= 0 ? expert / p.num_local_experts : -1;
    const unsigned same = __match_any_sync(kFullWarp, rank >= 0 ? unsigned(rank) : 0x80000000u | lane);
    is_first = rank >= 0 && (same & ((1u << lane) - 1)) == 0;
    // Token layout: one row per rank, and dst_row equals slot.
    slot = !is_first ? -1 : p.is_token_layout() ? row : slots[rank];
    is_kept = row >= 0 && (!p.is_token_layout() || is_first) && peers[rank].is_reachable();
    const unsigned kept = __ballot_sync(kFullWarp, is_kept);
    has_row = is_kept && (!peers[rank].is_other_gpu || (same & kept & ((1u << lane) - 1)) == 0);
  }
};

// The warp's tokens that go anywhere directly, one after the other. Past the last: token is INT_MAX.
template <bool kRoute>
__device__ __forceinline__ Destination next_destination(const DispatchParams &p, const PeerBuffers *peers, int token,
                                                        int step, int end, int lane) {
  for (; token < end; token += step) {
    const Destination to(p, peers, token, lane);
    // When routing, a slot without a row (all dropped) still gets its metadata.
    const bool has_slot = kRoute && to.slot >= 0 && peers[to.rank].is_reachable();
    if (__any_sync(kFullWarp, to.is_kept || has_slot)) return to;
  }
  return Destination();
}

// Weights and slot metadata of one token, to the ranks that can be reached. One 4-byte store per value.
template <bool kRoute> __device__ __forceinline__ void send_scalars(const DispatchParams &p, const PeerBuffers *peers,
                                                                    const Destination &to, int lane) {
  const int num_topk = p.call.num_topk;
  const bool is_token_layout = p.is_token_layout();
  if (!is_token_layout && p.recv_weights && to.is_kept) peers[to.rank].get<float>(kScalars)[to.row] = to.weight;
  if (!kRoute && !(is_token_layout && p.recv_weights)) return;
  unsigned todo = __ballot_sync(kFullWarp, to.slot >= 0 && peers[to.rank].is_reachable());
  for (; todo; todo &= todo - 1) {
    const int from = __ffs(todo) - 1;
    const int rank = __shfl_sync(kFullWarp, to.rank, from), slot = __shfl_sync(kFullWarp, to.slot, from);
    if (lane >= num_topk) continue;
    const bool is_here = to.rank == rank;
    const int64_t at = int64_t(slot) * num_topk + lane;
    if (is_token_layout && p.recv_weights) peers[rank].get<float>(kScalars)[at] = is_here ? to.weight : 0.f;
    if (kRoute) {
      const int meta = is_token_layout ? to.expert - rank * p.num_local_experts : to.row;
      peers[rank].get<int32_t>(kMeta)[at] = is_here ? meta : -1;
      if (lane == 0) peers[rank].get<int32_t>(kTokens)[slot] = to.token;
    }
  }
}

// The side row at `src` to each lane's `dst` (null: none). Any width and place: in the widest units that divide both.
template <class Unit>
__device__ __forceinline__ void copy_side_units(const char *src, char *dst, int64_t side_bytes, int lane) {
  const int64_t units = side_bytes / int64_t(sizeof(Unit));
  const unsigned all = __ballot_sync(kFullWarp, dst != nullptr);
  for (int64_t first = 0; first < units; first += kWarpSize) {
    const int64_t i = first + lane;
    const Unit v = i < units ? reinterpret_cast<const Unit *>(src)[i] : Unit{};
    for (unsigned left = all; left; left &= left - 1) {
      const auto row = __shfl_sync(kFullWarp, reinterpret_cast<unsigned long long>(dst), __ffs(left) - 1);
      if (i < units) reinterpret_cast<Unit *>(row)[i] = v;
    }
  }
}
__device__ __forceinline__ void copy_side(const char *src, char *dst, int64_t side_bytes, int lane) {
  const auto places = reinterpret_cast<uintptr_t>(src) | reinterpret_cast<uintptr_t>(dst) | uintptr_t(side_bytes);
  const unsigned rest = __reduce_or_sync(kFullWarp, unsigned(places) % 16);
  if (rest == 0) copy_side_units<int4>(src, dst, side_bytes, lane);
  else if (rest % 4 == 0) copy_side_units<uint32_t>(src, dst, side_bytes, lane);
  else copy_side_units<uint8_t>(src, dst, side_bytes, lane);
}

// What a warp moves, one row after the other: the rows of the operand that this warp sends.
template <bool kRoute, bool kQuantizes> struct SentRows {
  using Item = Destination;
  static constexpr bool kQuantize = kQuantizes;
  const DispatchParams &p;
  const PeerBuffers *peers;
  int token, step, end; // the next one to look at
  bool takes_sides;

  __device__ SentRows(const DispatchParams &p_, const PeerBuffers *peers_, const MovePlan &plan)
      : p(p_), peers(peers_), step(plan.num_warps), takes_sides(plan.taken_bytes != 0) {
    const TokenRange mine = block_share(p.num_tokens);
    token = mine.begin + int(threadIdx.x / kWarpSize), end = mine.end;
  }
  __device__ Item next(int lane) {
    const Item item = next_destination<kRoute>(p, peers, token, step, end, lane);
    token = item.token < end ? item.token + step : end;
    return item;
  }
  __device__ bool is_end(const Item &item) const { return item.token == INT_MAX; }
  __device__ int bytes() const { return int(p.x_bytes); }
  __device__ const char *src(const Item &item) const { return p.x + item.token * p.x_bytes; }
  __device__ char *dst(const Item &item) const {
    return item.has_row ? peers[item.rank].at[kRows] + item.row * p.call.row_bytes : nullptr;
  }
  __device__ const char *side_src(const Item &item) const { return p.side + item.token * p.call.side_bytes; }
  __device__ char *side_dst(const Item &item) const {
    return item.has_row ? peers[item.rank].at[kSide] + item.row * p.call.side_bytes : nullptr;
  }
  // After a row's stores were issued. `scales`: of the row, when it was quantised here.
  __device__ void finish(const Item &item, const char *scales, int lane) const {
    if (p.recv_side && !takes_sides)
      copy_side(kQuantize ? scales : side_src(item), side_dst(item), p.call.side_bytes, lane);
    send_scalars<kRoute>(p, peers, item, lane);
  }
};

// Sources whose side rows the copy engine takes along, if the plan says so: they have side_src and side_dst.
template <class Source> constexpr bool kTakesSides = false;
template <bool kRoute, bool kQuantize> constexpr bool kTakesSides<SentRows<kRoute, kQuantize>> = true;

// Sources whose rows go to a second place from a lane, too: `second` and `second_side`, null: to none.
template <class Source> constexpr bool kHasSecond = false;
// Sources whose rows, and places of rows, are not touched again soon: other things in the L2 cache are worth more. (`second`
// is one of these.)
template <class Source> constexpr bool kReadsOnce = false;
template <class Source> constexpr bool kWritesOnce = false;

// Copies that a receiver makes: rows that crossed a link once, for the other experts of their token.
struct ReceivedRows {
  struct Item { int row, first; bool is_copy, is_end; }; // row `first` of recv_x also becomes this lane's `row`
  static constexpr bool kQuantize = false;
  static constexpr int kBatch = 4; // slots that a warp looks through at a time
  const DispatchParams &p;
  int source = -1, at = 0, end = 0, warp, num_warps; // slots [at, end) of `source` are left to look at
  int base = 0;
  unsigned found = 0; // slots base + bit have copies to be made

  __device__ ReceivedRows(const DispatchParams &p_, int warps)
      : p(p_), warp(int(blockIdx.x) * warps + int(threadIdx.x / kWarpSize)), num_warps(int(gridDim.x) * warps) {}

  __device__ Item next(int lane) {
    const int num_topk = p.call.num_topk, num_ranks = p.call.num_ranks;
    while (!found) {
      while (at >= end) {
        if (++source >= num_ranks) {
          source = num_ranks;
          return {-1, -1, false, true};
        }
        const int from = p.call.relay_of(source); // who stored the rows
        const Peer &peer = p.call.peers[from];
        if (!p.call.crosses_once(from, peer, p.layout) || p.call.is_staged_for(from, peer)) continue;
        at = p.recv_offsets[source] + warp * kBatch, end = p.recv_offsets[source + 1];
      }
      base = at, at += num_warps * kBatch;
      int rows = 0;
      if (lane < kBatch && base + lane < end)
        for (int k = 0; k < num_topk; ++k) rows += p.slot_meta[int64_t(base + lane) * num_topk + k] >= 0;
      found = __ballot_sync(kFullWarp, rows > 1);
    }
    const int64_t slot = base + __ffs(found) - 1;
    found &= found - 1;
    const int row = lane < num_topk ? p.slot_meta[slot * num_topk + lane] : -1;
    const int from = __ffs(__ballot_sync(kFullWarp, row >= 0)) - 1;
    return {row, __shfl_sync(kFullWarp, row, from), row >= 0 && lane != from, false};
  }
  __device__ bool is_end(const Item &item) const { return item.is_end; }
  __device__ int bytes() const { return int(p.call.row_bytes); }
  __device__ const char *src(const Item &item) const { return p.recv_x + item.first * p.call.row_bytes; }
  __device__ char *dst(const Item &item) const {
    return item.is_copy ? p.recv_x + item.row * p.call.row_bytes : nullptr;
  }
  __device__ void finish(const Item &item, const char *, int lane) const {
    const int64_t side = p.call.side_bytes;
    if (p.recv_side) copy_side(p.recv_side + item.first * side, item.is_copy ? p.recv_side + item.row * side : nullptr, side, lane);
  }
};

// `room`: MovePlan::warp_bytes per warp. `bars`: two per warp; `parity` of both, returned for the next use of them.
template <class Source>
__device__ __forceinline__ unsigned move_rows_bulk(const DispatchParams &p, const MovePlan &plan, char *room,
                                                   BulkBarrier *bars, unsigned parity, Source source) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  if (warp >= plan.num_warps) return parity;
  char *stages = room + warp * plan.warp_bytes(true);
  const int taken = kTakesSides<Source> ? plan.taken_bytes : 0, side_room = int(plan.side_room());
  char *sides = stages + plan.parts_bytes(true); // two if any is taken: of pairs one per stage, of scales in turns
  BulkBarrier *bar = bars + 2 * warp;
  const int row_bytes = source.bytes();
  auto start = [&](const typename Source::Item &item, int at, int stage) {
    if (lane != 0) return;
    const int bytes = min(row_bytes - at, plan.stage_bytes), side = at + bytes == row_bytes ? taken : 0;
    bulk_expect(bar + stage, unsigned(bytes + (Source::kQuantize ? 0 : side)));
    char *to = stages + stage * plan.stage_bytes;
    if constexpr (kReadsOnce<Source>) bulk_load(to, source.src(item) + at, unsigned(bytes), bar + stage, bulk_once());
    else bulk_load(to, source.src(item) + at, unsigned(bytes), bar + stage);
    if constexpr (kTakesSides<Source> && !Source::kQuantize)
      if (side) bulk_load(sides + stage * side_room, source.side_src(item), unsigned(side), bar + stage);
  };
  auto store = [&](char *to, const char *what, int bytes) { // to the lane's first place
    if constexpr (kWritesOnce<Source>) bulk_store(to, what, unsigned(bytes), bulk_once());
    else bulk_store(to, what, unsigned(bytes));
  };
  int stage = 0, at = 0;
  char *scales = sides;
  auto now = source.next(lane);
  if (!source.is_end(now)) start(now, 0, 0);
  auto coming = source.is_end(now) ? now : source.next(lane);
  while (!source.is_end(now)) {
    const int bytes = min(row_bytes - at, plan.stage_bytes);
    const bool is_last = at + bytes == row_bytes;
    if (!is_last || !source.is_end(coming)) {
      if (!Source::kQuantize) bulk_wait_read(); // this lane's stores from the other stage no longer read it
      __syncwarp();
      start(is_last ? coming : now, is_last ? 0 : at + bytes, stage ^ 1);
    }
    auto after = coming;
    if (is_last && !source.is_end(coming)) after = source.next(lane);
    bulk_wait_loaded(bar + stage, parity >> stage & 1);
    parity ^= 1u << stage;
    char *dst = source.dst(now), *second = nullptr, *from = stages + stage * plan.stage_bytes;
    if constexpr (kHasSecond<Source>) second = source.second(now);
    if constexpr (Source::kQuantize) {
      const int item = int(dtype_bytes(p.dtype)), channels = bytes / item, first = at / item;
      char *quantised = stages + 2 * plan.stage_bytes + stage * plan.quant_bytes;
      bulk_wait_read<1>(); // the stores before the latest no longer read it: every part is a group
      __syncwarp();
      warp_quantize(p.dtype, from, channels, quantised,
                    scales + first / 128 * (p.quantize == Quantize::kFp8 ? 4 : 1), p.quantize);
      bulk_fence_shared(); // written through the generic proxy, about to be read by the copy engine; the stage is read
      __syncwarp();
      if (dst) store(dst + first, quantised, channels);
      if (second) bulk_store(second + first, quantised, unsigned(channels));
    } else {
      if (dst) store(dst + at, from, bytes);
      if (second) bulk_store(second + at, from, unsigned(bytes));
    }
    if constexpr (kTakesSides<Source>) {
      if (is_last && taken) {
        const char *side = Source::kQuantize ? scales : sides + stage * side_room;
        if (dst) bulk_store(source.side_dst(now), side, unsigned(taken));
        if constexpr (kHasSecond<Source>)
          if (second) bulk_store(source.second_side(now), side, unsigned(taken));
      }
    }
    bulk_commit();
    at += bytes;
    if (is_last) {
      source.finish(now, scales, lane);
      if (Source::kQuantize) __syncwarp(); // the scales are read before the next row's are written
      if (taken) scales = scales == sides ? sides + side_room : sides; // the engine may still read these
      now = coming, coming = after, at = 0;
    }
    stage ^= 1;
  }
  bulk_wait_stored(); // rows are at their place before this thread joins a barrier
  return parity;
}

template <class Source>
__device__ void move_rows_vector(const DispatchParams &p, const MovePlan &plan, char *room, Source source) {
  constexpr int kUnroll = 4;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  if (warp >= plan.num_warps) return;
  char *quantised = room + warp * plan.warp_bytes(false);
  char *scales = quantised + plan.parts_bytes(false);
  // To every row in `todo`: bytes [at, at + bytes) of a row, found at `src`.
  auto send = [&](const char *src, char *dst, unsigned todo, int64_t at, int64_t bytes) {
    for (int64_t first = 0; todo && first < bytes; first += kUnroll * kWarpSize * 16) {
      const int64_t here = first + lane * 16;
      int4 v[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i)
        if (here + i * kWarpSize * 16 < bytes) v[i] = *reinterpret_cast<const int4 *>(src + here + i * kWarpSize * 16);
      for (unsigned left = todo; left; left &= left - 1) {
        char *row = reinterpret_cast<char *>(
            __shfl_sync(kFullWarp, reinterpret_cast<unsigned long long>(dst), __ffs(left) - 1));
#pragma unroll
        for (int i = 0; i < kUnroll; ++i)
          if (here + i * kWarpSize * 16 < bytes) store_row(row + at + here + i * kWarpSize * 16, v[i]);
      }
    }
  };
  for (auto now = source.next(lane); !source.is_end(now); now = source.next(lane)) {
    char *dst = source.dst(now), *second = nullptr;
    if constexpr (kHasSecond<Source>) second = source.second(now);
    const unsigned todo = __ballot_sync(kFullWarp, dst != nullptr), also = __ballot_sync(kFullWarp, second != nullptr);
    const char *src = source.src(now);
    if constexpr (Source::kQuantize) {
      const int item = int(dtype_bytes(p.dtype));
      for (int at = 0; at < source.bytes(); at += plan.stage_bytes) {
        const int channels = min(source.bytes() - at, plan.stage_bytes) / item, first = at / item;
        warp_quantize(p.dtype, src + at, channels, quantised,
                      scales + first / 128 * (p.quantize == Quantize::kFp8 ? 4 : 1), p.quantize);
        __syncwarp();
        send(quantised, dst, todo, first, channels);
        if constexpr (kHasSecond<Source>) send(quantised, second, also, first, channels);
        __syncwarp(); // read before it is written again
      }
    } else {
      send(src, dst, todo, 0, source.bytes());
      if constexpr (kHasSecond<Source>) send(src, second, also, 0, source.bytes());
    }
    source.finish(now, scales, lane);
    __syncwarp(); // the scales are read before the next row's are written
  }
}

} // namespace jax_ep
