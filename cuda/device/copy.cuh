// Moving bytes: 16-byte vectors (every architecture) and bulk copies through shared memory (sm_90 and newer).
//
// All pointers and sizes are multiples of 16 bytes. Nothing here synchronises with other warps.
#pragma once

#include <cstdint>
#include <cuda/ptx>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/layout.h"

namespace jax_ep {

constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kWarpSize = 32;

// ---- vectors ----------------------------------------------------------------------------------------------

// Peers write rows while kernels run, so rows are never read through the non-coherent path (no __ldg).
__device__ __forceinline__ int4 load_row(const char *p) { return __ldcs(reinterpret_cast<const int4 *>(p)); }
__device__ __forceinline__ void store_row(char *p, int4 v) { __stcs(reinterpret_cast<int4 *>(p), v); }

// One warp copies `bytes`, four vectors per lane in flight.
__device__ __forceinline__ void warp_copy(char *dst, const char *src, int64_t bytes, int lane) {
  constexpr int kUnroll = 4;
  for (int64_t at = int64_t(lane) * 16; at < bytes; at += kUnroll * kWarpSize * 16) {
    int4 v[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i)
      if (at + i * kWarpSize * 16 < bytes) v[i] = load_row(src + at + i * kWarpSize * 16);
#pragma unroll
    for (int i = 0; i < kUnroll; ++i)
      if (at + i * kWarpSize * 16 < bytes) store_row(dst + at + i * kWarpSize * 16, v[i]);
  }
}

__device__ __forceinline__ void warp_zero(char *dst, int64_t bytes, int lane) {
  for (int64_t at = int64_t(lane) * 16; at < bytes; at += kWarpSize * 16) store_row(dst + at, int4{0, 0, 0, 0});
}

// ---- payload arithmetic: 16 bytes of a row as floats --------------------------------------------------------

// `add_pair`: the sum of two rows, as f32 sums that start at +0 and are rounded once give it. The packed addition of
// 16-bit types rounds the exact sum; f32 holds that sum exactly, unless one term is far below half a unit of the other
// and both ways give the other one.

template <DType kType> struct Payload;

template <> struct Payload<DType::kF32> {
  static constexpr int kLanes = 4;
  static constexpr bool kCanAddPairs = false;
  __device__ static int4 add_pair(int4 a, int4) { return a; } // never called
  __device__ static void unpack(int4 v, float *f) {
    const float *s = reinterpret_cast<const float *>(&v);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) f[i] = s[i];
  }
  __device__ static int4 pack(const float *f) {
    int4 v;
    float *d = reinterpret_cast<float *>(&v);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) d[i] = f[i];
    return v;
  }
};

template <> struct Payload<DType::kBF16> {
  static constexpr int kLanes = 8;
  static constexpr bool kCanAddPairs = true;
  __device__ static int4 add_pair(int4 a, int4 b) {
    __nv_bfloat162 *p = reinterpret_cast<__nv_bfloat162 *>(&a);
    const __nv_bfloat162 *q = reinterpret_cast<const __nv_bfloat162 *>(&b);
#pragma unroll
    for (int i = 0; i < 4; ++i) p[i] = __hadd2_rn(__hadd2_rn(p[i], __float2bfloat162_rn(0.f)), q[i]); // + 0: -0 and -0 give +0
    return a;
  }
  __device__ static void unpack(int4 v, float *f) {
    const uint32_t *s = reinterpret_cast<const uint32_t *>(&v);
#pragma unroll
    for (int i = 0; i < 4; ++i) // a value is the upper half of its float
      f[2 * i] = __uint_as_float(s[i] << 16), f[2 * i + 1] = __uint_as_float(s[i] & 0xffff0000);
  }
  __device__ static int4 pack(const float *f) {
    int4 v;
    __nv_bfloat162 *d = reinterpret_cast<__nv_bfloat162 *>(&v);
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] = __floats2bfloat162_rn(f[2 * i], f[2 * i + 1]);
    return v;
  }
};

template <> struct Payload<DType::kF16> {
  static constexpr int kLanes = 8;
  static constexpr bool kCanAddPairs = true;
  __device__ static int4 add_pair(int4 a, int4 b) {
    __half2 *p = reinterpret_cast<__half2 *>(&a);
    const __half2 *q = reinterpret_cast<const __half2 *>(&b);
#pragma unroll
    for (int i = 0; i < 4; ++i) p[i] = __hadd2_rn(__hadd2_rn(p[i], __float2half2_rn(0.f)), q[i]); // + 0: -0 and -0 give +0
    return a;
  }
  __device__ static void unpack(int4 v, float *f) {
    const __half2 *s = reinterpret_cast<const __half2 *>(&v);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 g = __half22float2(s[i]);
      f[2 * i] = g.x, f[2 * i + 1] = g.y;
    }
  }
  __device__ static int4 pack(const float *f) {
    int4 v;
    __half2 *d = reinterpret_cast<__half2 *>(&v);
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] = __floats2half2_rn(f[2 * i], f[2 * i + 1]);
    return v;
  }
};

