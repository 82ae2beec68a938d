// FP8 by blocks of 128 channels, bit for bit as jax_ep/quantize.py defines it. No division and no contraction of
// floats, so that every backend comes to the same bits.
#pragma once

#include <cuda_fp8.h>

#include "cuda/device/copy.cuh"

namespace jax_ep {

struct Fp8Scale {
  float scale;    // what the receiver multiplies with
  float inverse;  // what the sender multiplies with
  uint8_t e8m0;   // kFp8Ue8m0: the scale as it travels
};

// About 448 / amax, never too large; `_inverse` in jax_ep/quantize.py has the definition, with inv_m = 0x7fffffff // m16.
// Here m = m16 * 2^-15, and inv_m is the largest integer whose product with m is less than 2^16. The reciprocal only
// guesses it: with an error below 2^-20 that is inv_m or one less, and the rest, which is exact, tells which.
__device__ __forceinline__ float fp8_inverse(float amax) {
  const uint32_t bits = __float_as_uint(amax);
  const float m = __fadd_rn(__uint_as_float((bits & 0x7fff00) | 0x3f800000), 0x1p-15f);
  float guess;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(m));
  float inv_m = __fsub_rn(__fadd_rd(__fmaf_rn(guess, 0x1p16f, -0x1p-4f), 0x1p23f), 0x1p23f); // rounded down
  const float rest = __fmaf_rn(-inv_m, m, 0x1p16f);
  if (rest > m) inv_m = __fadd_rn(inv_m, 1.f);
  const float product = __fmul_rn(inv_m, 7.f); // 19 bits: exact
  return __uint_as_float(__float_as_uint(product) + (117u << 23) - (bits & 0x7f800000));
}

// `amax`: largest finite magnitude of the block.
__device__ __forceinline__ Fp8Scale fp8_scale(float amax, Quantize kind) {
  amax = fmaxf(amax, 448.f * 0x1p-110f);
  const float scale = __fmul_rn(amax, 1.f / 448.f);
  if (kind == Quantize::kFp8Ue8m0) {
    const uint32_t bits = __float_as_uint(scale);
    const uint32_t exponent = (bits >> 23) + ((bits & 0x7fffff) != 0);
    return {__uint_as_float(exponent << 23), __uint_as_float((254 - exponent) << 23), uint8_t(exponent)};
  }
  return {scale, fp8_inverse(amax), 0};
}

// One or two values in a register: their magnitudes, 0 for an infinite one, the larger of two (NaN gives way).
template <DType kType> struct Packed {
  using type = float;
  __device__ static float magnitude(float v) { return fabsf(v); }
  __device__ static float finite(float m) { return m == INFINITY ? 0.f : m; }
  __device__ static float larger(float a, float b) { return fmaxf(a, b); }
  __device__ static float largest(float v) { return v; }
};

template <class Pair> struct PackedPair {
  using type = Pair;
  __device__ static Pair magnitude(Pair v) { return __habs2(v); }
  __device__ static Pair finite(Pair m) {
    uint32_t &bits = reinterpret_cast<uint32_t &>(m);
    bits &= ~__heq2_mask(m, Pair{infinity(m), infinity(m)});
    return m;
  }
  __device__ static Pair larger(Pair a, Pair b) { return __hmax2(a, b); }
  __device__ static float largest(Pair v) { return fmaxf(__low2float(v), __high2float(v)); }

 private:
  __device__ static __nv_bfloat16 infinity(__nv_bfloat162) { return __ushort_as_bfloat16(0x7f80); }
  __device__ static __half infinity(__half2) { return __ushort_as_half(0x7c00); }
};
template <> struct Packed<DType::kBF16> : PackedPair<__nv_bfloat162> {};
template <> struct Packed<DType::kF16> : PackedPair<__half2> {};

constexpr int kQuantVectors = 2;                          // of 16 bytes: what a lane quantises at a time
constexpr int kQuantUnit = kWarpSize * 16 * kQuantVectors; // ... and a warp, in bytes

