// Groups of several nodes: what a call over them knows beside its parameters, planned on the host.
//
// A rank (node A, local index l) sends each of its tokens once to every other node B that the token reaches, to its
// partner (B, l), which hands it on (dispatch) or answers with the node's sum (combine). Between nodes there are no loads
// and stores, only puts: bytes into the partner's arena, then a word there. A rank's kernel describes a put in its own
// arena (layout.h, Put); another kernel of the rank, its carrier, carries it out (carrier.h).
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/kernels/combine_peer.h"
#include "cuda/kernels/dispatch_peer.h"

namespace jax_ep {

struct NodePlan {
  NodeCell cell;
  int64_t cell_bytes;
  int32_t tokens; // of a block in a round, at most
};

// `has_own`: there is a cell of the own node, too. 0 in `tokens`: the arena is too small for the call.
inline NodePlan make_node_plan(const CallParams &call, int64_t row_bytes, int64_t side_bytes, bool is_combine, bool has_own,
                               int num_blocks) {
  NodePlan n{};
  n.cell = {row_bytes, side_bytes, call.num_topk, call.shape.ranks_per_node(), is_combine,
            call.shape.num_nodes - !has_own};
  n.cell_bytes = n.cell.cell_bytes(call.shape, num_blocks);
  n.tokens = int32_t(n.cell.tokens(n.cell_bytes));
  if (n.tokens < 1) return n;
  if (call.chunk_tokens > 0 && call.chunk_tokens < n.tokens) n.tokens = call.chunk_tokens;
  return n;
}

// For the call's tag: blocks and rounds of partners go in pairs. One number of the two, since a tag that takes them one
// after the other is the same for 8 blocks of 16 tokens as for 16 of 8, and for 8 of 8 as for 16 of 16.
inline int32_t pairs_number(const NodePlan &n, int num_blocks) {
  static_assert(int64_t(kMaxNodeBlocks + 1) * (kMaxNodeTokens + 1) < INT32_MAX);
  return num_blocks * (kMaxNodeTokens + 1) + n.tokens;
}

// As launch_dispatch and launch_combine. All ranks use as many blocks, at most kMaxNodeBlocks; a carrier must run beside.
cudaError_t launch_dispatch_nodes(DispatchParams p, cudaStream_t stream);
cudaError_t launch_combine_nodes(CombineParams p, cudaStream_t stream);
cudaError_t load_dispatch_nodes_kernels();
cudaError_t load_combine_nodes_kernels();

} // namespace jax_ep
