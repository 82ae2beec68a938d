// What every call hands to its kernel, whatever the operation.
#pragma once

#include <cstdint>

#include "cuda/layout.h"

namespace jax_ep {

// Multiples of a limit are compared too; this is nine years.
constexpr int64_t kMaxLimitNs = int64_t(1) << 58;

struct CallParams {
  ArenaShape shape;
  char *arena;             // own arena
  const Peer *peers;       // device memory, [num_ranks]
  FailureRecord *failure;  // pinned host memory
  uint64_t pool_base;      // own XLA pool: announced offsets count from here
  uint64_t tag;            // must be equal on all ranks
  uint64_t limit_ns;       // how long to wait for a peer
  uint64_t buffer[kNumBuffers]; // own buffers that peers touch in this call
  Op op;
  int32_t rank;
  int32_t num_ranks;
  int32_t num_topk;
  int64_t row_bytes;       // of a row as it crosses
  int64_t side_bytes;      // of what travels beside it
  int32_t force_staged;    // 1: every other rank goes through staging (a test aid)
  int32_t is_direct;       // 1: all of `buffer` lie in the exported pool
  int32_t chunk_tokens;    // several nodes: of a block in a round, at most; 0: as many as own memory takes

  JAX_EP_HD bool is_staged_for(int peer, const Peer &p) const {
    return peer != rank && (force_staged || (!is_direct && !p.same_process));
  }
  // Dispatch, rows that repeat on one rank: over a link a row crosses once and the receiver copies it (expert and
  // batched layouts). On one GPU the sender stores all copies, which costs one pass over memory less.
  JAX_EP_HD bool crosses_once(int peer, const Peer &p, Layout layout) const {
    return peer != rank && p.is_other_gpu && num_topk > 1 && layout != Layout::kToken;
  }
  // Several nodes: rank r is on node r / ranks_per_node. What a rank of another node sends comes through its partner here,
  // the rank with the same place on this node.
  JAX_EP_HD int node_of(int r) const { return r / shape.ranks_per_node(); }
  JAX_EP_HD int first_of_node() const { return shape.has_nodes() ? node_of(rank) * shape.ranks_per_node() : 0; }
  JAX_EP_HD bool is_remote(int r) const { return shape.has_nodes() && node_of(r) != node_of(rank); }
  JAX_EP_HD int partner(int node) const { return node * shape.ranks_per_node() + rank % shape.ranks_per_node(); }
  JAX_EP_HD int relay_of(int source) const {
    return shape.has_nodes() ? first_of_node() + source % shape.ranks_per_node() : source;
  }
  JAX_EP_HD StagingShape staging() const { return StagingShape{row_bytes, num_topk, side_bytes}; }
};

// Results of a call, for poisoning after a failure. Sizes become 0, everything else bytes of 0xff.
struct Outputs {
  static constexpr int kMax = 12;
  void *at[kMax];
  int64_t bytes[kMax];
  uint8_t is_size[kMax];
  int32_t size;
  void add(void *p, int64_t n, bool sizes = false) { at[size] = p, bytes[size] = n, is_size[size++] = sizes; }
};

} // namespace jax_ep
