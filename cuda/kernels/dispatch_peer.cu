// Dispatch, transport "peer": each token's row goes straight from the source's operand into the result buffers of
// the ranks that hold its experts; nothing is copied twice on the way.
//
// Grid: num_blocks blocks of 512 threads, one per SM, resident together on all ranks of a GPU. Block 0 is the
// leader: it alone talks to peers about flags. Steps (sync.cuh says who publishes what):
//   1 route     every block counts its tokens (skipped when a handle is reused)
//   2 agree     leader announces counts and buffers, waits for all announces, claims them
//   3 place     every block turns counts into final rows (route.cuh)
//   4 move      a warp loads a row once and stores it to every destination; spare warps zero what nobody writes
//   5 stage     rows for ranks whose buffers are out of reach, in rounds (staging.cuh); usually none
//   6 leave     leader publishes finish and waits for every peer's
// Idea of final rows from exchanged counts: Hybrid-EP; of one shared-memory copy stored to all destinations:
// DeepEP V2 (see docs/adding_a_kernel.md for sources).
#include "cuda/kernels/dispatch_peer.h"

#include "cuda/kernels/route.cuh"
#include "cuda/kernels/staging.cuh"

namespace jax_ep {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kMaxStage = 16 * 1024;        // bytes of a row in flight per warp
constexpr int kSharedBudget = 216 * 1024;   // of 227 KiB that sm_90 gives a block
constexpr int kSharedBudgetSm80 = 96 * 1024;
constexpr int kZeroPage = 2048;
constexpr int kZeroWarps = 2;               // warps kept free of rows when bulk copies are used

// Dynamic shared memory, planned on the host. Routing and moving use the same room one after the other.
struct Plan {
  int table, bars, start, kept, zeros, room; // byte offsets
  int bytes;
  int bulk_warps, stage_bytes, num_chunks;   // a row crosses in num_chunks pieces of <= stage_bytes
  int count_warps;
};

Plan make_plan(const DispatchParams &p, bool is_route) {
  Plan plan{};
  int64_t at = 0;
  auto take = [&](int64_t bytes) { const int64_t here = at; at = round_up(at + bytes, 128); return int(here); };
  plan.table = take(int64_t(p.call.num_ranks) * sizeof(PeerRows));
  plan.bars = take(kWarps * sizeof(BulkBarrier));
  plan.start = take(int64_t(p.num_local_experts) * 4);
  plan.kept = take(int64_t(p.num_local_experts) * 4);
  plan.zeros = take(p.use_bulk ? kZeroPage : 0);
  plan.room = int(at);
  const int64_t room = (p.use_bulk ? kSharedBudget : kSharedBudgetSm80) - at;
  if (p.use_bulk) {
    plan.num_chunks = int((p.call.row_bytes + kMaxStage - 1) / kMaxStage);
    plan.stage_bytes = int(round_up((p.call.row_bytes + plan.num_chunks - 1) / plan.num_chunks, 16));
    plan.bulk_warps = int(room / round_up(plan.stage_bytes, 128));
    if (plan.bulk_warps > kWarps - kZeroWarps) plan.bulk_warps = kWarps - kZeroWarps;
    at += plan.bulk_warps * round_up(plan.stage_bytes, 128);
  }
  if (is_route) {
    const int64_t columns = p.num_experts + p.call.num_ranks, fixed = int64_t(p.num_experts) * 8 + 128;
    int64_t warps = (room - fixed) / (columns * 4);
    plan.count_warps = int(warps > kWarps ? kWarps : warps);
    const int64_t route_bytes = fixed + plan.count_warps * columns * 4;
    if (plan.room + route_bytes > at) at = plan.room + route_bytes;
  }
  plan.bytes = int(at);
  return plan;
}

// Own groups as every block needs them for zeroing.
struct OwnRows {
  const int32_t *start, *kept; // [L], shared memory
  int num_slots;               // slots kept
  int end;                     // rows past the last group (expert) or slot (token) begin here
};

template <bool kRoute> __device__ OwnRows own_rows(const DispatchParams &p, const Session &session, RouteShared sh,
                                                   int32_t *start, int32_t *kept) {
  __shared__ int s_slots, s_end;
  const int first = p.call.rank * p.num_local_experts, num_local = p.num_local_experts;
  if constexpr (kRoute) {
    for (int l = threadIdx.x; l < num_local; l += blockDim.x) {
      const int begin = min(sh.start[first + l], p.capacity);
      start[l] = begin;
      kept[l] = min(sh.start[first + l] + sh.total[first + l], p.capacity) - begin;
    }
    if (threadIdx.x == 0) {
      int slots = 0;
      for (int s = 0; s < p.call.num_ranks; ++s) slots += session.counts_of(s)[p.num_experts + p.call.rank];
      const int last = first + num_local - 1;
      s_slots = min(slots, p.num_slots);
      s_end = min(sh.start[last] + int32_t(round_up(sh.total[last], p.alignment)), p.capacity);
    }
  } else if (threadIdx.x == 0) { // a handle is reused: its sizes are already cut to the capacity
    int at = 0;
    for (int l = 0; l < num_local; ++l) start[l] = at, kept[l] = p.counts[l], at += p.group_sizes[l];
    s_slots = p.recv_offsets[p.call.num_ranks];
    s_end = at;
  }
  __syncthreads();
  return {start, kept, s_slots, p.layout == Layout::kToken ? s_slots : s_end};
}

// Block 0, routing: the receiver's view of the exchange.
__device__ void write_sizes(const DispatchParams &p, const Session &session, RouteShared sh, const OwnRows &own) {
  const int first = p.call.rank * p.num_local_experts, num_ranks = p.call.num_ranks;
  const bool is_token_layout = p.layout == Layout::kToken;
  for (int l = threadIdx.x; l < p.num_local_experts; l += blockDim.x) {
    const int end = min(sh.start[first + l] + int32_t(round_up(sh.total[first + l], p.alignment)), p.capacity);
    p.group_sizes[l] = is_token_layout ? 0 : end - own.start[l];
    // Token layout: right unless slots were dropped; count_pairs corrects that case at the end.
    p.counts[l] = is_token_layout ? sh.total[first + l] : own.kept[l];
  }
  if (threadIdx.x != 0) return;
  int slots = 0, rows = 0, kept = 0, padded = 0, invalid = 0;
  for (int s = 0; s < num_ranks; ++s) {
    p.recv_offsets[s] = min(slots, p.num_slots);
    slots += session.counts_of(s)[p.num_experts + p.call.rank];
  }
  p.recv_offsets[num_ranks] = min(slots, p.num_slots);
  for (int l = 0; l < p.num_local_experts; ++l) {
    rows += sh.total[first + l], kept += own.kept[l];
    padded += int32_t(round_up(sh.total[first + l], p.alignment));
  }
  for (int b = 0; b < int(gridDim.x); ++b) invalid += session.workspace(b)[p.num_experts + num_ranks];
  p.stats[0] = is_token_layout ? slots : padded;                        // demand
  p.stats[1] = is_token_layout ? slots - own.num_slots : rows - kept;   // num_dropped
  p.stats[2] = invalid;                                                 // num_invalid
  p.stats[3] = 0;                                                       // num_masked
  p.stats[4] = 1;                                                       // num_windows
  p.stats[5] = own.num_slots;
  p.stats[6] = p.stats[7] = 0;
}

// Block 0, token layout with dropped slots, after all rows are here: (token, expert) pairs among kept slots.
__device__ void count_pairs(const DispatchParams &p, const OwnRows &own) {
  for (int l = threadIdx.x; l < p.num_local_experts; l += blockDim.x) p.counts[l] = 0;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < int64_t(own.num_slots) * p.call.num_topk; i += blockDim.x)
    if (p.slot_meta[i] >= 0) atomicAdd(&p.counts[p.slot_meta[i]], 1);
}