// acc += v, in f32.
template <DType kType> __device__ __forceinline__ void add_row(float *acc, int4 v) {
  float f[Payload<kType>::kLanes];
  Payload<kType>::unpack(v, f);
#pragma unroll
  for (int i = 0; i < Payload<kType>::kLanes; ++i) acc[i] = __fadd_rn(acc[i], f[i]);
}

// acc += weight * v; multiply and add are rounded separately, as the reference's rounding tree says.
template <DType kType> __device__ __forceinline__ void add_row(float *acc, int4 v, float weight) {
  float f[Payload<kType>::kLanes];
  Payload<kType>::unpack(v, f);
#pragma unroll
  for (int i = 0; i < Payload<kType>::kLanes; ++i) acc[i] = __fadd_rn(acc[i], __fmul_rn(weight, f[i]));
}

// ---- bulk copies (asynchronous proxy) -----------------------------------------------------------------------
// Compiled for every architecture, usable on sm_90 and newer: the host chooses the kernel by device.

struct BulkBarrier { // one per warp, in shared memory
  uint64_t word;
};

__device__ __forceinline__ void bulk_init(BulkBarrier *bar) {
#if __CUDA_ARCH__ >= 900
  cuda::ptx::mbarrier_init(&bar->word, 1);
  // The barrier is initialised through the generic proxy and completed by the asynchronous one.
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// One lane declares how many bytes the coming loads bring ...
__device__ __forceinline__ void bulk_expect(BulkBarrier *bar, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
  cuda::ptx::mbarrier_arrive_expect_tx(cuda::ptx::sem_release, cuda::ptx::scope_cta, cuda::ptx::space_shared,
                                       &bar->word, bytes);
#endif
}

// ... any lane starts them ...
__device__ __forceinline__ void bulk_load(char *shared, const char *global, unsigned bytes, BulkBarrier *bar) {
#if __CUDA_ARCH__ >= 900
  cuda::ptx::cp_async_bulk(cuda::ptx::space_cluster, cuda::ptx::space_global, shared, global, bytes, &bar->word);
#endif
}

// ... and every lane waits. This wait is for the chip's own copy engine, not for a peer, so it needs no limit:
// the address was checked against its buffer before.
__device__ __forceinline__ void bulk_wait_loaded(BulkBarrier *bar, unsigned parity) {
#if __CUDA_ARCH__ >= 900
  while (!cuda::ptx::mbarrier_try_wait_parity(&bar->word, parity)) {
  }
#endif
}

__device__ __forceinline__ void bulk_store(char *global, const char *shared, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
  cuda::ptx::cp_async_bulk(cuda::ptx::space_global, cuda::ptx::space_shared, global, shared, bytes);
#endif
}

// The same for what is touched once: its lines leave the L2 cache before others. `policy`: bulk_once().
__device__ __forceinline__ uint64_t bulk_once() {
  uint64_t policy = 0;
#if __CUDA_ARCH__ >= 900
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}
__device__ __forceinline__ void bulk_load(char *shared, const char *global, unsigned bytes, BulkBarrier *bar, uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
               :: "r"(uint32_t(__cvta_generic_to_shared(shared))), "l"(__cvta_generic_to_global(global)), "r"(bytes),
                  "r"(uint32_t(__cvta_generic_to_shared(&bar->word))), "l"(policy) : "memory");
#endif
}
__device__ __forceinline__ void bulk_store(char *global, const char *shared, unsigned bytes, uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;"
               :: "l"(__cvta_generic_to_global(global)), "r"(uint32_t(__cvta_generic_to_shared(shared))), "r"(bytes), "l"(policy)
               : "memory");
#endif
}

__device__ __forceinline__ void bulk_commit() {
#if __CUDA_ARCH__ >= 900
  cuda::ptx::cp_async_bulk_commit_group();
#endif
}

// The shared memory of this thread's stores may be overwritten, but for its latest `kPending` groups.
template <int kPending = 0> __device__ __forceinline__ void bulk_wait_read() {
#if __CUDA_ARCH__ >= 900
  cuda::ptx::cp_async_bulk_wait_group_read(cuda::ptx::n32_t<kPending>());
#endif
}

// This thread's stores are complete (not only read). The proxy fence that follows lets a later generic release
// of this thread publish them.
__device__ __forceinline__ void bulk_wait_stored() {
#if __CUDA_ARCH__ >= 900
  cuda::ptx::cp_async_bulk_wait_group(cuda::ptx::n32_t<0>());
  asm volatile("fence.proxy.async;" ::: "memory");
#endif
}

// Before bulk-loading what a peer (or this block) wrote through the generic proxy.
__device__ __forceinline__ void bulk_fence() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async;" ::: "memory");
#endif
}

// Before the copy engine refills shared memory that lanes have read, or reads what they have written there. Unlike the
// fence above it does not wait for stores to global memory.
__device__ __forceinline__ void bulk_fence_shared() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

} // namespace jax_ep