// A lane's part of a row: neighbouring channels, so many that few lanes repeat what is done once per block.
template <DType kType> struct QuantLane {
  static constexpr int kVectors = kQuantVectors, kBytes = 16 * kVectors;
  static constexpr int kChannels = kVectors * Payload<kType>::kLanes;
  static constexpr int kPerBlock = 128 / kChannels; // neighbouring lanes that share a block
  static constexpr int kWords = kChannels / 4;      // of e4m3
  int4 v[kVectors];

  __device__ __forceinline__ void unpack(float *f) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) Payload<kType>::unpack(v[i], f + i * Payload<kType>::kLanes);
  }

  // Largest finite magnitude of the block, NaN where there is nothing but NaN. All lanes of the warp call it together.
  __device__ __forceinline__ float block_amax() const {
    const float amax = block_max([](Value m) { return m; });
    if (!__any_sync(kFullWarp, amax == INFINITY)) return amax;
    return block_max([](Value m) { return Packed<kType>::finite(m); }); // rare
  }

  // To e4m3, with the scale of the block. All lanes of the warp call it together.
  __device__ __forceinline__ Fp8Scale quantize(Quantize kind, uint32_t (&words)[kWords]) const {
    const Fp8Scale scale = fp8_scale(block_amax(), kind);
    float f[kChannels];
    unpack(f);
#pragma unroll
    for (int i = 0; i < kChannels; ++i) f[i] = __fmul_rn(f[i], scale.inverse); // any NaN: the positive one
    // The conversion saturates infinities; finite values are within +-448. NaN becomes 0x7f.
    auto pair = [&](int i) {
      return uint32_t(__nv_cvt_float2_to_fp8x2(make_float2(f[i], f[i + 1]), __NV_SATFINITE, __NV_E4M3));
    };
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = pair(4 * i) | pair(4 * i + 2) << 16;
    return scale;
  }

  __device__ static __forceinline__ void store(char *q, const uint32_t (&words)[kWords]) {
    if constexpr (kWords == 4) *reinterpret_cast<uint4 *>(q) = make_uint4(words[0], words[1], words[2], words[3]);
    else *reinterpret_cast<uint2 *>(q) = make_uint2(words[0], words[1]);
  }

 private:
  using Value = typename Packed<kType>::type;

  template <class Part> __device__ __forceinline__ float block_max(Part part) const {
    constexpr int kCount = kBytes / sizeof(Value);
    Value most[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) most[i] = part(Packed<kType>::magnitude(reinterpret_cast<const Value *>(v)[i]));
#pragma unroll
    for (int n = kCount / 2; n; n /= 2)
#pragma unroll
      for (int i = 0; i < n; ++i) most[i] = Packed<kType>::larger(most[i], most[i + n]);
#pragma unroll
    for (int step = kPerBlock / 2; step; step /= 2) {
      const unsigned other = __shfl_xor_sync(kFullWarp, reinterpret_cast<const unsigned &>(most[0]), step);
      most[0] = Packed<kType>::larger(most[0], reinterpret_cast<const Value &>(other));
    }
    return Packed<kType>::largest(most[0]);
  }
};

// One warp: `channels` (a multiple of 128) of a row to e4m3, and a scale for each 128 of them. All pointers may be to
// shared or global memory; `x` and `q` are aligned to 16 bytes.
template <DType kType>
__device__ __forceinline__ void warp_quantize(const char *x, int channels, char *q, char *scales, Quantize kind) {
  using Lane = QuantLane<kType>;
  const int lane = threadIdx.x % kWarpSize;
  for (int base = 0; base < channels; base += kWarpSize * Lane::kChannels) {
    const int channel = base + lane * Lane::kChannels; // lanes of a block are all inside the row, or all outside
    const bool is_inside = channel < channels;
    const int4 *from = reinterpret_cast<const int4 *>(x + (is_inside ? channel : 0) * dtype_bytes(kType));
    Lane part;
#pragma unroll
    for (int i = 0; i < Lane::kVectors; ++i) part.v[i] = from[i];
    uint32_t words[Lane::kWords];
    const Fp8Scale scale = part.quantize(kind, words);
    if (!is_inside) continue;
    Lane::store(q + channel, words);
    if (lane % Lane::kPerBlock) continue;
    if (kind == Quantize::kFp8) reinterpret_cast<float *>(scales)[channel / 128] = scale.scale;
    else reinterpret_cast<uint8_t *>(scales)[channel / 128] = scale.e8m0;
  }
}

__device__ __forceinline__ void warp_quantize(DType type, const char *x, int channels, char *q, char *scales,
                                              Quantize kind) {
  if (type == DType::kBF16) warp_quantize<DType::kBF16>(x, channels, q, scales, kind);
  else if (type == DType::kF16) warp_quantize<DType::kF16>(x, channels, q, scales, kind);
  else warp_quantize<DType::kF32>(x, channels, q, scales, kind);
}

// 16 bytes of e4m3 as floats.
__device__ __forceinline__ void from_e4m3(int4 v, float *f) {
  const __nv_fp8x2_storage_t *pairs = reinterpret_cast<const __nv_fp8x2_storage_t *>(&v);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const __half2 h(__nv_cvt_fp8x2_to_halfraw2(pairs[i], __NV_E4M3)); // exact
    const float2 g = __half22float2(h);
    f[2 * i] = g.x, f[2 * i + 1] = g.y;
  }
}

} // namespace jax_ep
