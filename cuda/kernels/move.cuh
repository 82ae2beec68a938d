// Dispatch, the sender's side: a warp loads a token's row once and stores it to every row that it becomes.
//
// With bulk copies each warp has two stages in shared memory: while the copy engine reads one to the destinations, the
// next part of a row comes into the other. Where the next row goes is read from memory while both are under way.
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
  JAX_EP_HD int warp_bytes(bool use_bulk) const {
    return int(round_up((use_bulk ? 2 * stage_bytes : 0) + quant_bytes, 128) + round_up(scale_bytes, 128));
  }
};

// One token as seen by a warp: lane k holds the destination of entry k.
struct Destination {
  int token, expert, rank, row, slot;
  float weight;
  bool is_first; // first entry of the token for this rank
  bool has_row;  // a row goes to `row` of a rank whose buffers can be reached

  __device__ Destination() : token(INT_MAX) {}
  __device__ Destination(const DispatchParams &p, const PeerBuffers *peers, int token_, int lane) : token(token_) {
    const int num_topk = p.call.num_topk;
    const int64_t at = int64_t(token) * num_topk + lane;
    const bool is_entry = lane < num_topk;
    expert = is_entry ? p.topk_clean[at] : -1;
    row = is_entry ? p.dst_row[at] : -1;
    weight = is_entry && p.recv_weights ? p.weights[at] : 0.f;
    if (expert < 0) row = -1, weight = 0.f; // the weight of an entry that is not routed may be anything
    rank = expert >= 0 ? expert / p.num_local_experts : -1;
    const unsigned same = __match_any_sync(kFullWarp, rank >= 0 ? unsigned(rank) : 0x80000000u | lane);
    is_first = rank >= 0 && (same & ((1u << lane) - 1)) == 0;
    // Token layout: one row per rank, and dst_row equals slot.
    slot = !is_first ? -1 : p.is_token_layout() ? row : p.slot[int64_t(token) * p.call.num_ranks + rank];
    has_row = row >= 0 && (!p.is_token_layout() || is_first) && peers[rank].is_reachable();
  }
};

// The warp's tokens that go anywhere directly, one after the other. Past the last: token is INT_MAX.
__device__ __forceinline__ Destination next_destination(const DispatchParams &p, const PeerBuffers *peers, int token,
                                                        int step, int end, int lane) {
  for (; token < end; token += step) {
    const Destination to(p, peers, token, lane);
    // A slot without a row (all dropped) still gets its metadata.
    const bool has_slot = to.slot >= 0 && peers[to.rank].is_reachable();
    if (__any_sync(kFullWarp, to.has_row || has_slot)) return to;
  }
  return Destination();
}

