// Which devices use bulk copies, and what a block may take of shared memory with and without them.
#pragma once

#include <cuda_runtime_api.h>

namespace jax_ep {

constexpr int kBulkSharedBytes = 216 * 1024;  // of 227 KiB that sm_90 gives a block
constexpr int kVectorSharedBytes = 96 * 1024; // less than any GPU from sm_80 on gives

// The copy engine alone is not enough: compute capability 12.x has it, but a block there gets 99 KiB.
inline bool has_bulk_copies(int device) {
  int major = 0, bytes = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return major >= 9 && bytes >= kBulkSharedBytes + 1024; // and 1 KiB of the kernels' own
}

} // namespace jax_ep
