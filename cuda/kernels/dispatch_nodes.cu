// Dispatch over several nodes: inside a node as dispatch_peer.cu does it, with the rows of other nodes' tokens handed on by
// partners (node_dispatch.cuh). All ranks of the group agree on counts, so every rank finds the final rows of its tokens
// wherever they go, and nobody routes for others.
//
// Steps of dispatch_peer.cu, with these differences:
//   2 agree     announces and counts go to ranks of other nodes as puts; only ranks of the node claim each other's buffers
//   4 move      round by round each block fills chunks for its partners, and hands on the chunks that came from them
//   6 stage     none: a rank whose buffers its node cannot reach is refused
// Idea of one copy per node to the rank with the same local index, and load and store from there: DeepEP V1, internode.
#include "cuda/kernels/dispatch_kernel.cuh"

namespace jax_ep {
namespace {

using namespace dispatch_steps;

using Kernel = void (*)(DispatchParams, Plan, NodePlan);
template <bool kQuantize> Kernel kernel_of(bool is_route, bool use_bulk) {
  if (is_route) return use_bulk ? dispatch_kernel<true, true, kQuantize, true> : dispatch_kernel<true, false, kQuantize, true>;
  return use_bulk ? dispatch_kernel<false, true, kQuantize, true> : dispatch_kernel<false, false, kQuantize, true>;
}
Kernel kernel_for(bool is_route, bool use_bulk, bool quantises) {
  return quantises ? kernel_of<true>(is_route, use_bulk) : kernel_of<false>(is_route, use_bulk);
}

} // namespace

cudaError_t launch_dispatch_nodes(DispatchParams p, cudaStream_t stream) {
  if (p.num_blocks < 1 || p.num_blocks > kMaxNodeBlocks || p.call.shape.num_nodes > kMaxNodes) return cudaErrorInvalidConfiguration;
  const bool is_route = p.topk_idx != nullptr || p.stats != nullptr;
  const Plan plan = make_plan(p, is_route);
  const NodePlan nodes = make_node_plan(p.call, p.call.row_bytes, p.call.side_bytes, false, false, p.num_blocks);
  if ((is_route && plan.count_warps < 1) || plan.move.num_warps < 1 || nodes.tokens < 1) return cudaErrorInvalidConfiguration;
  p.call.tag = tag_with(p.call.tag, pairs_number(nodes, p.num_blocks));
  kernel_for(is_route, p.use_bulk, p.quantize != Quantize::kNone)<<<p.num_blocks, kThreads, plan.bytes, stream>>>(p, plan, nodes);
  return cudaGetLastError();
}

cudaError_t load_dispatch_nodes_kernels() {
  cudaError_t e = cudaSuccess;
  for (int variant = 0; variant < 8 && !e; ++variant) e = load_kernel(kernel_for(variant & 1, variant / 4, variant & 2), variant / 4);
  return e;
}

} // namespace jax_ep
