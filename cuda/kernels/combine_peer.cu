// Combine, transport "peer": each source pulls, for each of its tokens, one row from every rank that worked on it
// and sums them in rank order. In the expert layout a rank first sums its own rows of a token (in k order, rounded
// to the payload's type), so that one row per token and rank crosses the link.
//
// Grid: num_blocks blocks of 768 threads, one per SM, resident together on all ranks of a GPU; block 0 leads.
//   1 reduce   expert layout: rows of a slot -> partial (an extra XLA result of this call)
//   2 agree    leader announces where its rows lie and that they are ready; waits for all, claims
//   3 push     rows of ranks whose buffers are out of reach, in rounds (staging.cuh); usually none
//   4 pull     a warp takes a piece of a token's row from every rank that has it
//   5 leave    leader publishes finish ("I read everything") and waits for every peer's
// Idea of pulling with bulk loads: Hybrid-EP; rounding tree: docs/concepts.md.
#include "cuda/kernels/combine_peer.h"

#include "cuda/kernels/staging.cuh"

namespace jax_ep {
namespace {

constexpr int kThreads = 768;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kSharedBudget = 216 * 1024; // of 227 KiB that sm_90 gives a block
constexpr int kPieceUnit = kWarpSize * 16; // one vector per lane
constexpr int kMaxPiece = 4096;
constexpr int kTargetWarps = 12;           // enough loads in flight to fill the link (docs/performance.md)

// Dynamic shared memory, planned on the host.
struct Plan {
  int table, bars, room, bytes;
  int bulk_warps, piece_bytes, num_pieces, max_holders; // a warp stages piece_bytes from up to max_holders ranks
};

Plan make_plan(const CombineParams &p) {
  Plan plan{};
  int64_t at = 0;
  auto take = [&](int64_t bytes) { const int64_t here = at; at = round_up(at + bytes, 128); return int(here); };
  plan.table = take(int64_t(p.call.num_ranks) * sizeof(PeerRows));
  plan.bars = take(kWarps * sizeof(BulkBarrier));
  plan.room = int(at);
  plan.max_holders = p.call.num_ranks < p.call.num_topk ? p.call.num_ranks : p.call.num_topk;
  int64_t piece = (kSharedBudget - at) / (kTargetWarps * plan.max_holders) / kPieceUnit * kPieceUnit;
  piece = piece < kPieceUnit ? kPieceUnit : piece > kMaxPiece ? kMaxPiece : piece;
  plan.num_pieces = int((p.call.row_bytes + piece - 1) / piece);
  plan.piece_bytes = int(round_up((p.call.row_bytes + plan.num_pieces - 1) / plan.num_pieces, kPieceUnit));
  plan.bulk_warps = kWarps;
  if (p.use_bulk) {
    const int64_t fit = (kSharedBudget - at) / (int64_t(plan.max_holders) * plan.piece_bytes);
    if (fit < kWarps) plan.bulk_warps = int(fit);
    at += int64_t(plan.bulk_warps) * plan.max_holders * plan.piece_bytes;
  }
  plan.bytes = int(at);
  return plan;
}

// Expert layout: sum of a slot's rows in k order. A slot whose rows were all dropped gives 0.
template <DType kType> __device__ void reduce_slots(const CombineParams &p) {
  constexpr int kUnroll = 2, kLanes = Payload<kType>::kLanes;
  const int lane = threadIdx.x % kWarpSize, num_topk = p.call.num_topk;
  const int64_t warp = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / kWarpSize;
  const int num_slots = p.recv_offsets[p.call.num_ranks];
  const int64_t row_bytes = p.call.row_bytes;
  for (int64_t slot = warp; slot < num_slots; slot += int64_t(gridDim.x) * kWarps) {
    const int row = lane < num_topk ? p.slot_meta[slot * num_topk + lane] : -1;
    const float weight = row >= 0 && p.weights ? p.weights[row] : 1.f;
    const unsigned rows = __ballot_sync(kFullWarp, row >= 0);
    for (int64_t first = 0; first < row_bytes; first += kUnroll * kPieceUnit) {
      const int64_t at = first + lane * 16;
      float acc[kUnroll][kLanes] = {};
      for (unsigned left = rows; left; left &= left - 1) {
        const int k = __ffs(left) - 1;
        const char *src = p.y + int64_t(__shfl_sync(kFullWarp, row, k)) * row_bytes + at;
        const float w = __shfl_sync(kFullWarp, weight, k);
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
          if (at + i * kPieceUnit >= row_bytes) continue;
          const int4 v = load_row(src + i * kPieceUnit);
          if (p.weights) add_row<kType>(acc[i], v, w);
          else add_row<kType>(acc[i], v);
        }
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i)
        if (at + i * kPieceUnit < row_bytes)
          *reinterpret_cast<int4 *>(p.partial + slot * row_bytes + at + i * kPieceUnit) = Payload<kType>::pack(acc[i]);
    }
  }
}

// One token as seen by a warp: lane k, if it is its rank's first, holds where that rank's row lies.
struct Holders {
  int expert, rank, row;
  const char *src;  // null: no row from this lane
  int order;        // position of `src` in rank order
  unsigned lanes;   // lanes with a row