// Weights and slot metadata of one token, to the ranks that can be reached. One 4-byte store per value.
template <bool kRoute> __device__ __forceinline__ void send_scalars(const DispatchParams &p, const PeerBuffers *peers,
                                                                    const Destination &to, int lane) {
  const int num_topk = p.call.num_topk;
  const bool is_token_layout = p.is_token_layout();
  if (!is_token_layout && p.recv_weights && to.has_row) peers[to.rank].get<float>(kScalars)[to.row] = to.weight;
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

// The side row at `src` to every row of the token. Any width: words where it is a multiple of 4, else bytes.
template <class Unit> __device__ __forceinline__ void send_side_units(const DispatchParams &p, const PeerBuffers *peers,
                                                                      const Destination &to, const char *src, int lane) {
  const int64_t units = p.call.side_bytes / int64_t(sizeof(Unit));
  const unsigned all = __ballot_sync(kFullWarp, to.has_row);
  char *dst = to.has_row ? peers[to.rank].at[kSide] + to.row * p.call.side_bytes : nullptr;
  for (int64_t first = 0; first < units; first += kWarpSize) {
    const int64_t i = first + lane;
    const Unit v = i < units ? reinterpret_cast<const Unit *>(src)[i] : Unit{};
    for (unsigned left = all; left; left &= left - 1) {
      const auto row = __shfl_sync(kFullWarp, reinterpret_cast<unsigned long long>(dst), __ffs(left) - 1);
      if (i < units) reinterpret_cast<Unit *>(row)[i] = v;
    }
  }
}
__device__ __forceinline__ void send_side(const DispatchParams &p, const PeerBuffers *peers, const Destination &to,
                                          const char *src, int lane) {
  if (!p.recv_side) return;
  if (p.call.side_bytes % 4 == 0) send_side_units<uint32_t>(p, peers, to, src, lane);
  else send_side_units<uint8_t>(p, peers, to, src, lane);
}

// `room`: MovePlan::warp_bytes per warp. `bars`: two per warp.
template <bool kRoute, bool kQuantize>
__device__ void move_rows_bulk(const DispatchParams &p, const MovePlan &plan, char *room, BulkBarrier *bars,
                               const PeerBuffers *peers) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  if (warp >= plan.num_warps) return;
  const TokenRange mine = block_tokens(p.num_tokens);
  char *stages = room + warp * plan.warp_bytes(true);
  char *quantised = stages + 2 * plan.stage_bytes;
  char *scales = stages + round_up(2 * plan.stage_bytes + plan.quant_bytes, 128);
  BulkBarrier *bar = bars + 2 * warp;
  const int x_bytes = int(p.x_bytes);
  auto start = [&](int token, int at, int stage) {
    if (lane != 0) return;
    const unsigned bytes = unsigned(min(x_bytes - at, plan.stage_bytes));
    bulk_expect(bar + stage, bytes);
    bulk_load(stages + stage * plan.stage_bytes, p.x + int64_t(token) * x_bytes + at, bytes, bar + stage);
  };
  unsigned parity = 0;
  int stage = 0, at = 0;
  Destination to = next_destination(p, peers, mine.begin + warp, plan.num_warps, mine.end, lane);
  if (to.token < mine.end) start(to.token, 0, 0);
  Destination coming = to;
  if (to.token < mine.end) coming = next_destination(p, peers, to.token + plan.num_warps, plan.num_warps, mine.end, lane);
  while (to.token < mine.end) {
    const int bytes = min(x_bytes - at, plan.stage_bytes);
    const bool is_last = at + bytes == x_bytes;
    const int next_token = is_last ? coming.token : to.token;
    if (next_token < mine.end) {
      if (!kQuantize) bulk_wait_read(); // this lane's stores from the other stage no longer read it
      __syncwarp();
      start(next_token, is_last ? 0 : at + bytes, stage ^ 1);
    }
    Destination after;
    if (is_last && coming.token < mine.end)
      after = next_destination(p, peers, coming.token + plan.num_warps, plan.num_warps, mine.end, lane);
    bulk_wait_loaded(bar + stage, parity >> stage & 1);
    parity ^= 1u << stage;
    char *dst = to.has_row ? peers[to.rank].at[kRows] + to.row * p.call.row_bytes : nullptr;
    char *from = stages + stage * plan.stage_bytes;
    if constexpr (kQuantize) {
      const int item = int(dtype_bytes(p.dtype)), channels = bytes / item, first = at / item;
      bulk_wait_read(); // earlier stores no longer read the quantised part
      __syncwarp();
      warp_quantize(p.dtype, from, channels, quantised,
                    scales + first / 128 * (p.quantize == Quantize::kFp8 ? 4 : 1), p.quantize);
      bulk_fence_shared(); // written through the generic proxy, about to be read by the copy engine; the stage is read
      __syncwarp();
      if (dst) bulk_store(dst + first, quantised, unsigned(channels));
    } else if (dst) {
      bulk_store(dst + at, from, unsigned(bytes));
    }
    bulk_commit();
    if (is_last) {
      send_side(p, peers, to, kQuantize ? scales : p.side + to.token * p.call.side_bytes, lane);
      if (kQuantize) __syncwarp(); // the scales are read before the next row's are written
      send_scalars<kRoute>(p, peers, to, lane);
      to = coming, coming = after, at = 0;
    } else {
      at += bytes;
    }
    stage ^= 1;
  }
  bulk_wait_stored(); // rows are at their place before this thread joins leave()
}

template <bool kRoute, bool kQuantize>
__device__ void move_rows_vector(const DispatchParams &p, const MovePlan &plan, char *room, const PeerBuffers *peers) {
  constexpr int kUnroll = 4;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const TokenRange mine = block_tokens(p.num_tokens);
  char *quantised = room + warp * plan.warp_bytes(false);
  char *scales = quantised + round_up(plan.quant_bytes, 128);
  // To every row of the token: bytes [at, at + bytes) of a row, found at `src`.
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
  Destination to = next_destination(p, peers, mine.begin + warp, plan.num_warps, mine.end, lane);
  while (to.token < mine.end) {
    char *dst = to.has_row ? peers[to.rank].at[kRows] + to.row * p.call.row_bytes : nullptr;
    const unsigned todo = __ballot_sync(kFullWarp, dst != nullptr);
    const char *x = p.x + to.token * p.x_bytes;
    if constexpr (kQuantize) {
      const int item = int(dtype_bytes(p.dtype));
      for (int at = 0; at < int(p.x_bytes); at += plan.stage_bytes) {
        const int channels = min(int(p.x_bytes) - at, plan.stage_bytes) / item, first = at / item;
        warp_quantize(p.dtype, x + at, channels, quantised,
                      scales + first / 128 * (p.quantize == Quantize::kFp8 ? 4 : 1), p.quantize);
        __syncwarp();
        send(quantised, dst, todo, first, channels);
        __syncwarp(); // read before it is written again
      }
    } else {
      send(x, dst, todo, 0, p.call.row_bytes);
    }
    send_side(p, peers, to, kQuantize ? scales : p.side + to.token * p.call.side_bytes, lane);
    __syncwarp();
    send_scalars<kRoute>(p, peers, to, lane);
    to = next_destination(p, peers, to.token + plan.num_warps, plan.num_warps, mine.end, lane);
  }
}

} // namespace jax_ep
