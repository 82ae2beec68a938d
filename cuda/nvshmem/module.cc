// The Python extension jax_ep._nvshmem: NVSHMEM's set-up and symmetric memory, for jax_ep/nvshmem.py, and the carrier.
//
// Imported only when a group needs it, after libnvshmem_host.so.3 was loaded. One process is one PE on one device.
// NVSHMEM's own initialisers end the process when something is wrong, so the function under them is called here.
#include <cuda_runtime.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <nvshmem_host.h>

#include <cstdint>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "cuda/nvshmem/carrier.h"

namespace nb = nanobind;

namespace {

void check(cudaError_t status, const char *what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError(); // leave no error behind for XLA to find
  throw std::runtime_error(std::string("SetupError: nvshmem: ") + what + ": " + cudaGetErrorString(status));
}

// In a thread of its own, so that no thread of XLA has another device afterwards, and nobody a context on one that it does
// not use.
template <class Work> void on_device(int device, Work work) {
  std::exception_ptr problem;
  std::thread([&] {
    try {
      check(cudaSetDevice(device), "cudaSetDevice");
      work();
    } catch (...) {
      problem = std::current_exception();
    }
  }).join();
  if (problem) std::rethrow_exception(problem);
}

std::tuple<int, int, int> loaded_version() {
  int major = 0, minor = 0, patch = 0;
  nvshmemx_vendor_get_version_info(&major, &minor, &patch);
  return {major, minor, patch};
}

nb::bytes unique_id() {
  nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
  const int status = nvshmemx_get_uniqueid(&id);
  if (status) throw std::runtime_error("SetupError: nvshmem: nvshmemx_get_uniqueid: status " + std::to_string(status));
  return nb::bytes(reinterpret_cast<const char *>(&id), sizeof(id));
}

void init_here(int pe, int num_pes, const std::string &id_bytes) {
  if (nvshmemx_init_status() > NVSHMEM_STATUS_IS_BOOTSTRAPPED)
    throw std::runtime_error("SetupError: nvshmem: another part of this process (XLA with xla_gpu_experimental_enable_nvshmem?) "
                             "has initialised NVSHMEM, and a process can have one instance only");
  nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
  if (id_bytes.size() != sizeof(id)) throw std::runtime_error("SetupError: nvshmem: a unique id of another size");
  std::memcpy(&id, id_bytes.data(), sizeof(id));
  check(cudaFree(nullptr), "the device's context");
  nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
  int status = nvshmemx_set_attr_uniqueid_args(pe, num_pes, &id, &attributes), provided = 0;
  const nvshmemi_version_t built = {NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION, NVSHMEM_VENDOR_PATCH_VERSION};
  if (!status)
    status = nvshmemi_init_thread(NVSHMEM_THREAD_SERIALIZED, &provided, NVSHMEMX_INIT_WITH_UNIQUEID, &attributes, built);
  (void)cudaGetLastError();
  if (status)
    throw std::runtime_error("SetupError: nvshmem: initialisation failed with status " + std::to_string(status) +
                             "; NVSHMEM_DEBUG=INFO says more");
  if (nvshmem_my_pe() != pe || nvshmem_n_pes() != num_pes)
    throw std::runtime_error("SetupError: nvshmem: PE " + std::to_string(nvshmem_my_pe()) + " of " +
                             std::to_string(nvshmem_n_pes()) + ", expected " + std::to_string(pe) + " of " +
                             std::to_string(num_pes));
  check(jax_ep::load_nvshmem_carrier(), "loading the carrier");
}

// Collective over all PEs. NVSHMEM would end the process itself where there is no device.
void init(int pe, int num_pes, const std::string &id_bytes, int device) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || device >= devices) {
    (void)cudaGetLastError();
    throw std::runtime_error("SetupError: nvshmem: got device " + std::to_string(device) + ", this process has " +
                             std::to_string(devices));
  }
  on_device(device, [&] { init_here(pe, num_pes, id_bytes); });
}

uintptr_t allocate_here(int64_t bytes) {
  void *region = nvshmem_malloc(size_t(bytes));
  (void)cudaGetLastError();
  if (!region) {
    size_t free = 0, total = 0;
    (void)cudaMemGetInfo(&free, &total);
    throw std::runtime_error("SetupError: nvshmem: a symmetric region of " + std::to_string(bytes >> 20) + " MiB was refused, " +
                             std::to_string(free >> 20) + " MiB of " + std::to_string(total >> 20) + " MiB are free; lower " +
                             "XLA_CLIENT_MEM_FRACTION or Config.nvshmem_bytes");
  }
  cudaStream_t stream = nullptr; // waits for no other
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
  cudaError_t e = cudaMemsetAsync(region, 0, size_t(bytes), stream);
  if (!e) e = cudaStreamSynchronize(stream);
  (void)cudaStreamDestroy(stream);
  check(e, "clearing the symmetric region");
  return reinterpret_cast<uintptr_t>(region);
}

// Collective. Zeroed here, but not yet elsewhere when it returns.
uintptr_t allocate(int64_t bytes, int device) {
  uintptr_t region = 0;
  on_device(device, [&] { region = allocate_here(bytes); });
  return region;
}

// Where this process finds the region of each PE; 0: by puts alone.
std::vector<uintptr_t> reachable(uintptr_t region, int num_pes) {
  std::vector<uintptr_t> at;
  for (int pe = 0; pe < num_pes; ++pe)
    at.push_back(reinterpret_cast<uintptr_t>(nvshmem_ptr(reinterpret_cast<void *>(region), pe)));
  return at;
}

// Does a word that a network card stores make the bytes before it visible to the kernels of the device?
bool orders_network_writes(int device) {
  int ordering = 0;
  check(cudaDeviceGetAttribute(&ordering, cudaDevAttrGPUDirectRDMAWritesOrdering, device), "GPUDirectRDMAWritesOrdering");
  return ordering >= cudaGPUDirectRDMAWritesOrderingOwner;
}

void finalize(int device) {
  on_device(device, [] {
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    nvshmem_finalize();
  });
}

} // namespace

NB_MODULE(_nvshmem, m) {
  using Unlocked = nb::call_guard<nb::gil_scoped_release>;
  m.attr("built_version") = nb::make_tuple(NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION, NVSHMEM_VENDOR_PATCH_VERSION);
  m.attr("carrier") = reinterpret_cast<uintptr_t>(&jax_ep::launch_nvshmem_carrier); // for _cuda.set_symmetric_heap
  m.attr("params_bytes") = sizeof(jax_ep::CarrierParams);                           // ... which compares it
  m.def("loaded_version", &loaded_version);
  m.def("unique_id", &unique_id);
  m.def(
      "init",
      [](int pe, int num_pes, nb::bytes id, int device) {
        const std::string bytes(id.c_str(), id.size());
        nb::gil_scoped_release unlocked;
        init(pe, num_pes, bytes, device);
      },
      nb::arg("pe"), nb::arg("num_pes"), nb::arg("unique_id"), nb::arg("device"));
  m.def("allocate", &allocate, Unlocked(), nb::arg("bytes"), nb::arg("device"));
  m.def("reachable", &reachable, Unlocked(), nb::arg("region"), nb::arg("num_pes"));
  m.def("orders_network_writes", &orders_network_writes, nb::arg("device"));
  m.def("finalize", &finalize, Unlocked(), nb::arg("device"));
}
