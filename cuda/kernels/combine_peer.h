// Combine over load/store reachable peers: parameters and launch.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/kernels/params.h"

namespace jax_ep {

// T tokens, K = num_topk, R ranks, L local experts, C = capacity, S = slots (C or R * T).
struct CombineParams {
  CallParams call;
  Outputs outputs;
  // operands
  const char *y;               // [C, row_bytes]
  const float *weights;        // [C] or null: factor of each row in its rank's sum (expert layout)
  const float *scalars;        // [C] (expert) or [C, K] (token) or null: returned to the source unsummed
  const char *bias;            // [T, row_bytes] or null
  // handle
  const int32_t *topk_clean;   // [T, K]
  const int32_t *slot;         // [T, R]
  const int32_t *dst_row;      // [T, K]
  const int32_t *slot_meta;    // [S, K] expert layout: local rows of a slot
  const int32_t *slot_token;   // [S]
  const int32_t *recv_offsets; // [R + 1]
  // results
  char *out;                   // [T, row_bytes]
  float *out_scalars;          // [T, K] or null
  char *partial;               // [S, row_bytes] expert layout: this rank's sum per slot, read by the sources
  int32_t num_tokens, num_local_experts, num_slots;
  Layout layout;
  DType dtype;
  // launch
  int32_t num_blocks;          // SMs
  int32_t use_bulk;            // 1: sm_90 bulk copies
};

cudaError_t launch_combine(CombineParams p, cudaStream_t stream);
cudaError_t load_combine_kernels();

} // namespace jax_ep
