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

// About 448 / amax, never too large; `_inverse` in jax_ep/quantize.py has the definition.
__device__ __forceinline__ float fp8_inverse(float amax) {
  const uint32_t bits = __float_as_uint(amax);
  const uint32_t m16 = (((bits & 0x7fffff) | 0x800000) >> 8) + 1;
  const float product = float(7 * (0x7fffffffu / m16)); // 19 bits: exact
  return __uint_as_float(__float_as_uint(product) + ((117 - (bits >> 23)) << 23));
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

__device__ __forceinline__ float finite_magnitude(float v) { return fabsf(v) < INFINITY ? fabsf(v) : 0.f; }

// One e4m3 byte: saturating, NaN canonical.
__device__ __forceinline__ uint32_t to_e4m3(float v, float inverse) {
  if (isnan(v)) return 0x7f;
  const float q = fminf(fmaxf(__fmul_rn(v, inverse), -448.f), 448.f);
  return __nv_cvt_float_to_fp8(q, __NV_SATFINITE, __NV_E4M3);
}

// A lane's kLanes channels to e4m3, with the scale of its block, which 128 / kLanes neighbouring lanes share. All lanes of
// the warp call it together.
template <int kLanes>
__device__ __forceinline__ Fp8Scale quantize_vector(const float *f, Quantize kind, uint32_t (&words)[kLanes / 4]) {
  float amax = 0.f;
#pragma unroll
  for (int i = 0; i < kLanes; ++i) amax = fmaxf(amax, finite_magnitude(f[i]));
#pragma unroll
  for (int step = 128 / kLanes / 2; step; step /= 2) amax = fmaxf(amax, __shfl_xor_sync(kFullWarp, amax, step));
  const Fp8Scale scale = fp8_scale(amax, kind);
#pragma unroll
  for (int i = 0; i < kLanes / 4; ++i) words[i] = 0;
#pragma unroll
  for (int i = 0; i < kLanes; ++i) words[i / 4] |= to_e4m3(f[i], scale.inverse) << (8 * (i % 4));
  return scale;
}

// One warp: `channels` (a multiple of 128) of a row to e4m3, and a scale for each 128 of them. All pointers may be to
// shared or global memory; `x` is aligned to 16 bytes, `q` to 8.
template <DType kType>
__device__ __forceinline__ void warp_quantize(const char *x, int channels, char *q, char *scales, Quantize kind) {
  using Row = Payload<kType>;
  constexpr int kLanes = Row::kLanes, kGroupLanes = 128 / kLanes;
  const int lane = threadIdx.x % kWarpSize;
  for (int base = 0; base < channels; base += kWarpSize * kLanes) {
    const int channel = base + lane * kLanes; // lanes of a group are all inside the row, or all outside
    const bool is_inside = channel < channels;
    float f[kLanes];
    Row::unpack(is_inside ? *reinterpret_cast<const int4 *>(x + channel * (16 / kLanes)) : int4{}, f);
    uint32_t word[kLanes / 4];
    const Fp8Scale scale = quantize_vector<kLanes>(f, kind, word);
    if (!is_inside) continue;
#pragma unroll
    for (int i = 0; i < kLanes / 4; ++i) reinterpret_cast<uint32_t *>(q + channel)[i] = word[i];
    if (lane % kGroupLanes) continue;
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