// One token as seen by a warp: lane k holds the destination of entry k.
struct Destination {
  int expert, rank, row, slot;
  bool is_first; // first entry of the token for this rank
  bool has_row;  // a row goes to `rank` at `row`

  __device__ Destination(const DispatchParams &p, int token, int lane) {
    const int num_topk = p.call.num_topk;
    const int64_t at = int64_t(token) * num_topk + lane;
    expert = lane < num_topk ? p.topk_clean[at] : -1;
    rank = expert >= 0 ? expert / p.num_local_experts : -1;
    const unsigned same = __match_any_sync(kFullWarp, rank >= 0 ? unsigned(rank) : 0x80000000u | lane);
    is_first = rank >= 0 && (same & ((1u << lane) - 1)) == 0;
    row = expert >= 0 ? p.dst_row[at] : -1;
    slot = is_first ? p.slot[int64_t(token) * p.call.num_ranks + rank] : -1;
    // Token layout: one row per rank, and dst_row equals slot.
    has_row = row >= 0 && (p.layout == Layout::kExpert || is_first);
  }
};

// Weights and slot metadata of one token, to the ranks that can be reached. One 4-byte store per value.
template <bool kRoute> __device__ __forceinline__ void send_scalars(const DispatchParams &p, const PeerRows *peers,
                                                                   const Destination &to, int token, int lane) {
  const int num_topk = p.call.num_topk;
  const bool is_token_layout = p.layout == Layout::kToken;
  const float weight =
      p.recv_weights && to.expert >= 0 ? p.weights[int64_t(token) * num_topk + lane] : 0.f;
  if (!is_token_layout && p.recv_weights && to.has_row && peers[to.rank].rows) peers[to.rank].scalars[to.row] = weight;
  if (!kRoute && !(is_token_layout && p.recv_weights)) return;
  unsigned todo = __ballot_sync(kFullWarp, to.is_first && to.slot >= 0 && peers[to.rank].rows != nullptr);
  for (; todo; todo &= todo - 1) {
    const int from = __ffs(todo) - 1;
    const int rank = __shfl_sync(kFullWarp, to.rank, from), slot = __shfl_sync(kFullWarp, to.slot, from);
    if (lane >= num_topk) continue;
    const bool is_here = to.rank == rank;
    const int64_t at = int64_t(slot) * num_topk + lane;
    if (is_token_layout && p.recv_weights) peers[rank].scalars[at] = is_here ? weight : 0.f;
    if (kRoute) {
      const int meta = is_token_layout ? to.expert - rank * p.num_local_experts : to.row;
      peers[rank].meta[at] = is_here ? meta : -1;
      if (lane == 0) peers[rank].tokens[slot] = token;
    }
  }
}

