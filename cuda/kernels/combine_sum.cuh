// The two sums of combine: a rank's own rows of a slot, and a token's rows from all ranks.
//
// Rounding tree (docs/concepts.md): a rank's rows are added in f32 in k order and rounded to the payload's type (then,
// "fp8_wire", quantised); these partial sums are added in f32 in rank order, with the bias, and rounded once.
#pragma once

#include "cuda/device/gather.cuh"
#include "cuda/device/quantize.cuh"
#include "cuda/kernels/combine_peer.h"

namespace jax_ep {

constexpr int kVectorUnit = kWarpSize * 16; // one vector per lane

// acc += the step's rows at bytes at[u] (negative: none) of the row, u < kUnroll. `kIsPartial`: a row with a factor
// stands for a partial sum of its own, which is rounded before it is added.
template <DType kType, int kUnroll, bool kIsPartial, class Fetch>
__device__ __forceinline__ void sum_vectors(const GatherStep &s, Fetch &fetch, const int (&at)[kUnroll], float weights,
                                            float (&acc)[kUnroll][Payload<kType>::kLanes]) {
  using Row = Payload<kType>;
  constexpr int kBatch = 4; // rows under way at a time
  for (int first = 0; first < s.count; first += kBatch) {
    int4 v[kBatch][kUnroll];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (first + j >= s.count) break;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) v[j][u] = fetch(first + j, at[u]);
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (first + j >= s.count) break;
      const bool is_scaled = s.is_scaled >> (first + j) & 1;
      const float weight = is_scaled ? __shfl_sync(kFullWarp, weights, first + j) : 1.f;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (!is_scaled) add_row<kType>(acc[u], v[j][u]);
        else if (!kIsPartial) add_row<kType>(acc[u], v[j][u], weight);
        else {
          float one[Row::kLanes] = {};
          add_row<kType>(one, v[j][u], weight);
          add_row<kType>(acc[u], Row::pack(one));
        }
      }
    }
  }
}

// This lane's vectors of a step, from byte `base` on.
template <int kUnroll> __device__ __forceinline__ void vectors_at(const GatherStep &s, int base, int (&at)[kUnroll]) {
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    at[u] = base + u * kVectorUnit + int(threadIdx.x % kWarpSize) * 16;
    if (at[u] >= s.end) at[u] = -1;
  }
}

// Where partial sums go: one after the other.
struct InOrder {
  char *partial;
  int64_t row_bytes;
  __device__ char *operator()(int index) const { return partial + index * row_bytes; }
};

// A rank's sum of a slot, rounded, to its place among the partial sums: `row_at(index)`.
template <DType kType, int kUnroll, class RowAt> struct StorePartial {
  RowAt row_at;

  template <class Fetch> __device__ void operator()(const GatherStep &s, Fetch fetch) const {
    using Row = Payload<kType>;
    const float weights = s.is_scaled ? s.weight_in_order() : 1.f;
    for (int base = s.begin; base < s.end; base += kUnroll * kVectorUnit) {
      int at[kUnroll];
      vectors_at(s, base, at);
      float acc[kUnroll][Row::kLanes] = {};
      sum_vectors<kType, kUnroll, false>(s, fetch, at, weights, acc);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u)
        if (at[u] >= 0) *reinterpret_cast<int4 *>(row_at(s.index) + at[u]) = Row::pack(acc[u]);
    }
  }
};

