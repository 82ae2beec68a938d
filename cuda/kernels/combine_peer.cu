// Combine, transport "peer": each source pulls, for each of its tokens, one row from every rank that worked on it
// and sums them in rank order. Where a rank holds several rows of a token it first sums them (in k order, rounded to
// the payload's type), so that one row per token and rank crosses the link; where it holds one, the source reads that
// row of y itself.
//
// Grid: num_blocks blocks of 512 threads, one per SM, resident together on all ranks of a GPU; block 0 leads.
//   1 reduce   rows of a slot -> partial (an extra XLA result of this call); not in the token layout, unless it is
//              to be quantised
//   2 agree    leader announces where its rows lie and that they are ready; waits for all, claims
//   3 push     rows of ranks whose buffers are out of reach, in rounds (staging.cuh); usually none
//   4 pull     a warp takes a piece of a token's row from every rank that has it
//   5 leave    leader publishes finish ("I read everything") and waits for every peer's
// Idea of pulling with bulk loads: Hybrid-EP; rounding tree: docs/concepts.md.
#include "cuda/kernels/combine_kernels.h"
#include "cuda/kernels/combine_steps.cuh"

namespace jax_ep {
namespace {

using namespace combine_steps;

// The same in a function of its own: inlined twice, the pull would not fit into registers.
template <DType kType, bool kBulk, bool kWire>
__device__ __noinline__ unsigned pull_round(const CombineParams &p, const Plan &plan, char *shared,
                                            const PeerBuffers *peers, const Rounds &rounds, int round, unsigned parity) {
  pull_tokens<kType, kBulk, kWire>(p, plan, shared, peers, rounds, round, rounds.tokens(round, p.num_tokens), parity);
  return parity;
}

// Staged owner: pushes the rows (and scalars) of the sources' tokens of this round.
__device__ void push_slots(const CombineParams &p, const Rounds &rounds, int round) {
  const CallParams &call = p.call;
  const int lane = threadIdx.x % kWarpSize, num_topk = call.num_topk;
  const bool is_token_layout = p.layout == Layout::kToken;
  const TokenRange tokens = rounds.tokens(round, p.num_tokens);
  const char *rows = p.partial ? p.partial : p.y;
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

template <DType kType, bool kBulk, bool kWire>
__global__ void __launch_bounds__(kThreads, 1)
    combine_kernel(const __grid_constant__ CombineParams p, const __grid_constant__ Plan plan) {
  extern __shared__ __align__(128) char shared[];
  JAX_EP_STAMP_BEGIN(p.call.rank);
  Session session(p.call);
  if (session.is_broken()) { // a call before this one failed; its leaver revoked this one for the peers
    poison(p.outputs, int64_t(blockIdx.x) * kThreads + threadIdx.x, int64_t(gridDim.x) * kThreads);
    return;
  }
  PeerBuffers *peers = reinterpret_cast<PeerBuffers *>(shared + plan.table);
  if (kBulk && threadIdx.x < 2 * kWarps) bulk_init(reinterpret_cast<BulkBarrier *>(shared + plan.bars) + threadIdx.x);
  bulk_fence(); // y was written through the generic proxy, by an earlier kernel
  __syncthreads();
  unsigned parity = 0;
  auto pushes_to = [&](int r) { return p.call.is_staged_for(r, p.call.peers[r]); };
  auto never = [](int) { return false; };
  bool ok = true;
  // 1 reduce
  if (p.partial) {
    // A slot's only row is read where it is, except by peers that cannot; dropped slots are 0 for those alone.
    const bool has_all = kWire || any_pair(p.call, pushes_to, never);
    reduce_slots<kType, kBulk, kWire>(p, plan, shared, has_all ? 0 : 2, parity);
    JAX_EP_STAMP(kReduced);
    ok = session.grid_barrier(); // all partials written; the leader's announce publishes them
    JAX_EP_STAMP(kBarrier);
  }
  // 2 agree
  if (ok && session.is_leader() && session.has_handle(p.recv_offsets)) {
    session.announce(nullptr, 0);
    JAX_EP_STAMP(kAnnounced);
    session.agree();
    JAX_EP_STAMP(kAgreed);
  }
  ok = ok && session.grid_barrier();
  JAX_EP_STAMP(kShared);
  if (ok) {
    fill_peer_buffers(p.call, session, peers);
    __syncthreads();
    bulk_fence(); // peers wrote their rows through the generic proxy; we acquired them and now bulk-load
    auto drains_from = [&](int r) { return session.announce_of(r)->is_staged != 0; };
    const Rounds rounds(p.call, p.num_tokens);
    if (any_pair(p.call, pushes_to, drains_from)) { // 3 push and 4 pull, round by round
      run_rounds(session, rounds, pushes_to, drains_from, [&](int round) { push_slots(p, rounds, round); },
                 [&](int round) {
                   bulk_fence(); // records of this round came through the generic proxy
                   parity = pull_round<kType, kBulk, kWire>(p, plan, shared, peers, rounds, round, parity);
                 });
    } else { // 4 pull
      pull_tokens<kType, kBulk, kWire>(p, plan, shared, peers, rounds, 0, {0, p.num_tokens}, parity);
    }
    JAX_EP_STAMP(kPulled);
  }
  // 5 leave
  const bool is_complete = session.leave();
  JAX_EP_STAMP(kEnd);
  if (session.is_leader() && !is_complete) poison(p.outputs, threadIdx.x, kThreads);
}

struct Named {
  template <DType kType, bool kBulk, bool kWire> static auto kernel() { return combine_kernel<kType, kBulk, kWire>; }
};
using Kernels = CombineKernels<Named>;

} // namespace

cudaError_t launch_combine(CombineParams p, cudaStream_t stream) {
  if (p.num_blocks < 1 || p.num_blocks > kMaxBlocks) return cudaErrorInvalidConfiguration; // workspace size
  const Plan plan = make_plan(p);
  const auto kernel = Kernels::get(p.dtype, p.use_bulk, p.quantize == Quantize::kFp8Wire);
  if (!kernel || plan.pull.num_warps < 1 || (has_partials(p.layout, p.quantize) && plan.reduce.num_warps < 1))
    return cudaErrorInvalidConfiguration;
  kernel<<<p.num_blocks, kThreads, plan.bytes, stream>>>(p, plan);
  return cudaGetLastError();
}

cudaError_t load_combine_kernels() { return Kernels::load(); }

} // namespace jax_ep