template <bool kRoute, bool kBulk>
__device__ void move_rows(const DispatchParams &p, const Plan &plan, char *shared, const PeerRows *peers) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const TokenRange mine = block_tokens(p.num_tokens);
  const int64_t row_bytes = p.call.row_bytes;
  if constexpr (kBulk) {
    if (warp >= plan.bulk_warps) return;
    char *stage = shared + plan.room + warp * round_up(plan.stage_bytes, 128);
    BulkBarrier *bar = reinterpret_cast<BulkBarrier *>(shared + plan.bars) + warp;
    unsigned parity = 0;
    for (int token = mine.begin + warp; token < mine.end; token += plan.bulk_warps) {
      const Destination to(p, token, lane);
      char *dst = to.has_row ? peers[to.rank].rows : nullptr;
      if (dst) dst += int64_t(to.row) * row_bytes;
      if (__any_sync(kFullWarp, dst != nullptr)) {
        for (int64_t at = 0; at < row_bytes; at += plan.stage_bytes) {
          const unsigned bytes = unsigned(min(row_bytes - at, int64_t(plan.stage_bytes)));
          bulk_wait_read(); // this lane's earlier stores no longer read the stage
          __syncwarp();
          if (lane == 0) {
            bulk_expect(bar, bytes);
            bulk_load(stage, p.x + int64_t(token) * row_bytes + at, bytes, bar);
          }
          bulk_wait_loaded(bar, parity);
          parity ^= 1;
          if (dst) bulk_store(dst + at, stage, bytes);
          bulk_commit();
        }
      }
      send_scalars<kRoute>(p, peers, to, token, lane);
    }
    bulk_wait_stored(); // rows are at their place before this thread joins leave()
  } else {
    constexpr int kUnroll = 4;
    for (int token = mine.begin + warp; token < mine.end; token += kWarps) {
      const Destination to(p, token, lane);
      char *dst = to.has_row ? peers[to.rank].rows : nullptr;
      if (dst) dst += int64_t(to.row) * row_bytes;
      const unsigned todo = __ballot_sync(kFullWarp, dst != nullptr);
      const char *src = p.x + int64_t(token) * row_bytes;
      for (int64_t first = 0; todo && first < row_bytes; first += kUnroll * kWarpSize * 16) {
        const int64_t at = first + lane * 16;
        int4 v[kUnroll];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i)
          if (at + i * kWarpSize * 16 < row_bytes) v[i] = load_row(src + at + i * kWarpSize * 16);
        for (unsigned left = todo; left; left &= left - 1) {
          char *to_row = reinterpret_cast<char *>(
              __shfl_sync(kFullWarp, reinterpret_cast<unsigned long long>(dst), __ffs(left) - 1));
#pragma unroll
          for (int i = 0; i < kUnroll; ++i)
            if (at + i * kWarpSize * 16 < row_bytes) store_row(to_row + at + i * kWarpSize * 16, v[i]);
        }
      }
      send_scalars<kRoute>(p, peers, to, token, lane);
    }
  }
}

