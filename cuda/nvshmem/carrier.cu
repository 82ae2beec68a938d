// The carrier over NVSHMEM: a put is NVSHMEM's put with signal, by NVLink, or by the network where there is none.
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

  __device__ bool takes(int64_t) const { return true; }
  __device__ int pick(int j, int, uint32_t) const { return j; }
  // Does not wait until the bytes have left: nobody changes them before the peer has answered (docs/memory_order.md).
  __device__ void carry(const Put &put) const {
    const int pe = p.pes[put.peer];
    uint64_t *word = reinterpret_cast<uint64_t *>(p.arena + put.signal);
    // For a network card, which reads what the call's kernel published to this device alone; and for a word without bytes,
    // which is a bare store over NVLink: whoever reads it may store over what was read here before.
    __threadfence_system();
    if (put.bytes) {
      nvshmemx_putmem_signal_nbi_block(p.arena + put.dst, p.arena + put.src, size_t(put.bytes), word, put.value,
                                       NVSHMEM_SIGNAL_SET, pe);
    } else {
      __syncthreads(); // all threads have read the entry, which the word may free
      if (threadIdx.x == 0) nvshmemx_signal_op(word, put.value, NVSHMEM_SIGNAL_SET, pe);
    }
  }
};

__global__ void __launch_bounds__(kCarrierThreads, 1) nvshmem_carrier_kernel(const __grid_constant__ CarrierParams p) {
  carry(p, Puts{p});
  // What this block put has arrived when the kernel is over: jax_ep.reset() clears words after that.
  if (threadIdx.x == 0) nvshmem_quiet();
}

} // namespace

cudaError_t launch_nvshmem_carrier(const CarrierParams &p, cudaStream_t stream) {
  if (p.num_blocks < 1 || p.num_blocks > kMaxCarrierBlocks || p.call_blocks > kMaxNodeBlocks || !p.pes)
    return cudaErrorInvalidConfiguration;
  nvshmem_carrier_kernel<<<p.num_blocks, kCarrierThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t load_nvshmem_carrier() {
  cudaFuncAttributes attributes; // asking loads the kernel
  return cudaFuncGetAttributes(&attributes, nvshmem_carrier_kernel);
}

} // namespace jax_ep
