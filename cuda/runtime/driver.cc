#include "cuda/runtime/driver.h"

namespace jax_ep {
namespace {

template <typename Fn>
void load(Fn &fn, const char *symbol) {
  void *address = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  // The ABI of CUDA 12.0, whatever the toolkit: the prototypes above have not changed since.
  cudaError_t status = cudaGetDriverEntryPointByVersion(symbol, &address, 12000, cudaEnableDefault, &result);
#else
  cudaError_t status = cudaGetDriverEntryPoint(symbol, &address, cudaEnableDefault, &result);
#endif
  check(status, symbol);
  if (result != cudaDriverEntryPointSuccess || address == nullptr) {
    fail(std::string("the CUDA driver has no ") + symbol + "; a driver for CUDA 12 or newer is needed");
  }
  fn = reinterpret_cast<Fn>(address);
}

Driver load_driver() {
  int count = 0;
  check(cudaGetDeviceCount(&count), "cudaGetDeviceCount"); // initialises the driver
  Driver d{};
  load(d.get_error_name, "cuGetErrorName");
  load(d.ctx_get_current, "cuCtxGetCurrent");
  load(d.ctx_set_current, "cuCtxSetCurrent");
  load(d.mem_create, "cuMemCreate");
  load(d.mem_release, "cuMemRelease");
  load(d.mem_address_reserve, "cuMemAddressReserve");
  load(d.mem_address_free, "cuMemAddressFree");
  load(d.mem_map, "cuMemMap");
  load(d.mem_unmap, "cuMemUnmap");
  load(d.mem_set_access, "cuMemSetAccess");
  load(d.mem_get_allocation_granularity, "cuMemGetAllocationGranularity");
  load(d.mem_export, "cuMemExportToShareableHandle");
  load(d.mem_import, "cuMemImportFromShareableHandle");
  load(d.mem_retain_handle, "cuMemRetainAllocationHandle");
  load(d.mem_get_properties, "cuMemGetAllocationPropertiesFromHandle");
  load(d.mem_get_address_range, "cuMemGetAddressRange");
  return d;
}

} // namespace

const Driver &Driver::get() {
  static const Driver driver = load_driver(); // a throw leaves it unset: the next call tries again
  return driver;
}

void check(cudaError_t status, const char *what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError(); // not sticky for whoever launches next on this thread
  fail(std::string(what) + ": " + cudaGetErrorName(status) + " (" + cudaGetErrorString(status) + ")");
}

void check(CUresult status, const char *what) {
  if (status == CUDA_SUCCESS) return;
  const char *name = nullptr;
  if (Driver::get().get_error_name(status, &name) != CUDA_SUCCESS || name == nullptr) name = "unknown error";
  fail(std::string(what) + ": " + name);
}

} // namespace jax_ep
