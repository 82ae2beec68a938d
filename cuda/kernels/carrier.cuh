// The loop of a carrier, whatever the transport: looks for puts that were posted, and has them done.
//
// Block b of the carrier does the entries b, b + num_blocks, ...: a thread looks at several, the block then does those that
// were found together. Nobody else touches an entry between its post and the arrival of its word.
#pragma once

#include "cuda/device/sync.cuh"
#include "cuda/kernels/carrier.h"

namespace jax_ep {

constexpr int kCarrierThreads = 512;

// Entries that the kernel of the call uses: all but those of blocks that it does not have.
struct PutEntries {
  const CarrierParams &p;
  __device__ int64_t count() const {
    return 3 * int64_t(p.num_ranks) + int64_t(kNumNodeFlags) * 2 * p.shape.num_nodes * p.call_blocks;
  }
  __device__ Put &at(int64_t i) const {
    Put *all = reinterpret_cast<Put *>(p.arena + p.shape.puts());
    const int64_t first = 3 * int64_t(p.num_ranks);
    if (i < first) return all[i];
    i -= first;
    return all[first + i / p.call_blocks * kMaxNodeBlocks + i % p.call_blocks];
  }
};

// `transport.takes(entry)`: now, or at a later look? One thread. `transport.pick(j, found, look)`: which of those that a look
// found is the j-th; all threads. `transport.carry(put)`: bytes, then the word; all
// threads, which have what was posted.
template <class Transport> __device__ __forceinline__ void carry(const CarrierParams &p, Transport transport) {
  __shared__ int64_t s_found[kCarrierThreads];
  __shared__ uint64_t s_number[kCarrierThreads];
  __shared__ int s_count, s_postponed, s_has_ended;
  __shared__ uint64_t s_call;
  Control &control = *reinterpret_cast<Control *>(p.arena + p.shape.control());
  // The number of the call that this carrier is for: kernels of one stream count it. Other carriers had other blocks.
  uint64_t *begun = reinterpret_cast<uint64_t *>(p.arena + p.shape.carried());
  for (int i = blockIdx.x + threadIdx.x * p.num_blocks; i < kMaxNodeBlocks; i += kCarrierThreads * p.num_blocks) {
    const uint64_t call = ++begun[i];
    if (threadIdx.x == 0) s_call = call;
  }
  const PutEntries entries{p};
  const int64_t count = entries.count();
  uint64_t active = now_ns();
  for (uint32_t look = 0;; ++look) {
    __syncthreads(); // what was found is done
    if (threadIdx.x == 0) {
      s_count = 0, s_postponed = 0;
      // Before the look: whatever the call posted is then found in it.
      s_has_ended = DeviceWord<uint64_t>(control.calls_ended).load(cuda::memory_order_acquire) >= s_call;
    }
    __syncthreads();
    for (int64_t i = blockIdx.x + int64_t(threadIdx.x) * p.num_blocks; i < count; i += int64_t(kCarrierThreads) * p.num_blocks) {
      Put &entry = entries.at(i);
      // Acquires the entry and the bytes that it names.
      const uint64_t number = DeviceWord<uint64_t>(entry.posted).load(cuda::memory_order_acquire);
      if (number == entry.done) continue;
      const int place = transport.takes(i) ? atomicAdd(&s_count, 1) : kCarrierThreads;
      if (place < kCarrierThreads) s_found[place] = i, s_number[place] = number;
      else s_postponed = 1;
    }
    __syncthreads();
    const int found = min(s_count, kCarrierThreads);
    for (int j = 0; j < found; ++j) {
      Put &entry = entries.at(s_found[transport.pick(j, found, look)]);
      const Put put = entry;
      transport.carry(put);
      // The next post may be there already: it is another number.
      if (threadIdx.x == 0) entry.done = s_number[transport.pick(j, found, look)];
    }
    if (found) active = now_ns();
    else if (s_has_ended && !s_postponed) return;
    // The call's kernel waits for at most four limits at a time; one that is gone has told nobody. (Signed: the clock may
    // be read a little back.)
    else if (__syncthreads_or(int64_t(now_ns() - active) > int64_t(p.limit_ns) * 16)) return;
  }
}

} // namespace jax_ep
