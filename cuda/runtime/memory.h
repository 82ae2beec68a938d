// Device memory that other devices and processes can map, and the small RAII types around it.
#pragma once

#include <cstdint>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cuda/layout.h"
#include "cuda/runtime/driver.h"
#include "cuda/runtime/fd.h"

namespace jax_ep {

// One physical allocation mapped at one address of this process: made here, or imported from a peer.
// Not freed before process exit in practice (peers may hold it), but the destructor undoes a failed set-up.
class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping &&other) noexcept { swap(other); }
  Mapping &operator=(Mapping &&other) noexcept {
    swap(other);
    return *this;
  }
  ~Mapping();

  // At least `bytes` on `device`, exportable by file descriptor, accessible by `device`. Not zeroed.
  static Mapping create(int device, int64_t bytes);
  // `bytes` is the size that the exporter told; `fd` may be closed afterwards.
  static Mapping import(const Fd &fd, int64_t bytes);

  // Read and write access for more local devices; those that have it already are skipped.
  void grant(const std::vector<int> &devices);
  Fd export_fd() const;

  char *base() const { return base_; }
  int64_t bytes() const { return bytes_; }

 private:
  void map();
  void swap(Mapping &other) noexcept;

  CUmemGenericAllocationHandle handle_ = 0;
  char *base_ = nullptr;
  int64_t bytes_ = 0;
  bool has_handle_ = false;
  bool is_mapped_ = false;
  std::set<int> granted_;
};

// XLA's pool as found from two of its buffers.
struct PoolRange {
  char *base = nullptr; // null: there is no single exportable region
  int64_t bytes = 0;
  CUmemGenericAllocationHandle handle = 0; // retained for the life of the process
};

// The pool is registered only if it is one preallocated region. Two buffers that were allocated separately, one
// of them a few MiB, lie in one exportable allocation of at least `kMinPoolBytes` then; a growing pool or another
// allocator puts them into regions of their own.
constexpr int64_t kMinPoolBytes = int64_t(64) << 20;
PoolRange find_pool(int device, uint64_t small_ptr, uint64_t large_ptr);
Fd export_pool(const PoolRange &pool);

// Pinned host records for failures: cut from page-locked slabs, so that a bind after the first execution rarely
// allocates (page-locked allocation may synchronise). Slots are never returned.
class RecordSlab {
 public:
  FailureRecord *take(int device); // zeroed; readable and writable by every device at this address
  void reserve(int device);        // makes sure that a slot is free

 private:
  void grow(int device);
  std::mutex mutex_;
  FailureRecord *next_ = nullptr;
  int num_free_ = 0;
};

} // namespace jax_ep