  __device__ Holders(const CombineParams &p, const PeerRows *peers, const Rounds &rounds, int round, int token,
                     int lane) {
    const int num_topk = p.call.num_topk;
    const int64_t at = int64_t(token) * num_topk + lane;
    expert = lane < num_topk ? p.topk_clean[at] : -1;
    rank = expert >= 0 ? expert / p.num_local_experts : -1;
    row = expert >= 0 ? p.dst_row[at] : -1;
    const unsigned same = __match_any_sync(kFullWarp, rank >= 0 ? unsigned(rank) : 0x80000000u | lane);
    const bool is_first = rank >= 0 && (same & ((1u << lane) - 1)) == 0;
    const int slot = is_first ? p.slot[int64_t(token) * p.call.num_ranks + rank] : -1;
    src = nullptr;
    if (slot >= 0)
      src = peers[rank].rows ? peers[rank].rows + int64_t(slot) * p.call.row_bytes
                             : rounds.record(p.call.arena, round, rank, token - round * rounds.tokens_per_round);
    lanes = __ballot_sync(kFullWarp, src != nullptr);
    order = 0;
    for (unsigned left = lanes; left; left &= left - 1)
      order += __shfl_sync(kFullWarp, rank, __ffs(left) - 1) < rank;
  }
};

// Scalars of a token (cotangents of weights) come back one by one, unsummed.
__device__ __forceinline__ void pull_scalars(const CombineParams &p, const PeerRows *peers, const Rounds &rounds,
                                             int round, const Holders &from, int token, int lane) {
  if (!p.out_scalars || lane >= p.call.num_topk) return;
  float value = 0.f;
  if (from.row >= 0) {
    if (peers[from.rank].rows) {
      const int64_t at = p.layout == Layout::kToken ? int64_t(from.row) * p.call.num_topk + lane : from.row;
      value = __ldcs(peers[from.rank].scalars + at);
    } else {
      const char *record = rounds.record(p.call.arena, round, from.rank, token - round * rounds.tokens_per_round);
      value = reinterpret_cast<const float *>(record + p.call.staging().scalars())[lane];
    }
  }
  p.out_scalars[int64_t(token) * p.call.num_topk + lane] = value;
}

template <DType kType>
__device__ __forceinline__ void store_sum(const CombineParams &p, int64_t at, float *acc) {
  if (p.bias) add_row<kType>(acc, load_row(p.bias + at));
  store_row(p.out + at, Payload<kType>::pack(acc));
}

// Tokens [range) summed from wherever their rows are. Each warp takes one piece of one token at a time.
template <DType kType, bool kBulk>
__device__ void pull_tokens(const CombineParams &p, const Plan &plan, char *shared, const PeerRows *peers,
                            const Rounds &rounds, int round, TokenRange range, unsigned &parity) {
  constexpr int kLanes = Payload<kType>::kLanes;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  if (warp >= plan.bulk_warps) return;
  const int64_t items = int64_t(range.end - range.begin) * plan.num_pieces;
  const int64_t row_bytes = p.call.row_bytes;
  char *room = shared + plan.room + int64_t(warp) * plan.max_holders * plan.piece_bytes;
  BulkBarrier *bar = reinterpret_cast<BulkBarrier *>(shared + plan.bars) + warp;
  for (int64_t item = int64_t(blockIdx.x) * plan.bulk_warps + warp; item < items;
       item += int64_t(gridDim.x) * plan.bulk_warps) {
    const int token = range.begin + int(item / plan.num_pieces);
    const int64_t first = item % plan.num_pieces * plan.piece_bytes;
    const int64_t end = min(first + plan.piece_bytes, row_bytes);
    const Holders from(p, peers, rounds, round, token, lane);
    const int count = __popc(from.lanes);
    const int64_t out_at = int64_t(token) * row_bytes;
    if (first == 0) pull_scalars(p, peers, rounds, round, from, token, lane);
    if constexpr (kBulk) {
      if (lane == 0 && count) bulk_expect(bar, unsigned(count * (end - first)));
      __syncwarp(); // bytes are expected before the first of them can arrive
      if (from.src) bulk_load(room + from.order * plan.piece_bytes, from.src + first, unsigned(end - first), bar);
      if (count) {
        bulk_wait_loaded(bar, parity);
        parity ^= 1;
      }
      for (int64_t at = lane * 16; at < end - first; at += kPieceUnit) {
        float acc[kLanes] = {};
        for (int i = 0; i < count; ++i)
          add_row<kType>(acc, *reinterpret_cast<const int4 *>(room + i * plan.piece_bytes + at));
        store_sum<kType>(p, out_at + first + at, acc);
      }
      __syncwarp();
      bulk_fence(); // lanes have read the room before the copy engine refills it
    } else {
      for (int64_t at = first + lane * 16; at - lane * 16 < end; at += kPieceUnit) {
        float acc[kLanes] = {};
        for (int i = 0; i < count; ++i) {
          const unsigned holder = __ballot_sync(kFullWarp, from.src != nullptr && from.order == i);
          const char *src = reinterpret_cast<const char *>(__shfl_sync(
              kFullWarp, reinterpret_cast<unsigned long long>(from.src), __ffs(holder) - 1));
          if (at < end) add_row<kType>(acc, load_row(src + at));
        }
        if (at < end) store_sum<kType>(p, out_at + at, acc);
      }
    }
  }
}

// Staged owner: pushes the rows (and scalars) of the sources' tokens of this round.
__device__ void push_slots(const CombineParams &p, const Rounds &rounds, int round) {
  const CallParams &call = p.call;
  const int lane = threadIdx.x % kWarpSize, num_topk = call.num_topk;
  const bool is_token_layout = p.layout == Layout::kToken;
  const TokenRange tokens = rounds.tokens(round, p.num_tokens);
  const char *rows = is_token_layout ? p.y : p.partial;
  const int64_t warp = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / kWarpSize;
  for (int s = 0; s < call.num_ranks; ++s) {
    if (!call.is_staged_for(s, call.peers[s])) continue;
    for (int64_t slot = p.recv_offsets[s] + warp; slot < p.recv_offsets[s + 1]; slot += int64_t(gridDim.x) * kWarps) {
      const int token = p.slot_token[slot];
      if (token < tokens.begin || token >= tokens.end) continue;
      char *record = rounds.record(call.peers[s].arena, round, call.rank, token - tokens.begin);
      if (p.scalars && lane < num_topk) {
        const int64_t at = slot * num_topk + lane;
        const int64_t row = is_token_layout ? at : p.slot_meta[at];
        reinterpret_cast<float *>(record + call.staging().scalars())[lane] = row >= 0 ? p.scalars[row] : 0.f;
      }
      warp_copy(record, rows + slot * call.row_bytes, call.row_bytes, lane);
    }
  }
}

template <DType kType, bool kBulk>
__global__ void __launch_bounds__(kThreads, 1)
    combine_kernel(const __grid_constant__ CombineParams p, const __grid_constant__ Plan plan) {
  extern __shared__ __align__(128) char shared[];
  Session session(p.call);
  if (session.is_broken()) { // a call before this one failed; its leaver revoked this one for the peers
    poison(p.outputs, int64_t(blockIdx.x) * kThreads + threadIdx.x, int64_t(gridDim.x) * kThreads);
    return;
  }
  PeerRows *peers = reinterpret_cast<PeerRows *>(shared + plan.table);
  bool ok = true;
  // 1 reduce
  if (p.layout == Layout::kExpert) {
    reduce_slots<kType>(p);
    ok = session.grid_barrier(); // all partials written; the leader's announce publishes them
  }
  // 2 agree
  if (ok && session.is_leader()) {
    session.announce(nullptr, 0);
    session.agree();
  }
  ok = ok && session.grid_barrier();
  if (ok) {
    fill_peer_rows(p.call, session, peers);
    if (kBulk && threadIdx.x < kWarps) bulk_init(reinterpret_cast<BulkBarrier *>(shared + plan.bars) + threadIdx.x);
    __syncthreads();
    bulk_fence(); // peers wrote their rows through the generic proxy; we acquired them and now bulk-load
    unsigned parity = 0;
    auto pushes_to = [&](int r) { return p.call.is_staged_for(r, p.call.peers[r]); };
    auto drains_from = [&](int r) { return session.announce_of(r)->is_staged != 0; };
    const Rounds rounds(p.call, p.num_tokens);
    if (any_staged(p.call, pushes_to, drains_from)) { // 3 push and 4 pull, round by round
      run_rounds(session, rounds, pushes_to, drains_from, [&](int round) { push_slots(p, rounds, round); },
                 [&](int round) {
                   bulk_fence(); // records of this round came through the generic proxy
                   pull_tokens<kType, kBulk>(p, plan, shared, peers, rounds, round, rounds.tokens(round, p.num_tokens),
                                             parity);
                 });
    } else { // 4 pull
      pull_tokens<kType, kBulk>(p, plan, shared, peers, rounds, 0, {0, p.num_tokens}, parity);
    }
  }
  // 5 leave
  const bool is_complete = session.leave();
  if (session.is_leader() && !is_complete) poison(p.outputs, threadIdx.x, kThreads);
}

using Kernel = void (*)(CombineParams, Plan);
template <bool kBulk> Kernel kernel_of(DType type) {
  switch (type) {
    case DType::kBF16: return combine_kernel<DType::kBF16, kBulk>;
    case DType::kF16: return combine_kernel<DType::kF16, kBulk>;
    case DType::kF32: return combine_kernel<DType::kF32, kBulk>;
  }
  return nullptr;
}
Kernel kernel_for(DType type, bool use_bulk) { return use_bulk ? kernel_of<true>(type) : kernel_of<false>(type); }

} // namespace

cudaError_t launch_combine(CombineParams p, cudaStream_t stream) {
  if (p.num_blocks < 1 || p.num_blocks > kMaxBlocks) return cudaErrorInvalidConfiguration; // workspace size
  const Plan plan = make_plan(p);
  const Kernel kernel = kernel_for(p.dtype, p.use_bulk);
  if (!kernel || plan.bulk_warps < 1) return cudaErrorInvalidConfiguration;
  kernel<<<p.num_blocks, kThreads, plan.bytes, stream>>>(p, plan);
  return cudaGetLastError();
}

cudaError_t load_combine_kernels() {
  int device = 0, major = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (!e) e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  for (DType type : {DType::kBF16, DType::kF16, DType::kF32})
    for (int bulk = 0; bulk <= (major >= 9); ++bulk)
      if (!e) // also loads the kernel's machine code now instead of at its first launch
        e = cudaFuncSetAttribute(kernel_for(type, bulk), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 bulk ? kSharedBudget : 96 * 1024);
  return e;
}

} // namespace jax_ep
