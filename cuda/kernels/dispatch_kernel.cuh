// The dispatch kernel, over load/store reachable peers alone or over several nodes: dispatch_peer.cu, dispatch_nodes.cu.
#pragma once

#include "cuda/kernels/bulk.h"
#include "cuda/kernels/copy_received.cuh"
#include "cuda/kernels/node_dispatch.cuh"
#include "cuda/kernels/receive.cuh"
#include "cuda/kernels/stage_dispatch.cuh"

namespace jax_ep::dispatch_steps {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kMaxStage = 4 * 1024;         // bytes of an operand row that a warp loads at a time
constexpr int kMaxQuantStage = 4 * 1024;    // when it quantises them
constexpr int kVectorQuantStage = 2 * 1024; // ... without bulk copies
constexpr int kMaxTakenSide = 1024;         // bytes of a side row that the copy engine takes along with its row
constexpr int kZeroPage = 2048;
constexpr int kZeroWarps = 1;               // warps kept free of rows when bulk copies are used

// Dynamic shared memory, planned on the host. Routing and moving use the same room one after the other.
struct Plan {
  int table, bars, start, kept, zeros, room, bytes;
  int count_warps;
  MovePlan move;
};

inline int64_t route_fixed_bytes(int64_t num_experts, int64_t num_ranks) { return num_experts * 8 + num_ranks * 4 + 128; }

inline Plan make_plan(const DispatchParams &p, bool is_route) {
  Plan plan{};
  int64_t at = 0;
  auto take = [&](int64_t bytes) { const int64_t here = at; at = round_up(at + bytes, 128); return int(here); };
  plan.table = take(int64_t(p.call.num_ranks) * sizeof(PeerBuffers));
  plan.bars = take(2 * kWarps * sizeof(BulkBarrier));
  plan.start = take(int64_t(p.num_local_experts) * 4);
  plan.kept = take(int64_t(p.num_local_experts) * 4);
  plan.zeros = take(p.use_bulk ? kZeroPage : 0);
  plan.room = int(at);
  const int64_t room = (p.use_bulk ? kBulkSharedBytes : kVectorSharedBytes) - at;
  const bool quantises = p.quantize != Quantize::kNone;
  MovePlan &move = plan.move;
  if (quantises || p.use_bulk) {
    const int64_t most = !quantises ? kMaxStage : p.use_bulk ? kMaxQuantStage : kVectorQuantStage;
    const int64_t unit = quantises ? kQuantUnit : 16, chunks = (p.x_bytes + most - 1) / most;
    move.stage_bytes = int(round_up((p.x_bytes + chunks - 1) / chunks, unit));
    if (quantises) {
      move.quant_bytes = int(move.stage_bytes / dtype_bytes(p.dtype));
      move.scale_bytes = int(p.call.side_bytes);
    }
    const bool is_aligned = (reinterpret_cast<uintptr_t>(p.side) | uintptr_t(p.call.side_bytes)) % 16 == 0;
    if (p.use_bulk && p.recv_side && is_aligned && p.call.side_bytes <= kMaxTakenSide)
      move.taken_bytes = int(p.call.side_bytes);
  }
  const int warp_bytes = move.warp_bytes(p.use_bulk), most_warps = p.use_bulk ? kWarps - kZeroWarps : kWarps;
  move.num_warps = warp_bytes && room / warp_bytes < most_warps ? int(room / warp_bytes) : most_warps;
  at += int64_t(move.num_warps) * warp_bytes;
  if (is_route) {
    const int64_t columns = p.num_experts + p.call.num_ranks, fixed = route_fixed_bytes(p.num_experts, p.call.num_ranks);
    int64_t warps = (room - fixed) / (columns * 4);
    plan.count_warps = int(warps > kWarps ? kWarps : warps);
    const int64_t route_bytes = fixed + plan.count_warps * columns * 4;
    if (plan.room + route_bytes > at) at = plan.room + route_bytes;
  }
  plan.bytes = int(at);
  return plan;
}

template <bool kRoute, bool kBulk, bool kQuantize, bool kNodes>
__global__ void __launch_bounds__(kThreads, 1)
    dispatch_kernel(const __grid_constant__ DispatchParams p, const __grid_constant__ Plan plan,
                    const __grid_constant__ NodePlan node_plan) {
  extern __shared__ __align__(128) char shared[];
  JAX_EP_STAMP_BEGIN(p.call.rank);
  Session session(p.call);
  if (session.is_broken()) { // a call before this one failed; its leaver revoked this one for the peers
    poison(p.outputs, int64_t(blockIdx.x) * kThreads + threadIdx.x, int64_t(gridDim.x) * kThreads);
    if (kNodes && session.is_leader()) session.dismiss_carrier();
    return;
  }
  const int columns = p.num_experts + p.call.num_ranks;
  int32_t *room = reinterpret_cast<int32_t *>(shared + plan.room);
  int32_t *slots = room + 2 * p.num_experts, *invalid = slots + p.call.num_ranks;
  const RouteShared route{invalid + 32, room, room + p.num_experts, slots, invalid, plan.count_warps};
  PeerBuffers *peers = reinterpret_cast<PeerBuffers *>(shared + plan.table);
  BulkBarrier *bars = reinterpret_cast<BulkBarrier *>(shared + plan.bars);
  OwnRows own{};

  // 1 route
  bool ok = true;
  if constexpr (kRoute) {
    count_tokens(p, session, route);
    JAX_EP_STAMP(kCounted);
    ok = session.grid_barrier(); // all workspaces written
    JAX_EP_STAMP(kBarrier);
  }
  // 2 agree: the sums use the room of start, total and slots, which are filled only in step 3
  if (ok && session.is_leader() && (kRoute || session.has_handle(p.recv_offsets))) {
    int32_t *sums = route.start; // [columns + 1]: `invalid` lies behind
    if constexpr (kRoute) {
      sum_blocks(session, columns, sums);
      if (threadIdx.x == 0) *route.invalid = sums[columns];
    }
    if (p.window) session.agree_on(*p.window); // another window elsewhere: slots and rows that nobody fills
    session.announce(sums, kRoute ? columns : 0);
    JAX_EP_STAMP(kAnnounced);
    session.agree();
    JAX_EP_STAMP(kAgreed);
  }
  ok = ok && session.grid_barrier(); // passes the acquired announces on to every block; false if agree() failed
  JAX_EP_STAMP(kShared);
  if (ok) {
    // 3 place
    if constexpr (kRoute) place_groups(p, session, route);
    const int64_t first_row = window_start(p);
    own = own_rows<kRoute>(p, first_row, route, reinterpret_cast<int32_t *>(shared + plan.start),
                           reinterpret_cast<int32_t *>(shared + plan.kept));
    if constexpr (kRoute) {
      if (session.is_leader())
        write_sizes(p, first_row, [&](int s) { return session.counts_of(s)[p.num_experts + p.call.rank]; }, route, own);
      place_tokens(p, route);
    }
    // 4 move
    fill_peer_buffers(p.call, session, peers);
    if constexpr (kBulk) {
      if (threadIdx.x < 2 * kWarps) bulk_init(bars + threadIdx.x);
      for (int i = threadIdx.x; i < kZeroPage / 4; i += kThreads) reinterpret_cast<int *>(shared + plan.zeros)[i] = 0;
      bulk_fence(); // the page was written through the generic proxy; so was the room that loads now overwrite
    }
    __syncthreads();
    JAX_EP_STAMP(kPlaced);
    unsigned parity = 0;
    char *const moving = shared + plan.room;
    if constexpr (kNodes) { // rows for this node and for the others, round by round
      NodeLinks links(p.call, session, node_plan, p.num_tokens);
      for (int round = -1; round < links.rounds && ok; ++round) {
        if (round + 1 < links.rounds) ok = put_round<kRoute, kBulk, kQuantize>(p, peers, plan.move, moving, bars, parity, links, round + 1);
        if (round >= 0) {
          ok = ok && hand_on_round<kRoute, kBulk>(p, peers, plan.move, moving, bars, parity, links, round);
          continue;
        }
        zero_rest<kRoute, kBulk>(p, kBulk ? plan.move.num_warps : 0, shared + plan.zeros, kZeroPage, own);
        JAX_EP_STAMP(kZeroed);
      }
    } else {
      const SentRows<kRoute, kQuantize> rows(p, peers, plan.move);
      if constexpr (kBulk) parity = move_rows_bulk(p, plan.move, moving, bars, parity, rows);
      else move_rows_vector(p, plan.move, moving, rows);
      JAX_EP_STAMP(kMoved);
      zero_rest<kRoute, kBulk>(p, kBulk ? plan.move.num_warps : 0, shared + plan.zeros, kZeroPage, own);
      JAX_EP_STAMP(kZeroed);
    }
    // 5 copy
    copy_received<kBulk>(p, session, plan.move, moving, bars, parity);
    JAX_EP_STAMP(kCopied);
    // 6 stage
    if constexpr (!kNodes) stage_dispatch<kRoute, kQuantize>(p, session);
    JAX_EP_STAMP(kStaged);
  }
  // 7 leave
  const bool is_complete = session.leave();
  JAX_EP_STAMP(kEnd);
  if (!session.is_leader()) return;
  if (!is_complete) poison(p.outputs, threadIdx.x, kThreads);
  else if (kRoute && p.is_token_layout() && p.stats[0] != own.num_slots) count_pairs(p, own);
  if constexpr (kNodes) {
    if (threadIdx.x == 0 && is_complete) p.call.failure->rows_put = session.control().rows_put; // all blocks' counts are in
    session.dismiss_carrier();
  }
}

} // namespace jax_ep::dispatch_steps
