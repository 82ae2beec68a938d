// Latency mode: rows wait in slots of the receiver's own memory; one call sends, the same or a later one receives.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/kernels/combine_peer.h"
#include "cuda/kernels/dispatch_peer.h"

namespace jax_ep {

// Which half of the exchange a kernel does. A fused call does both; start and done are one half each.
struct LatencyCall {
  int32_t sends, receives;
  const int32_t *ticket;  // [2] done: the epoch of its start, low word first
  int32_t *ticket_result; // [2] start: the same, as a result
};

// `call.shape` of both is a `latency_arena_shape`; staging, announced buffers and the pool are not used.
// start: operands only, no result but the ticket. done: all operands and results of the fused call.
cudaError_t launch_dispatch_latency(const DispatchParams &p, const LatencyCall &latency, cudaStream_t stream);
// `partial` is null: sums go into the slots.
cudaError_t launch_combine_latency(const CombineParams &p, const LatencyCall &latency, cudaStream_t stream);
// Load every variant on the current device and allow the shared memory they ask for.
cudaError_t load_dispatch_latency_kernels();
cudaError_t load_combine_latency_kernels();
// Experts whose routing can be counted in shared memory; a call with more takes the throughput kernels.
int max_latency_experts(int num_ranks);

} // namespace jax_ep
