// Combine over load/store reachable peers: parameters and launch.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/kernels/params.h"

namespace jax_ep {

// T tokens, K = num_topk, R ranks, L local experts, C = rows of y, S = slots (C or R * T).
struct CombineParams {
  CallParams call;             // row_bytes: of a partial sum as it crosses
  Outputs outputs;
  // operands
  const char *y;               // [C, y_bytes]
  const float *weights;        // [C] or null: factor of each row in its rank's sum (not in the token layout)
  const float *scalars;        // [C], [C, K] in the token layout, or null: returned to the source unsummed
  const char *bias;            // [T, y_bytes] or null
  // handle
  const int32_t *topk_clean;   // [T, K]
  const int32_t *slot;         // [T, R]
  const int32_t *dst_row;      // [T, K]
  const int32_t *slot_meta;    // [S, K] rows of a slot (not in the token layout)
  const int32_t *slot_token;   // [S]
  const int32_t *recv_offsets; // [R + 1]
  // results
  char *out;                   // [T, y_bytes]
  float *out_scalars;          // [T, K] or null
  char *partial;               // [S, row_bytes] this rank's sum per slot, read by the sources; null: y itself is read
  int64_t y_bytes;             // of a row of y and of the result
  int32_t num_tokens, num_local_experts;
  Layout layout;
  DType dtype;
  Quantize quantize;           // kNone or kFp8Wire
  // launch
  int32_t num_blocks;          // SMs
  int32_t use_bulk;            // 1: sm_90 bulk copies
};

cudaError_t launch_combine(CombineParams p, cudaStream_t stream);
cudaError_t load_combine_kernels();

} // namespace jax_ep
