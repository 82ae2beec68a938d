// The test transport: puts between ranks of one host, by stores to arenas that are reachable anyway. With a delay it does
// what networks may do: it leaves puts for later, does them in any order, late, and their bytes in any order; only a put's
// own word always comes after its bytes.
#include "cuda/kernels/carrier.cuh"

namespace jax_ep {
namespace {

struct Stores {
  const CarrierParams &p;
  uint32_t seed;

  __device__ static uint32_t mix(uint32_t x) {
    x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu;
    return x ^ x >> 16;
  }
  __device__ bool takes(int64_t entry) const {
    return !p.max_delay_ns || mix(uint32_t(now_ns()) ^ uint32_t(entry) * 0x9e3779b9u) % 4 == 0;
  }
  // Turned round, and half of the time backwards.
  __device__ int pick(int j, int found, uint32_t look) const {
    if (!p.max_delay_ns) return j;
    const uint32_t random = mix(look * 0x9e3779b9u + uint32_t(found));
    const int turned = (j + int(random % unsigned(found))) % found;
    return random & 0x10000 ? found - 1 - turned : turned;
  }
  template <class Unit> __device__ void copy(char *dst, const char *src, int64_t bytes) const {
    const int64_t units = bytes / int64_t(sizeof(Unit));
    for (int64_t i = threadIdx.x; i < units; i += kCarrierThreads) {
      const int64_t at = p.max_delay_ns ? units - 1 - i : i; // the last ones first
      reinterpret_cast<Unit *>(dst)[at] = reinterpret_cast<const Unit *>(src)[at];
    }
  }
  __device__ void carry(const Put &put) {
    char *peer = p.peers[put.peer].arena, *dst = peer + put.dst;
    const char *src = p.arena + put.src;
    seed = mix(seed + uint32_t(put.value) + uint32_t(put.peer) * 0x85ebca6bu);
    if (p.max_delay_ns && seed % 2) {
      const uint64_t start = now_ns(), delay = mix(seed) % p.max_delay_ns;
      while (int64_t(now_ns() - start) < int64_t(delay)) {
      }
    }
    if ((uint64_t(put.src) | uint64_t(put.dst) | uint64_t(put.bytes)) % 16 == 0) vectors(dst, src, put.bytes);
    else copy<uint64_t>(dst, src, put.bytes);
    __syncthreads(); // all threads' bytes, before the word, whose release covers them
    if (threadIdx.x == 0)
      SystemWord<uint64_t>(*reinterpret_cast<uint64_t *>(peer + put.signal)).store(put.value, cuda::memory_order_release);
  }

 private:
  // Several vectors of each thread under way.
  __device__ void vectors(char *dst, const char *src, int64_t bytes) const {
    constexpr int kUnroll = 4, kStep = kCarrierThreads * 16;
    if (p.max_delay_ns) return copy<int4>(dst, src, bytes);
    for (int64_t at = int64_t(threadIdx.x) * 16; at < bytes; at += kUnroll * kStep) {
      int4 v[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i)
        if (at + i * kStep < bytes) v[i] = load_row(src + at + i * kStep);
#pragma unroll
      for (int i = 0; i < kUnroll; ++i)
        if (at + i * kStep < bytes) store_row(dst + at + i * kStep, v[i]);
    }
  }
};

__global__ void __launch_bounds__(kCarrierThreads, 1) test_carrier_kernel(const __grid_constant__ CarrierParams p) {
  carry(p, Stores{p, uint32_t(p.arena[0]) + blockIdx.x * 977u});
}

} // namespace

cudaError_t launch_test_carrier(const CarrierParams &p, cudaStream_t stream) {
  if (p.num_blocks < 1 || p.num_blocks > kMaxCarrierBlocks || p.call_blocks > kMaxNodeBlocks) return cudaErrorInvalidConfiguration;
  test_carrier_kernel<<<p.num_blocks, kCarrierThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t load_test_carrier() {
  cudaFuncAttributes attributes; // asking loads the kernel
  return cudaFuncGetAttributes(&attributes, test_carrier_kernel);
}

} // namespace jax_ep
