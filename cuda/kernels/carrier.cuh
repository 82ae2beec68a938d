// The loop of a carrier, whatever the transport: one warp looks for puts that were posted and cuts them into pieces, the
// others carry pieces. So a large put has all of them, and many small ones are under way together.
//
// Block b of the carrier does the entries b, b + num_blocks, ... Nobody else touches an entry between its post and the
// arrival of its word. Pieces are numbered in the order in which they were published, small puts apart: questions and counts,
// which others wait for before they have anything to put, go before rows. A worker takes the next number that there is, so
// that nobody hands work out. Words of shared memory: docs/memory_order.md.
#pragma once

#include "cuda/device/sync.cuh"
#include "cuda/kernels/bulk.h"
#include "cuda/kernels/carrier.h"

namespace jax_ep {

constexpr int kCarrierThreads = 512;
// Limits that nothing came for. The call's kernel waits for one at a time, in the worst case for a few of them before it posts
// again; what is posted after its carrier has gone is done by the next call's.
constexpr int kCarrierLimits = 16;
constexpr int kWorkers = kCarrierThreads / kWarpSize - 1; // warp 0 looks
constexpr int kPutSlots = kWarpSize;                      // puts under way in a block: one lane looks at each
constexpr int kStages = 4;                                // of a worker
constexpr int kStageBytes = 3584;
constexpr int kPieceBytes = 8 * kStageBytes;              // the latest store of a piece is waited for: worth several stages
// At most, of a put that goes before others. Questions have some 10 KB, a chunk of rows many times that.
constexpr int64_t kSmallPutBytes = kPieceBytes / 2;
constexpr int kCarrierSharedBytes = kWorkers * kStages * kStageBytes; // dynamic, with bulk copies
static_assert(kCarrierSharedBytes <= kBulkSharedBytes);

// Entries that the kernel of the call uses: all but those of blocks that it does not have.
struct PutEntries {
  const CarrierParams &p;
  __device__ int64_t count() const {
    if (!p.shape.has_cells()) return p.shape.num_puts();
    return 3 * int64_t(p.num_ranks) + int64_t(kNumNodeFlags) * 2 * p.shape.num_nodes * p.call_blocks;
  }
  __device__ Put &at(int64_t i) const {
    Put *all = reinterpret_cast<Put *>(p.arena + p.shape.puts());
    const int64_t first = 3 * int64_t(p.num_ranks);
    if (i < first || !p.shape.has_cells()) return all[i];
    i -= first;
    return all[first + i / p.call_blocks * kMaxNodeBlocks + i % p.call_blocks];
  }
};

struct CarrierShared {
  struct Slot {
    Put put;
    uint64_t range; // number of its first piece << 32 | pieces; one word, so that a search never sees half of a new one
    uint32_t left;  // pieces that are not done; 0: free
  } slots[kPutSlots];
  BulkBarrier bars[kWorkers][kStages];
  // By queue, of large puts and of small ones, whose numbers begin at first_of: pieces that there are, that were taken.
  uint32_t published[2], next[2];
  uint32_t has_ended; // no more will come
  __device__ static uint32_t first_of(int queue) { return uint32_t(queue) << 31; }
};

// A worker's means to move bytes.
struct Mover {
  char *stages;      // null: no bulk copies
  BulkBarrier *bars; // [kStages]
  unsigned parity = 0;

