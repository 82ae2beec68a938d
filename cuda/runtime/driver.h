// CUDA driver entry points, found through the runtime (never linked: the module must load without libcuda).
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <string>

#include "cuda/runtime/setup_failure.h"

namespace jax_ep {

// What cudart does not have: contexts and virtual memory.
struct Driver {
  decltype(&cuGetErrorName) get_error_name;
  decltype(&cuCtxGetCurrent) ctx_get_current;
  decltype(&cuCtxSetCurrent) ctx_set_current;
  decltype(&cuMemCreate) mem_create;
  decltype(&cuMemRelease) mem_release;
  decltype(&cuMemAddressReserve) mem_address_reserve;
  decltype(&cuMemAddressFree) mem_address_free;
  decltype(&cuMemMap) mem_map;
  decltype(&cuMemUnmap) mem_unmap;
  decltype(&cuMemSetAccess) mem_set_access;
  decltype(&cuMemGetAllocationGranularity) mem_get_allocation_granularity;
  decltype(&cuMemExportToShareableHandle) mem_export;
  decltype(&cuMemImportFromShareableHandle) mem_import;
  decltype(&cuMemRetainAllocationHandle) mem_retain_handle;
  decltype(&cuMemGetAllocationPropertiesFromHandle) mem_get_properties;
  decltype(&cuMemGetAddressRange) mem_get_address_range; // cuda.h names the _v2 symbol

  static const Driver &get(); // throws SetupFailure when there is no driver
};

void check(cudaError_t status, const char *what); // throws "SetupError: what: reason", clears the error
void check(CUresult status, const char *what);

// Makes `device` current for a scope, with its primary context (the one XLA uses). What was current before is
// restored as a context, not as a device: cudaSetDevice would create a context on a GPU that nobody uses.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(Driver::get().ctx_get_current(&previous_), "cuCtxGetCurrent");
    check(cudaSetDevice(device), "cudaSetDevice");
  }
  ~DeviceGuard() { (void)Driver::get().ctx_set_current(previous_); }
  DeviceGuard(const DeviceGuard &) = delete;
  DeviceGuard &operator=(const DeviceGuard &) = delete;

 private:
  CUcontext previous_ = nullptr;
};

} // namespace jax_ep