// The same, quantised into a WireRow. Steps begin and end at multiples of 128 channels, which are 16 lanes (32 for f32).
template <DType kType, class RowAt> struct StoreWire {
  RowAt row_at;

  template <class Fetch> __device__ void operator()(const GatherStep &s, Fetch fetch) const {
    using Row = Payload<kType>;
    constexpr int kLanes = Row::kLanes, kGroupLanes = WireRow::kBlock / kLanes;
    const int lane = threadIdx.x % kWarpSize;
    const float weights = s.is_scaled ? s.weight_in_order() : 1.f;
    for (int base = s.begin; base < s.end; base += kVectorUnit) {
      int here[1];
      vectors_at(s, base, here);
      float acc[1][kLanes] = {};
      sum_vectors<kType, 1, false>(s, fetch, here, weights, acc);
      float f[kLanes];
      Row::unpack(Row::pack(acc[0]), f); // rounded to the payload's type before it is quantised
      uint32_t q[kLanes / 4];
      const Fp8Scale scale = quantize_vector<kLanes>(f, Quantize::kFp8, q);
      const int at = here[0];
      if (at < 0) continue;
      const int channel = at / (16 / kLanes), in_group = channel % WireRow::kGroup;
      char *group = row_at(s.index) + channel / WireRow::kGroup * WireRow::kGroupBytes;
#pragma unroll
      for (int i = 0; i < kLanes / 4; ++i) reinterpret_cast<uint32_t *>(group + in_group)[i] = q[i];
      if (lane % kGroupLanes == 0)
        reinterpret_cast<float *>(group + WireRow::kGroup)[in_group / WireRow::kBlock] = scale.scale;
    }
  }
};

// A token's sum over ranks, with the bias, to the result.
template <DType kType, int kUnroll> struct StoreOut {
  char *out;
  const char *bias;
  int64_t row_bytes;
  int64_t first_token;

  template <class Fetch> __device__ void operator()(const GatherStep &s, Fetch fetch) const {
    using Row = Payload<kType>;
    const float weights = s.is_scaled ? s.weight_in_order() : 1.f;
    const int64_t row = (first_token + s.index) * row_bytes;
    const bool is_pair = Row::kCanAddPairs && s.count == 2 && !s.is_scaled && !bias;
    for (int base = s.begin; base < s.end; base += kUnroll * kVectorUnit) {
      int at[kUnroll];
      vectors_at(s, base, at);
      if (is_pair) {
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const int4 sum = Row::add_pair(fetch(0, at[u]), fetch(1, at[u]));
          if (at[u] >= 0) store_row(out + row + at[u], sum);
        }
        continue;
      }
      float acc[kUnroll][Row::kLanes] = {};
      sum_vectors<kType, kUnroll, true>(s, fetch, at, weights, acc);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (at[u] < 0) continue;
        if (bias) add_row<kType>(acc[u], load_row(bias + row + at[u]));
        store_row(out + row + at[u], Row::pack(acc[u]));
      }
    }
  }
};

// The same from WireRows: a lane sums 16 channels of a group.
template <DType kType> struct StoreOutOfWire {
  char *out;
  const char *bias;
  int64_t row_bytes;
  int64_t first_token;

  template <class Fetch> __device__ void operator()(const GatherStep &s, Fetch fetch) const {
    using Row = Payload<kType>;
    constexpr int kVectors = 16 / Row::kLanes;
    const int lane = threadIdx.x % kWarpSize;
    for (int base = s.begin; base < s.end; base += WireRow::kGroupBytes) {
      float acc[16] = {};
      for (int i = 0; i < s.count; ++i) {
        const int4 v = fetch(i, base + lane * 16);
        const int4 scales = fetch(i, base + WireRow::kGroup);
        const int block = lane * 16 / WireRow::kBlock;
        const float scale = __int_as_float(block == 0 ? scales.x : block == 1 ? scales.y : block == 2 ? scales.z : scales.w);
        float f[16];
        from_e4m3(v, f);
#pragma unroll
        for (int j = 0; j < 16; ++j) acc[j] = __fadd_rn(acc[j], __fmul_rn(f[j], scale));
      }
      const int64_t at = (int64_t(base / WireRow::kGroupBytes) * WireRow::kGroup + lane * 16) * (16 / Row::kLanes);
      const int64_t row = (first_token + s.index) * row_bytes;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (at + v * 16 >= row_bytes) continue;
        if (bias) add_row<kType>(acc + v * Row::kLanes, load_row(bias + row + at + v * 16));
        store_row(out + row + at + v * 16, Row::pack(acc + v * Row::kLanes));
      }
    }
  }
};

} // namespace jax_ep