  // Whole warp; bytes are at `dst` for lane 0 when it returns, and for whom it tells. `dst` may be on a peer.
  __device__ void copy(char *dst, const char *src, int64_t bytes) {
    const int lane = threadIdx.x % kWarpSize;
    if ((uint64_t(dst) | uint64_t(src) | uint64_t(bytes)) % 16) units<uint64_t>(dst, src, bytes);
    else if (stages) bulk(dst, src, int(bytes), lane);
    else warp_copy(dst, src, bytes, lane);
    __syncwarp(); // all lanes' bytes, before what lane 0 does next
  }
  // In units that all of it is a multiple of; the last ones first if `is_backwards`.
  template <class Unit> __device__ static void units(char *dst, const char *src, int64_t bytes, bool is_backwards = false) {
    const int64_t count = bytes / int64_t(sizeof(Unit));
    for (int64_t i = threadIdx.x % kWarpSize; i < count; i += kWarpSize) {
      const int64_t at = is_backwards ? count - 1 - i : i;
      reinterpret_cast<Unit *>(dst)[at] = reinterpret_cast<const Unit *>(src)[at];
    }
  }

 private:
  // One lane issues everything: groups belong to threads.
  __device__ void bulk(char *dst, const char *src, int bytes, int lane) {
    if (lane != 0) return;
    const int parts = (bytes + kStageBytes - 1) / kStageBytes;
    auto size = [&](int part) { return unsigned(min(kStageBytes, bytes - part * kStageBytes)); };
    auto load = [&](int part) {
      const int stage = part % kStages;
      bulk_expect(bars + stage, size(part));
      bulk_load(stages + stage * kStageBytes, src + int64_t(part) * kStageBytes, size(part), bars + stage);
    };
    // What is loaded was written through the generic proxy (but for rows), and what is stored over was read through it.
    bulk_fence();
    for (int part = 0; part < min(parts, kStages); ++part) load(part);
    for (int part = 0; part < parts; ++part) {
      const int stage = part % kStages;
      bulk_wait_loaded(bars + stage, parity >> stage & 1);
      parity ^= 1u << stage;
      bulk_store(dst + int64_t(part) * kStageBytes, stages + stage * kStageBytes, size(part));
      bulk_commit();
      if (part == 0 || part - 1 + kStages >= parts) continue;
      bulk_wait_read<1>(); // all stores but this one no longer read their stages
      load(part - 1 + kStages);
    }
    bulk_wait_stored(); // complete, and in the generic proxy's order, before the word
  }
};

__device__ __forceinline__ void raise_word(uint64_t &word, uint64_t value) {
  // Publishes the bytes of the put, all pieces of which this thread has acquired, and that what the call read is read.
  SystemWord<uint64_t>(word).store(value, cuda::memory_order_release);
}

inline __device__ int pieces_of(int64_t bytes) { return bytes > kPieceBytes ? int((bytes + kPieceBytes - 1) / kPieceBytes) : 1; }

// Warp 0. Returns when the call has ended and all its puts are published, or when nothing came for too long.
template <class Transport> __device__ void look(const CarrierParams &p, CarrierShared &s, const Transport &transport, uint64_t call) {
  const int lane = threadIdx.x % kWarpSize;
  const Control &control = *reinterpret_cast<const Control *>(p.arena + p.shape.control());
  const PutEntries entries{p};
  const int64_t count = entries.count();
  uint32_t published[2] = {s.first_of(0), s.first_of(1)};
  uint64_t active = now_ns();
  for (uint32_t number_of_look = 0;; ++number_of_look) {
    // Before the look: whatever the call posted is then found in it.
    const bool has_ended =
        DeviceWord<uint64_t>(const_cast<uint64_t &>(control.calls_ended)).load(cuda::memory_order_acquire) >= call;
    bool has_found = false, is_postponed = false;
    for (int64_t first = blockIdx.x; first < count; first += int64_t(kWarpSize) * p.num_blocks) {
      const int64_t i = first + int64_t(lane) * p.num_blocks;
      bool goes = false;
      Put put{};
      if (i < count) {
        Put &entry = entries.at(i);
        // Acquires the entry and the bytes that it names.
        const uint64_t number = DeviceWord<uint64_t>(entry.posted).load(cuda::memory_order_acquire);
        if (number != entry.done) {
          goes = transport.takes(i);
          is_postponed |= !goes;
          // The next post may be there already: it is another number.
          if (goes) put = entry, entry.done = number;
        }
      }
      has_found |= goes;
      if (goes && transport.at_once(put)) goes = false;
      for (unsigned left = __ballot_sync(kFullWarp, goes); left;) {
        const int from = transport.pick(left, number_of_look);
        left &= ~(1u << from);
        unsigned free = 0;
        const uint64_t full = now_ns();
        while (true) { // stores need nobody to go on; a put over a network may hang with a peer or a card that is gone
          // Acquires that the workers have read the slot's put.
          free = __ballot_sync(kFullWarp, BlockWord<uint32_t>(s.slots[lane].left).load(cuda::memory_order_acquire) == 0);
          if (free) break;
          if (__any_sync(kFullWarp, int64_t(now_ns() - full) > int64_t(p.limit_ns) * kCarrierLimits)) return;
          __nanosleep(100);
        }
        __syncwarp(); // what the searching lanes acquired, before another lane writes the slot
        CarrierShared::Slot &slot = s.slots[__ffs(free) - 1];
        const int pieces = __shfl_sync(kFullWarp, transport.pieces(put), from);
        const int queue = __shfl_sync(kFullWarp, int(put.bytes <= kSmallPutBytes), from);
        const uint32_t first = queue ? published[1] : published[0];
        if (lane == from) {
          slot.put = put;
          BlockWord<uint64_t>(slot.range).store(uint64_t(first) << 32 | uint32_t(pieces), cuda::memory_order_relaxed);
          BlockWord<uint32_t>(slot.left).store(uint32_t(pieces), cuda::memory_order_relaxed);
          // Publishes the slot, and what this lane acquired with the entry.
          BlockWord<uint32_t>(s.published[queue]).store(first + pieces, cuda::memory_order_release);
        }
        // Not by index, which would take the array out of registers.
        published[0] += queue ? 0 : pieces, published[1] += queue ? pieces : 0;
        __syncwarp(); // the slot is taken, for all lanes' next search
      }
    }
    has_found = __any_sync(kFullWarp, has_found), is_postponed = __any_sync(kFullWarp, is_postponed);
    if (has_found) {
      JAX_EP_STAMP(kLooked);
      active = now_ns();
      continue;
    }
    if (__all_sync(kFullWarp, has_ended) && !is_postponed) return;
    // A call's kernel that is gone has told nobody. (Signed: the clock may be read a little back.)
    if (__any_sync(kFullWarp, int64_t(now_ns() - active) > int64_t(p.limit_ns) * kCarrierLimits)) return;
  }
}

// The other warps. Returns when no piece is left and none will come.
template <class Transport> __device__ void work(CarrierShared &s, Transport &transport, Mover &mover) {
  const int lane = threadIdx.x % kWarpSize;
  while (true) {
    uint32_t number = 0;
    bool is_there = false;
    while (true) { // until the looking warp ends, and that has its limits
      bool has_ended = false;
      if (lane == 0) {
        // Before `published`, which is then its last value.
        has_ended = BlockWord<uint32_t>(s.has_ended).load(cuda::memory_order_acquire) != 0;
        for (int queue = 1; queue >= 0 && !is_there; --queue) {
          BlockWord<uint32_t> next(s.next[queue]), published(s.published[queue]);
          number = next.load(cuda::memory_order_relaxed);
          // Acquires the piece's slot. Another worker may take it first: then this one looks again.
          while (int32_t(published.load(cuda::memory_order_acquire) - number) > 0 && !is_there)
            is_there = next.compare_exchange_weak(number, number + 1, cuda::memory_order_relaxed);
        }
      }
      is_there = __shfl_sync(kFullWarp, int(is_there), 0) != 0;
      if (is_there) break;
      if (__shfl_sync(kFullWarp, int(has_ended), 0)) return;
      __nanosleep(50);
    }
    number = __shfl_sync(kFullWarp, number, 0);
    __syncwarp(); // what lane 0 acquired, for all lanes
    const uint64_t range = BlockWord<uint64_t>(s.slots[lane].range).load(cuda::memory_order_relaxed);
    const unsigned found = __ballot_sync(kFullWarp, number - uint32_t(range >> 32) < uint32_t(range));
    CarrierShared::Slot &slot = s.slots[__ffs(found) - 1]; // it is taken until this piece is done
    const Put put = slot.put;
    transport.carry(put, int(number - uint32_t(BlockWord<uint64_t>(slot.range).load(cuda::memory_order_relaxed) >> 32)), mover);
    __syncwarp(); // all lanes have read the slot, and have stored their bytes
    // Releases this piece's bytes to the worker that raises the word, and the slot; acquires all others' bytes.
    if (lane == 0 && BlockWord<uint32_t>(slot.left).fetch_sub(1, cuda::memory_order_acq_rel) == 1) {
      transport.complete(put);
      JAX_EP_STAMP_LANE(kPutDone, int((put.bytes + 1023) / 1024));
    }
  }
}

// All threads of a carrier. A transport has
//   takes(entry)            now, or at a later look? One lane.
//   at_once(put)            raises the word of a put that needs no worker; false: it needs one. One lane.
//   pick(lanes, look)       which of these lanes' puts is next; whole warp
//   pieces(put)             one lane
//   carry(put, piece, mover) bytes of one piece; whole warp
//   complete(put)           the word, after all pieces; one lane
template <class Transport> __device__ __forceinline__ void carry(const CarrierParams &p, Transport transport) {
  extern __shared__ __align__(128) char stages[];
  __shared__ CarrierShared s;
  __shared__ uint64_t s_call;
  JAX_EP_STAMP_BEGIN_CARRIER(p);
  // The number of the call that this carrier is for: kernels of one stream count it. Other carriers had other blocks.
  uint64_t *begun = reinterpret_cast<uint64_t *>(p.arena + p.shape.carried());
  for (int i = blockIdx.x + threadIdx.x * p.num_blocks; i < kMaxNodeBlocks; i += kCarrierThreads * p.num_blocks) {
    const uint64_t call = ++begun[i];
    if (threadIdx.x == 0) s_call = call;
  }
  const int warp = threadIdx.x / kWarpSize;
  if (threadIdx.x < kPutSlots) s.slots[threadIdx.x].range = 0, s.slots[threadIdx.x].left = 0;
  if (threadIdx.x < 2) s.published[threadIdx.x] = s.next[threadIdx.x] = s.first_of(threadIdx.x);
  if (threadIdx.x == 0) s.has_ended = 0;
  if (p.use_bulk && threadIdx.x < kWorkers * kStages) bulk_init(&s.bars[0][0] + threadIdx.x);
  __syncthreads(); // all of `s`
  if (warp == 0) {
    look(p, s, transport, s_call);
    __syncwarp();
    JAX_EP_STAMP(kEnd);
    if (threadIdx.x == 0) BlockWord<uint32_t>(s.has_ended).store(1, cuda::memory_order_release); // all pieces are published
    return;
  }
  Mover mover{p.use_bulk ? stages + (warp - 1) * kStages * kStageBytes : nullptr, s.bars[warp - 1]};
  work(s, transport, mover);
}

// A launch of a carrier's kernel, and what it asks for.
inline bool is_carrier_valid(const CarrierParams &p) {
  return p.num_blocks >= 1 && p.num_blocks <= kMaxCarrierBlocks && p.call_blocks <= kMaxNodeBlocks;
}
inline int carrier_shared_bytes(const CarrierParams &p) { return p.use_bulk ? kCarrierSharedBytes : 0; }
// Asking or allowing loads the kernel.
inline cudaError_t load_carrier(void (*kernel)(CarrierParams)) {
  int device = 0;
  const cudaError_t e = cudaGetDevice(&device);
  return e ? e : load_kernel(kernel, has_bulk_copies(device));
}

} // namespace jax_ep
