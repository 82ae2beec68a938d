// The carrier over NVSHMEM: where the peer's memory can be reached, by NVLink or on one GPU, stores as NVSHMEM's own put
// would do them, but by the copy engine; over a network NVSHMEM's put with signal.
//
// Arenas lie at one place of the symmetric heap on all ranks, so an address of the own arena names the peer's.
#include <nvshmem.h>
#include <nvshmemx.h>

#include "cuda/kernels/carrier.cuh"
#include "cuda/nvshmem/carrier.h"

namespace jax_ep {
namespace {

struct Puts {
  const CarrierParams &p;

  __device__ char *reach(const Put &put) const { // the peer's arena; null: over a network
    return static_cast<char *>(nvshmem_ptr(p.arena, p.pes[put.peer]));
  }
  __device__ bool takes(int64_t) const { return true; }
  __device__ int pick(unsigned lanes, uint32_t) const { return __ffs(lanes) - 1; }
  __device__ bool at_once(const Put &put) const {
    char *peer = put.bytes ? nullptr : reach(put);
    if (!peer) return false;
    raise_word(*reinterpret_cast<uint64_t *>(peer + put.signal), put.value);
    return true;
  }
  __device__ int pieces(const Put &put) const { return reach(put) ? pieces_of(put.bytes) : 1; }
  __device__ void carry(const Put &put, int piece, Mover &mover) const {
    if (char *peer = reach(put)) {
      const int64_t at = int64_t(piece) * kPieceBytes;
      return mover.copy(peer + put.dst + at, p.arena + put.src + at, min(put.bytes - at, int64_t(kPieceBytes)));
    }
    uint64_t *word = reinterpret_cast<uint64_t *>(p.arena + put.signal);
    const int pe = p.pes[put.peer];
    __threadfence_system(); // for a network card, which reads what the call's kernel published to this device alone
    // Does not wait until the bytes have left: nobody changes them before the peer has answered (docs/memory_order.md).
    if (put.bytes) {
      nvshmemx_putmem_signal_nbi_warp(p.arena + put.dst, p.arena + put.src, size_t(put.bytes), word, put.value,
                                      NVSHMEM_SIGNAL_SET, pe);
    } else if (threadIdx.x % kWarpSize == 0) {
      nvshmemx_signal_op(word, put.value, NVSHMEM_SIGNAL_SET, pe);
    }
  }
  __device__ void complete(const Put &put) const {
    if (char *peer = reach(put)) raise_word(*reinterpret_cast<uint64_t *>(peer + put.signal), put.value);
  }
};

__global__ void __launch_bounds__(kCarrierThreads, 1) nvshmem_carrier_kernel(const __grid_constant__ CarrierParams p) {
  carry(p, Puts{p});
  // What each warp put has arrived when the kernel is over: jax_ep.reset() clears words after that.
  if (threadIdx.x % kWarpSize == 0) nvshmem_quiet();
}

} // namespace

cudaError_t launch_nvshmem_carrier(const CarrierParams &p, cudaStream_t stream) {
  if (!is_carrier_valid(p) || !p.pes) return cudaErrorInvalidConfiguration;
  nvshmem_carrier_kernel<<<p.num_blocks, kCarrierThreads, carrier_shared_bytes(p), stream>>>(p);
  return cudaGetLastError();
}

cudaError_t load_nvshmem_carrier() { return load_carrier(nvshmem_carrier_kernel); }

} // namespace jax_ep
