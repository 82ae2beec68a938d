// Dispatch, transport "peer": each token's row goes straight from the source's operand into the result buffers of
// the ranks that hold its experts; nothing is copied twice on the way.
//
// Grid: num_blocks blocks of 512 threads, one per SM, resident together on all ranks of a GPU. Block 0 is the
// leader: it alone talks to peers about flags. Steps (sync.cuh says who publishes what):
//   1 route     every block counts its tokens (skipped when a handle is reused)
//   2 agree     leader announces counts and buffers, waits for all announces, claims them
//   3 place     every block turns counts into final rows (route.cuh)
//   4 move      a warp loads a row once, quantises it if asked, and stores it to every destination (move.cuh); spare
//               warps zero what nobody writes (receive.cuh)
//   5 copy      rows that crossed a link once, for the other experts of their token (copy_received.cuh); none on one GPU
//   6 stage     rows for ranks whose buffers are out of reach, in rounds (stage_dispatch.cuh); usually none
//   7 leave     leader publishes finish and waits for every peer's
// Idea of final rows from exchanged counts: Hybrid-EP; of one shared-memory copy stored to all destinations:
// DeepEP V2 (see docs/adding_a_kernel.md for sources).
#include "cuda/kernels/dispatch_kernel.cuh"

namespace jax_ep {
namespace {

using namespace dispatch_steps;

using Kernel = void (*)(DispatchParams, Plan, NodePlan);
template <bool kQuantize> Kernel kernel_of(bool is_route, bool use_bulk) {
  if (is_route) return use_bulk ? dispatch_kernel<true, true, kQuantize, false> : dispatch_kernel<true, false, kQuantize, false>;
  return use_bulk ? dispatch_kernel<false, true, kQuantize, false> : dispatch_kernel<false, false, kQuantize, false>;
}
Kernel kernel_for(bool is_route, bool use_bulk, bool quantises) {
  return quantises ? kernel_of<true>(is_route, use_bulk) : kernel_of<false>(is_route, use_bulk);
}

} // namespace

int max_experts(int num_ranks) {
  // make_plan's room without bulk copies, with one warp that counts: per rank a table entry, a sum of slots and a
  // count; per expert start, total and a count, and its share of the own groups' start and kept.
  const double room = kVectorSharedBytes - 1024 - num_ranks * double(sizeof(PeerBuffers) + 8);
  return room < 0 ? 0 : int(room / (12 + 8.0 / num_ranks));
}

cudaError_t launch_dispatch(DispatchParams p, cudaStream_t stream) {
  if (p.num_blocks < 1 || p.num_blocks > kMaxBlocks) return cudaErrorInvalidConfiguration; // workspace size
  const bool is_route = p.topk_idx != nullptr || p.stats != nullptr;
  const Plan plan = make_plan(p, is_route);
  if (is_route && plan.count_warps < 1) return cudaErrorInvalidConfiguration; // experts + ranks beyond shared memory
  if (plan.move.num_warps < 1) return cudaErrorInvalidConfiguration;
  kernel_for(is_route, p.use_bulk, p.quantize != Quantize::kNone)<<<p.num_blocks, kThreads, plan.bytes, stream>>>(p, plan, NodePlan{});
  return cudaGetLastError();
}

cudaError_t load_dispatch_kernels() {
  cudaError_t e = cudaSuccess;
  for (int variant = 0; variant < 8 && !e; ++variant) {
    const bool use_bulk = variant / 4;
    e = load_kernel(kernel_for(variant & 1, use_bulk, variant & 2), use_bulk);
  }
  return e;
}

} // namespace jax_ep
