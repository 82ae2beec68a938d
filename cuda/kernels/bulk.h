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

// Loads a kernel's machine code on the current device now, instead of at its first launch, and allows it the shared memory
// that it may ask for. Nothing to do for one with bulk copies where the device has none.
template <class... Params> cudaError_t load_kernel(void (*kernel)(Params...), bool use_bulk) {
  int device = 0;
  const cudaError_t e = cudaGetDevice(&device);
  if (e || (use_bulk && !has_bulk_copies(device))) return e;
  return cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                              use_bulk ? kBulkSharedBytes : kVectorSharedBytes);
}

} // namespace jax_ep
