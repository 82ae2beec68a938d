// Dispatch over load/store reachable peers: parameters and launch.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/kernels/params.h"

namespace jax_ep {

// T tokens, K = num_topk, R ranks, E experts, L = E / R, C = capacity, S = slots (C or R * T).
struct DispatchParams {
  CallParams call;
  Outputs outputs;
  // operands
  const char *x;            // [T, row_bytes]
  const int32_t *topk_idx;  // [T, K] as the user gave it; null when a handle is reused
  const float *weights;     // [T, K] or null
  // handle: results when routing, operands when a handle is reused
  int32_t *topk_clean;      // [T, K] ids in [0, E) or -1
  int32_t *slot;            // [T, R] slot at each rank, -1: does not go there
  int32_t *dst_row;         // [T, K] row at the expert's rank, -1: dropped or not routed
  int32_t *slot_meta;       // [S, K] token layout: local ids; expert layout: local rows. Written when routing only
  int32_t *slot_token;      // [S] source token. Written when routing only
  int32_t *recv_offsets;    // [R + 1] first slot of each source
  int32_t *group_sizes;     // [L] padded, after dropping
  int32_t *counts;          // [L] kept rows
  // results
  char *recv_x;             // [C, row_bytes]
  float *recv_weights;      // [C] or [C, K], null without weights
  int32_t *stats;           // [8], null when a handle is reused
  int32_t num_tokens, num_experts, num_local_experts, capacity, num_slots, alignment;
  Layout layout;
  int32_t zero_tail;
  // launch
  int32_t num_blocks;       // SMs
  int32_t use_bulk;         // 1: sm_90 bulk copies
};

// Experts that routing can count in shared memory, on every architecture; more is refused while a program is lowered.
int max_experts(int num_ranks);
cudaError_t launch_dispatch(DispatchParams p, cudaStream_t stream);
// Loads every variant on the current device and allows the shared memory they ask for.
cudaError_t load_dispatch_kernels();

} // namespace jax_ep
