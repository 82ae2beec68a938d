// Combine over several nodes: the rounding tree has one level more (docs/concepts.md), and one sum per token and node
// crosses between nodes.
//
// Steps of combine_peer.cu, with these differences:
//   2 agree    announces go to ranks of other nodes as puts; only ranks of the node claim each other's buffers
//   3          none: a rank whose buffers its node cannot reach is refused
//   4 pull     round by round each block asks its partners, answers theirs and adds up its tokens (node_combine.cuh)
#include "cuda/kernels/combine_kernels.h"
#include "cuda/kernels/node_combine.cuh"

namespace jax_ep {
namespace {

using namespace combine_steps;

struct NodesPlan {
  Plan plan;
  GatherPlan last; // "fp8_wire": of sums over nodes
  NodePlan nodes;
};

template <DType kType, bool kBulk, bool kWire>
__global__ void __launch_bounds__(kThreads, 1)
    combine_nodes_kernel(const __grid_constant__ CombineParams p, const __grid_constant__ NodesPlan plans) {
  extern __shared__ __align__(128) char shared[];
  const Plan &plan = plans.plan;
  JAX_EP_STAMP_BEGIN(p.call.rank);
  Session session(p.call);
  if (session.is_broken()) { // a call before this one failed
    poison(p.outputs, int64_t(blockIdx.x) * kThreads + threadIdx.x, int64_t(gridDim.x) * kThreads);
    if (session.is_leader()) session.dismiss_carrier();
    return;
  }
  PeerBuffers *peers = reinterpret_cast<PeerBuffers *>(shared + plan.table);
  if (kBulk && threadIdx.x < 2 * kWarps) bulk_init(reinterpret_cast<BulkBarrier *>(shared + plan.bars) + threadIdx.x);
  bulk_fence(); // y was written through the generic proxy, by an earlier kernel
  __syncthreads();
  unsigned parity = 0;
  bool ok = true;
  // 1 reduce
  if (p.partial) {
    reduce_slots<kType, kBulk, kWire>(p, plan, shared, kWire ? 0 : 2, parity);
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
    // 4 pull
    NodeLinks links(p.call, session, plans.nodes, p.num_tokens);
    const NodeSums sums{p, plan, plans.last, shared, peers, links};
    // What is before round 0: the question of round 0, then its answers and the question of round 1.
    for (int round = -2; round < links.rounds; ++round) {
      if (round >= -1) ok = sum_round<kType, kBulk, kWire>(sums, round, parity);
      if constexpr (kWire) ok = ok && (round < 0 || sum_nodes<kType, kBulk>(sums, round, parity));
      if (!ok) break;
      if (round >= 0) {
        pull_round_scalars(sums, round);
        JAX_EP_STAMP_ROUND(kRoundDone, round);
      }
      if (round + 2 < links.rounds) ask_round(p, links, round + 2);
    }
  }
  // 5 leave
  const bool is_complete = session.leave();
  JAX_EP_STAMP(kEnd);
  if (!session.is_leader()) return;
  if (!is_complete) poison(p.outputs, threadIdx.x, kThreads);
  if (threadIdx.x == 0 && is_complete) p.call.failure->rows_put = session.control().rows_put; // all blocks' counts are in
  session.dismiss_carrier();
}

struct Named {
  template <DType kType, bool kBulk, bool kWire> static auto kernel() { return combine_nodes_kernel<kType, kBulk, kWire>; }
};
using Kernels = CombineKernels<Named>;

} // namespace

cudaError_t launch_combine_nodes(CombineParams p, cudaStream_t stream) {
  if (p.num_blocks < 1 || p.num_blocks > kMaxNodeBlocks || p.call.shape.num_nodes > kMaxNodes) return cudaErrorInvalidConfiguration;
  NodesPlan plans{};
  plans.plan = make_plan(p, [&](int64_t room, auto pieces) {
    const int nodes = p.call.shape.num_nodes;
    plans.last = GatherPlan::make(p.y_bytes, kVectorUnit, nodes, pieces(p.y_bytes, nodes), kWarps, room, p.use_bulk);
    return plans.last.shared_bytes();
  });
  plans.nodes = make_node_plan(p.call, p.y_bytes, 0, true, p.quantize == Quantize::kFp8Wire, p.num_blocks);
  const auto kernel = Kernels::get(p.dtype, p.use_bulk, p.quantize == Quantize::kFp8Wire);
  if (!kernel || plans.plan.pull.num_warps < 1 || plans.last.num_warps < 1 || plans.nodes.tokens < 1 ||
      (has_partials(p.layout, p.quantize) && plans.plan.reduce.num_warps < 1))
    return cudaErrorInvalidConfiguration;
  p.call.tag = tag_with(p.call.tag, pairs_number(plans.nodes, p.num_blocks));
  kernel<<<p.num_blocks, kThreads, plans.plan.bytes, stream>>>(p, plans);
  return cudaGetLastError();
}

cudaError_t load_combine_nodes_kernels() { return Kernels::load(); }

} // namespace jax_ep
