// Which devices use bulk copies.
#pragma once

#include <cuda_runtime_api.h>

namespace jax_ep {

constexpr int kBulkSharedBytes = 216 * 1024; // that a block of the bulk kernels may take

// The copy engine alone is not enough: compute capability 12.x has it, but a block there gets 99 KiB.
inline bool has_bulk_copies(int device) {
  int major = 0, bytes = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return major >= 9 && bytes >= kBulkSharedBytes + 1024; // and 1 KiB of the kernels' own
}

} // namespace jax_ep
