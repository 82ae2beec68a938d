// Carriers: the kernel beside a call over several nodes that does its puts. What a transport is, is a carrier.
//
// A call's kernel never stores to another node. It leaves a Put in its own arena (layout.h), and the carrier of the same
// rank, on a stream of its own, stores the bytes in the peer's arena and then raises the word there. The only order that
// the protocol relies on: a put's bytes before its own word. Puts may overtake each other.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/kernels/params.h"

namespace jax_ep {

constexpr int kMaxCarrierBlocks = 16;

struct CarrierParams {
  ArenaShape shape;
  char *arena;            // own arena
  const Peer *peers;      // device memory, [num_ranks]
  uint64_t limit_ns;      // of the call's own waits: a carrier without work gives up after several of them
  int32_t num_ranks;
  int32_t call_blocks;    // of the kernel whose puts these are
  int32_t num_blocks;     // of the carrier, one per SM
  uint32_t max_delay_ns;  // test transport: puts are done out of order, each late by up to this; 0: neither
  int32_t use_bulk;       // 1: the copy engine moves bytes within reach
  const int32_t *pes = nullptr; // NVSHMEM: the PE of each rank; device memory
};

// Of one call; where it runs beside the call's kernel. It ends once the call has, and all puts are done.
struct Carrier {
  cudaStream_t stream = nullptr;
  cudaEvent_t before = nullptr; // what the call's stream had to do before the call
};
using LaunchCarrier = cudaError_t (*)(const CarrierParams &, cudaStream_t);

// The test transport: stores to memory that is reachable anyway, as late and in such an order as puts may come.
cudaError_t launch_test_carrier(const CarrierParams &p, cudaStream_t stream);
cudaError_t load_test_carrier();

// Makes the stream and event, at set-up.
inline cudaError_t make_carrier(Carrier *carrier) {
  int least = 0, greatest = 0;
  cudaError_t e = cudaDeviceGetStreamPriorityRange(&least, &greatest);
  // In line for SMs before what has no priority, since the call's kernel waits for it; but not the greatest, which is that of
  // set-up (LocalDevice). On one hardware queue with it, memory that a peer asks for could wait behind the carrier of a call
  // that waits for this very peer.
  if (!e) e = cudaStreamCreateWithPriority(&carrier->stream, cudaStreamNonBlocking, greatest + 1 < least ? greatest + 1 : greatest);
  if (!e) e = cudaEventCreateWithFlags(&carrier->before, cudaEventDisableTiming);
  return e;
}

// Before the kernel of the call itself, on whose `stream` nothing waits for the carrier: it touches own arenas alone.
inline cudaError_t launch_carrier(const Carrier &carrier, LaunchCarrier launch, const CarrierParams &p, cudaStream_t stream) {
  cudaError_t e = cudaEventRecord(carrier.before, stream);
  if (!e) e = cudaStreamWaitEvent(carrier.stream, carrier.before, 0); // so that it takes no SM from what comes before
  return e ? e : launch(p, carrier.stream);
}

} // namespace jax_ep