// Rows that no source writes: padding inside groups always, the tail if asked; their weights and slots always.
template <bool kRoute, bool kBulk>
__device__ void zero_rest(const DispatchParams &p, const Plan &plan, const char *shared, const OwnRows &own) {
  const int lane = threadIdx.x % kWarpSize;
  const int first_warp = kBulk ? plan.bulk_warps : 0;
  const int warps = kWarps - first_warp, warp = int(threadIdx.x / kWarpSize) - first_warp;
  if (warp < 0) return;
  const int64_t id = int64_t(blockIdx.x) * warps + warp, step = int64_t(gridDim.x) * warps;
  auto zero_row = [&](int64_t row) {
    char *dst = p.recv_x + row * p.call.row_bytes;
    if constexpr (kBulk) {
      for (int64_t at = int64_t(lane) * kZeroPage; at < p.call.row_bytes; at += kWarpSize * kZeroPage)
        bulk_store(dst + at, shared + plan.zeros, unsigned(min(p.call.row_bytes - at, int64_t(kZeroPage))));
    } else {
      warp_zero(dst, p.call.row_bytes, lane);
    }
  };
  const bool is_token_layout = p.layout == Layout::kToken;
  if (!is_token_layout) {
    for (int l = 0; l < p.num_local_experts; ++l) {
      const int end = l + 1 < p.num_local_experts ? own.start[l + 1] : own.end;
      for (int64_t row = own.start[l] + own.kept[l] + id; row < end; row += step) {
        zero_row(row);
        if (p.recv_weights && lane == 0) p.recv_weights[row] = 0.f;
      }
    }
  }
  if (p.zero_tail)
    for (int64_t row = own.end + id; row < p.capacity; row += step) zero_row(row);
  if constexpr (kBulk) {
    bulk_commit();
    bulk_wait_stored();
  }
  const int num_topk = p.call.num_topk;
  const int64_t thread = id * kWarpSize + lane, threads = step * kWarpSize;
  if (p.recv_weights) {
    const int64_t per_row = is_token_layout ? num_topk : 1;
    for (int64_t i = own.end * per_row + thread; i < p.capacity * per_row; i += threads) p.recv_weights[i] = 0.f;
  }
  if constexpr (kRoute) {
    for (int64_t i = int64_t(own.num_slots) * num_topk + thread; i < int64_t(p.num_slots) * num_topk; i += threads)
      p.slot_meta[i] = -1;
    for (int64_t i = own.num_slots + thread; i < p.num_slots; i += threads) p.slot_token[i] = -1;
  }
}

