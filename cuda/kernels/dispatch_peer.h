// Dispatch over load/store reachable peers: parameters and launch.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/kernels/params.h"

namespace jax_ep {

// T tokens, K = num_topk, R ranks, E experts, L = E / R, C = capacity, N = rows of recv_x (C, or L * C in the batched
// layout), S = slots (C in the token layout, else R * T).
struct DispatchParams {
  CallParams call;          // row_bytes, side_bytes: of a row as it is received
  Outputs outputs;
  // operands
  const char *x;            // [T, x_bytes]
  const char *side;         // [T, side_bytes] or null: travels with the rows; null when the kernel quantises
  const int32_t *topk_idx;  // [T, K] as the user gave it; null when a handle is reused
  const float *weights;     // [T, K] or null
  const int32_t *window;    // [1] which window of the rows is delivered, -1: the only one. Null when a handle is reused
  // handle: results when routing, operands when a handle is reused
  int32_t *topk_clean;      // [T, K] ids in [0, E) or -1
  int32_t *slot;            // [T, R] slot at each rank, -1: does not go there
  int32_t *dst_row;         // [T, K] row at the expert's rank, -1: dropped or not routed
  int32_t *slot_meta;       // [S, K] token layout: local ids; else local rows. Written when routing only
  int32_t *slot_token;      // [S] source token. Written when routing only
  int32_t *recv_offsets;    // [R + 1] first slot of each source
  int32_t *group_sizes;     // [L] padded, after dropping (expert layout)
  int32_t *counts;          // [L] kept rows
  // results
  char *recv_x;             // [N, row_bytes]
  char *recv_side;          // [N, side_bytes] or null
  float *recv_weights;      // [N] or [N, K] (token layout), null without weights
  int32_t *stats;           // [8], null when a handle is reused
  int64_t x_bytes;          // of an operand row; row_bytes unless the kernel quantises
  int32_t num_tokens, num_experts, num_local_experts, capacity, num_slots, alignment;
  Layout layout;
  DType dtype;              // of x; read only when the kernel quantises
  Quantize quantize;        // kNone, kFp8 or kFp8Ue8m0: x becomes e4m3 rows with one scale per 128 channels as side
  int32_t zero_tail;
  // launch
  int32_t num_blocks;       // SMs
  int32_t use_bulk;         // 1: sm_90 bulk copies

  JAX_EP_HD bool is_token_layout() const { return layout == Layout::kToken; }
  JAX_EP_HD int64_t num_rows() const {
    return layout == Layout::kBatched ? int64_t(num_local_experts) * capacity : capacity;
  }
  JAX_EP_HD int64_t scalars_per_row() const { return is_token_layout() ? call.num_topk : 1; }
};

// Experts that routing can count in shared memory, on every architecture; more is refused while a program is lowered.
int max_experts(int num_ranks);
cudaError_t launch_dispatch(DispatchParams p, cudaStream_t stream);
// Loads every variant on the current device and allows the shared memory they ask for.
cudaError_t load_dispatch_kernels();

} // namespace jax_ep
