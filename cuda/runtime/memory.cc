#include "cuda/runtime/memory.h"

#include <fcntl.h>

#include <cstring>

namespace jax_ep {
namespace {

CUmemAllocationProp allocation_properties(int device) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = device;
  return prop;
}

CUdeviceptr address(const char *p) { return reinterpret_cast<CUdeviceptr>(p); }

std::string mib(int64_t bytes) { return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB"; }

Fd export_handle(CUmemGenericAllocationHandle handle) {
  int fd = -1;
  check(Driver::get().mem_export(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
        "cuMemExportToShareableHandle");
  (void)::fcntl(fd, F_SETFD, FD_CLOEXEC); // a child that execs must not keep the GPU's memory alive
  return Fd(fd);
}

} // namespace

Mapping Mapping::create(int device, int64_t bytes) {
  const Driver &driver = Driver::get();
  DeviceGuard guard(device);
  const CUmemAllocationProp prop = allocation_properties(device);
  size_t granularity = 0;
  check(driver.mem_get_allocation_granularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
        "cuMemGetAllocationGranularity");
  Mapping m;
  m.bytes_ = round_up(bytes, int64_t(granularity));
  const CUresult status = driver.mem_create(&m.handle_, size_t(m.bytes_), &prop, 0);
  if (status == CUDA_ERROR_OUT_OF_MEMORY) {
    size_t free = 0, total = 1;
    (void)cudaMemGetInfo(&free, &total);
    fail("symmetric memory of " + mib(m.bytes_) + " on device " + std::to_string(device) + " does not fit: " +
         mib(int64_t(free)) + " of " + mib(int64_t(total)) + " are free, the other " +
         std::to_string(100 - 100 * free / total) +
         "% are held mostly by XLA's pool; lower XLA_CLIENT_MEM_FRACTION, Config.staging_bytes or Config.max_pending");
  }
  check(status, "cuMemCreate");
  m.has_handle_ = true;
  m.map();
  m.grant({device});
  return m;
}

Mapping Mapping::import(const Fd &fd, int64_t bytes) {
  Mapping m;
  m.bytes_ = bytes;
  check(Driver::get().mem_import(&m.handle_, reinterpret_cast<void *>(intptr_t(fd.get())),
                                 CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
        "cuMemImportFromShareableHandle");
  m.has_handle_ = true;
  m.map();
  return m;
}

void Mapping::map() {
  const Driver &driver = Driver::get();
  CUdeviceptr reserved = 0;
  check(driver.mem_address_reserve(&reserved, size_t(bytes_), 0, 0, 0), "cuMemAddressReserve");
  base_ = reinterpret_cast<char *>(reserved);
  check(driver.mem_map(reserved, size_t(bytes_), 0, handle_, 0), "cuMemMap");
  is_mapped_ = true;
}

void Mapping::grant(const std::vector<int> &devices) {
  for (int device : devices) {
    if (granted_.count(device)) continue;
    CUmemAccessDesc access{};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = device;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    check(Driver::get().mem_set_access(address(base_), size_t(bytes_), &access, 1),
          ("cuMemSetAccess for device " + std::to_string(device)).c_str());
    granted_.insert(device);
  }
}

Fd Mapping::export_fd() const { return export_handle(handle_); }

void Mapping::swap(Mapping &other) noexcept {
  std::swap(handle_, other.handle_);
  std::swap(base_, other.base_);
  std::swap(bytes_, other.bytes_);
  std::swap(has_handle_, other.has_handle_);
  std::swap(is_mapped_, other.is_mapped_);
  std::swap(granted_, other.granted_);
}

Mapping::~Mapping() {
  if (!has_handle_) return;
  const Driver &driver = Driver::get();
  if (is_mapped_) (void)driver.mem_unmap(address(base_), size_t(bytes_));
  if (base_ != nullptr) (void)driver.mem_address_free(address(base_), size_t(bytes_));
  (void)driver.mem_release(handle_);
}

PoolRange find_pool(int device, uint64_t small_ptr, uint64_t large_ptr) {
  const Driver &driver = Driver::get();
  DeviceGuard guard(device);
  CUdeviceptr base = 0, other = 0;
  size_t bytes = 0, other_bytes = 0;
  check(driver.mem_get_address_range(&base, &bytes, CUdeviceptr(small_ptr)), "cuMemGetAddressRange");
  check(driver.mem_get_address_range(&other, &other_bytes, CUdeviceptr(large_ptr)), "cuMemGetAddressRange");
  if (base != other || bytes != other_bytes || int64_t(bytes) < kMinPoolBytes) return {};

  // One physical allocation from the first to the last byte, exportable as a file descriptor. Memory that is not
  // made with cuMemCreate (cudaMalloc, cudaMallocAsync) has no handle to retain.
  CUmemGenericAllocationHandle first = 0, last = 0;
  if (driver.mem_retain_handle(&first, reinterpret_cast<void *>(base)) != CUDA_SUCCESS) return {};
  bool is_one = driver.mem_retain_handle(&last, reinterpret_cast<void *>(base + bytes - 1)) == CUDA_SUCCESS;
  if (is_one) {
    (void)driver.mem_release(last); // drops the reference just taken, not the allocation
    is_one = first == last;
  }
  CUmemAllocationProp prop{};
  const bool is_exportable = is_one && driver.mem_get_properties(&prop, first) == CUDA_SUCCESS &&
                             (prop.requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0;
  if (!is_exportable) {
    (void)driver.mem_release(first);
    return {};
  }
  return {reinterpret_cast<char *>(base), int64_t(bytes), first};
}

Fd export_pool(const PoolRange &pool) { return export_handle(pool.handle); }

void RecordSlab::grow(int device) {
  constexpr int kSlots = 1024;
  DeviceGuard guard(device);
  void *p = nullptr;
  check(cudaHostAlloc(&p, kSlots * sizeof(FailureRecord), cudaHostAllocPortable | cudaHostAllocMapped),
        "cudaHostAlloc");
  std::memset(p, 0, kSlots * sizeof(FailureRecord));
  next_ = static_cast<FailureRecord *>(p);
  num_free_ = kSlots;
}

void RecordSlab::reserve(int device) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (num_free_ == 0) grow(device);
}

FailureRecord *RecordSlab::take(int device) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (num_free_ == 0) grow(device);
  --num_free_;
  return next_++;
}

} // namespace jax_ep