template <bool kRoute, bool kBulk>
__global__ void __launch_bounds__(kThreads, 1)
    dispatch_kernel(const __grid_constant__ DispatchParams p, const __grid_constant__ Plan plan) {
  extern __shared__ __align__(128) char shared[];
  Session session(p.call);
  if (session.is_broken()) { // a call before this one failed; its leaver revoked this one for the peers
    poison(p.outputs, int64_t(blockIdx.x) * kThreads + threadIdx.x, int64_t(gridDim.x) * kThreads);
    return;
  }
  const int columns = p.num_experts + p.call.num_ranks;
  int32_t *room = reinterpret_cast<int32_t *>(shared + plan.room);
  const RouteShared route{room + 2 * p.num_experts + 32, room, room + p.num_experts, room + 2 * p.num_experts,
                          plan.count_warps};
  PeerRows *peers = reinterpret_cast<PeerRows *>(shared + plan.table);
  OwnRows own{};

  // 1 route
  bool ok = true;
  if constexpr (kRoute) {
    count_tokens(p, session, route);
    ok = session.grid_barrier(); // all workspaces written
  }
  // 2 agree: the sums use the room of start and total, which are filled only in step 3
  if (ok && session.is_leader()) {
    int32_t *sums = route.start; // [columns] fits: there are no more ranks than experts
    if constexpr (kRoute) sum_blocks(session, columns, sums);
    session.announce(sums, kRoute ? columns : 0);
    session.agree();
  }
  ok = ok && session.grid_barrier(); // passes the acquired announces on to every block; false if agree() failed
  if (ok) {
    // 3 place
    if constexpr (kRoute) place_groups(p, session, route);
    own = own_rows<kRoute>(p, session, route, reinterpret_cast<int32_t *>(shared + plan.start),
                           reinterpret_cast<int32_t *>(shared + plan.kept));
    if constexpr (kRoute) {
      if (session.is_leader()) write_sizes(p, session, route, own);
      place_tokens(p, route);
    }
    // 4 move
    fill_peer_rows(p.call, session, peers);
    if constexpr (kBulk) {
      if (threadIdx.x < kWarps) bulk_init(reinterpret_cast<BulkBarrier *>(shared + plan.bars) + threadIdx.x);
      for (int i = threadIdx.x; i < kZeroPage / 4; i += kThreads) reinterpret_cast<int *>(shared + plan.zeros)[i] = 0;
      bulk_fence(); // the page was written through the generic proxy; so was the room that loads now overwrite
    }
    __syncthreads();
    move_rows<kRoute, kBulk>(p, plan, shared, peers);
    zero_rest<kRoute, kBulk>(p, plan, shared, own);
    // 5 stage
    stage_dispatch<kRoute>(p, session);
  }
  // 6 leave
  const bool is_complete = session.leave();
  if (!session.is_leader()) return;
  if (!is_complete) poison(p.outputs, threadIdx.x, kThreads);
  else if (kRoute && p.layout == Layout::kToken && p.stats[1] > 0) count_pairs(p, own);
}

using Kernel = void (*)(DispatchParams, Plan);
Kernel kernel_for(bool is_route, bool use_bulk) {
  if (is_route) return use_bulk ? dispatch_kernel<true, true> : dispatch_kernel<true, false>;
  return use_bulk ? dispatch_kernel<false, true> : dispatch_kernel<false, false>;
}

} // namespace

int max_experts(int num_ranks) {
  // make_plan's room without bulk copies, with one warp that counts: per rank a table entry and a count; per expert
  // start, total and a count, and its share of the own groups' start and kept.
  const double room = kSharedBudgetSm80 - 1024 - num_ranks * double(sizeof(PeerRows) + 4);
  return room < 0 ? 0 : int(room / (12 + 8.0 / num_ranks));
}

cudaError_t launch_dispatch(DispatchParams p, cudaStream_t stream) {
  if (p.num_blocks < 1 || p.num_blocks > kMaxBlocks) return cudaErrorInvalidConfiguration; // workspace size
  const bool is_route = p.topk_idx != nullptr || p.stats != nullptr;
  const Plan plan = make_plan(p, is_route);
  if (is_route && plan.count_warps < 1) return cudaErrorInvalidConfiguration; // experts + ranks beyond shared memory
  if (p.use_bulk && plan.bulk_warps < 1) return cudaErrorInvalidConfiguration;
  kernel_for(is_route, p.use_bulk)<<<p.num_blocks, kThreads, plan.bytes, stream>>>(p, plan);
  return cudaGetLastError();
}

cudaError_t load_dispatch_kernels() {
  int device = 0, major = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (!e) e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  for (int route = 0; route < 2; ++route)
    for (int bulk = 0; bulk <= (major >= 9); ++bulk)
      if (!e) // also loads the kernel's machine code now instead of at its first launch
        e = cudaFuncSetAttribute(kernel_for(route, bulk), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 bulk ? kSharedBudget : kSharedBudgetSm80);
  return e;
}

} // namespace jax_ep
