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

// acc += a row's vectors `v`. `weight`: of a row with a factor, which stands for a partial sum of its own, rounded before it
// is added, if `kIsPartial`.
template <DType kType, int kUnroll, bool kIsPartial>
__device__ __forceinline__ void add_vectors(const int4 (&v)[kUnroll], bool is_scaled, float weight,
                                            float (&acc)[kUnroll][Payload<kType>::kLanes]) {
  using Row = Payload<kType>;
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (!is_scaled) add_row<kType>(acc[u], v[u]);
    else if (!kIsPartial) add_row<kType>(acc[u], v[u], weight);
    else {
      float one[Row::kLanes] = {};
      add_row<kType>(one, v[u], weight);
      add_row<kType>(acc[u], Row::pack(one));
    }
  }
}

// acc += the step's rows at bytes at[u] (negative: none) of the row, u < kUnroll.
template <DType kType, int kUnroll, bool kIsPartial, class Fetch>
__device__ __forceinline__ void sum_vectors(const GatherStep &s, Fetch &fetch, const int (&at)[kUnroll], float weights,
                                            float (&acc)[kUnroll][Payload<kType>::kLanes]) {
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
      add_vectors<kType, kUnroll, kIsPartial>(v[j], is_scaled, weight, acc);
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

// The same, quantised into a WireRow. Steps begin and end at multiples of 128 channels.
template <DType kType, class RowAt> struct StoreWire {
  RowAt row_at;

  template <class Fetch> __device__ void operator()(const GatherStep &s, Fetch fetch) const {
    using Row = Payload<kType>;
    using Lane = QuantLane<kType>;
    constexpr int kVectors = Lane::kVectors;
    const int lane = threadIdx.x % kWarpSize;
    const float weights = s.is_scaled ? s.weight_in_order() : 1.f;
    const bool is_pair = Row::kCanAddPairs && (s.count == 1 || s.count == 2) && !s.is_scaled;
    for (int base = s.begin; base < s.end; base += kQuantUnit) {
      __builtin_assume(base >= 0); // so every fetch has a place
      const int here = base + lane * Lane::kBytes;
      const bool is_inside = here < s.end;
      int at[kVectors]; // lanes outside read what is there, and store nothing
#pragma unroll
      for (int u = 0; u < kVectors; ++u) at[u] = (is_inside ? here : base) + u * 16;
      Lane part; // rounded to the payload's type before it is quantised
      if (is_pair) {
#pragma unroll
        for (int u = 0; u < kVectors; ++u) part.v[u] = fetch(0, at[u]);
        if (s.count == 2) {
#pragma unroll
          for (int u = 0; u < kVectors; ++u) part.v[u] = Row::add_pair(part.v[u], fetch(1, at[u]));
        } else {
#pragma unroll
          for (int u = 0; u < kVectors; ++u) part.v[u] = Row::add_pair(int4{}, part.v[u]); // -0 becomes +0
        }
      } else {
        float acc[kVectors][Row::kLanes] = {};
        sum_vectors<kType, kVectors, false>(s, fetch, at, weights, acc);
#pragma unroll
        for (int u = 0; u < kVectors; ++u) part.v[u] = Row::pack(acc[u]);
      }
      uint32_t words[Lane::kWords];
      const Fp8Scale scale = part.quantize(Quantize::kFp8, words);
      if (!is_inside) continue;
      const int channel = here / int(dtype_bytes(kType)), in_group = channel % WireRow::kGroup;
      char *group = row_at(s.index) + channel / WireRow::kGroup * WireRow::kGroupBytes;
      Lane::store(group + in_group, words);
      if (lane % Lane::kPerBlock == 0)
        reinterpret_cast<float *>(group + WireRow::kGroup)[in_group / WireRow::kBlock] = scale.scale;
    }
  }
};

// The sum of a node's ranks is complete: rounded, it is added to that over nodes, and the next one begins.
template <DType kType> __device__ __forceinline__ void end_node(float *sum, float *node) {
  add_row<kType>(sum, Payload<kType>::pack(node));
#pragma unroll
  for (int i = 0; i < Payload<kType>::kLanes; ++i) node[i] = 0.f;
}

// A vector of a sum. `kKeeps`: it is read again soon, and stays in the L2 cache.
template <bool kKeeps> __device__ __forceinline__ void store_sum(char *p, int4 v) {
  if constexpr (kKeeps) *reinterpret_cast<int4 *>(p) = v;
  else store_row(p, v);
}

// A token's sum over ranks, with the bias, to the result.
template <DType kType, int kUnroll, bool kKeeps = false> struct StoreOut {
  char *out;
  const char *bias;
  int64_t row_bytes;
  int64_t first_token;

  template <class Fetch> __device__ void operator()(const GatherStep &s, Fetch fetch) const {
    using Row = Payload<kType>;
    const float weights = s.is_scaled ? s.weight_in_order() : 1.f;
    const int64_t row = (first_token + s.index) * row_bytes;
    const bool is_packed = Row::kCanAddPairs && (s.count == 1 || s.count == 2) && !s.is_scaled && !bias;
    for (int base = s.begin; base < s.end; base += kUnroll * kVectorUnit) {
      int at[kUnroll];
      vectors_at(s, base, at);
      if (is_packed) {
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const int4 sum = Row::add_pair(fetch(0, at[u]), s.count == 2 ? fetch(1, at[u]) : int4{}); // -0 becomes +0
          if (at[u] >= 0) store_sum<kKeeps>(out + row + at[u], sum);
        }
        continue;
      }
      float acc[kUnroll][Row::kLanes] = {};
      sum_vectors<kType, kUnroll, true>(s, fetch, at, weights, acc);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (at[u] < 0) continue;
        if (bias) add_row<kType>(acc[u], load_row(bias + row + at[u]));
        store_sum<kKeeps>(out + row + at[u], Row::pack(acc[u]));
      }
    }
  }
};

// The same over several nodes: the rows of a node (`ends`) are added and rounded first. Most sums are of two nodes, with a row
// or two each: those have packed additions alone.
template <DType kType, int kUnroll> struct StoreOutOfNodes {
  using Row = Payload<kType>;
  char *out;
  const char *bias;
  int64_t row_bytes;

  template <class Fetch> __device__ void operator()(const GatherStep &s, Fetch fetch) const {
    const float weights = s.is_scaled ? s.weight_in_order() : 1.f;
    const int64_t row = s.index * row_bytes;
    const unsigned ends = s.ends & (s.count < kWarpSize ? (1u << s.count) - 1 : kFullWarp);
    const bool is_pair = Row::kCanAddPairs && __popc(ends) == 2 && !bias;
    for (int base = s.begin; base < s.end; base += kUnroll * kVectorUnit) {
      int at[kUnroll];
      vectors_at(s, base, at);
      if (is_pair) {
        int4 first[kUnroll], second[kUnroll];
        sum_node(s, fetch, at, weights, 0, __ffs(ends), first);
        sum_node(s, fetch, at, weights, __ffs(ends), s.count, second);
#pragma unroll
        for (int u = 0; u < kUnroll; ++u)
          if (at[u] >= 0) store_row(out + row + at[u], Row::add_pair(first[u], second[u]));
        continue;
      }
      float sum[kUnroll][Row::kLanes] = {};
      int begin = 0;
      for (unsigned left = ends; left; left &= left - 1) {
        const int end = __ffs(left);
        int4 of_node[kUnroll];
        sum_node(s, fetch, at, weights, begin, end, of_node);
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) add_row<kType>(sum[u], of_node[u]);
        begin = end;
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (at[u] < 0) continue;
        if (bias) add_row<kType>(sum[u], load_row(bias + row + at[u]));
        store_row(out + row + at[u], Row::pack(sum[u]));
      }
    }
  }

 private:
  // Rows [begin, end) of the step, rounded. Of one row it may be -0 where the sum is +0: nothing can tell once it is added.
  template <class Fetch>
  __device__ __forceinline__ static void sum_node(const GatherStep &s, Fetch &fetch, const int (&at)[kUnroll], float weights, int begin,
                                                  int end, int4 (&of_node)[kUnroll]) {
    const unsigned scaled = s.is_scaled >> begin & ((2u << (end - begin - 1)) - 1);
    if (!scaled && end - begin == 1) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) of_node[u] = fetch(begin, at[u]);
    } else if (Row::kCanAddPairs && !scaled && end - begin == 2) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) of_node[u] = Row::add_pair(fetch(begin, at[u]), fetch(begin + 1, at[u]));
    } else {
      float sum[kUnroll][Row::kLanes] = {};
      for (int i = begin; i < end; ++i) {
        int4 v[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) v[u] = fetch(i, at[u]);
        const bool is_scaled = s.is_scaled >> i & 1;
        add_vectors<kType, kUnroll, true>(v, is_scaled, is_scaled ? __shfl_sync(kFullWarp, weights, i) : 1.f, sum);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) of_node[u] = Row::pack(sum[u]);
    }
  }
};

// The same from WireRows: a lane sums 16 channels of a group. `kNodes`: as StoreOutOfNodes; `kKeeps`: as store_sum.
template <DType kType, bool kNodes = false, bool kKeeps = false> struct StoreOutOfWire {
  char *out;
  const char *bias;
  int64_t row_bytes;
  int first_token;

  template <class Fetch> __device__ void operator()(const GatherStep &s, Fetch fetch) const {
    using Row = Payload<kType>;
    constexpr int kVectors = 16 / Row::kLanes;
    const int lane = threadIdx.x % kWarpSize;
    for (int base = s.begin; base < s.end; base += WireRow::kGroupBytes) {
      __builtin_assume(base >= 0); // so every fetch has a place
      float acc[16] = {}, nodes[kNodes ? 16 : 1] = {};
      for (int i = 0; i < s.count; ++i) {
        const int4 v = fetch(i, base + lane * 16);
        const int4 scales = fetch(i, base + WireRow::kGroup);
        const int block = lane * 16 / WireRow::kBlock;
        const float scale = __int_as_float(block == 0 ? scales.x : block == 1 ? scales.y : block == 2 ? scales.z : scales.w);
        float f[16];
        from_e4m3(v, f);
#pragma unroll
        for (int j = 0; j < 16; ++j) acc[j] = __fadd_rn(acc[j], __fmul_rn(f[j], scale));
        if constexpr (kNodes) {
          if (!(s.ends >> i & 1)) continue;
#pragma unroll
          for (int v = 0; v < kVectors; ++v) end_node<kType>(nodes + v * Row::kLanes, acc + v * Row::kLanes);
        }
      }
      float *sum = kNodes ? nodes : acc;
      const int at = (base / WireRow::kGroupBytes * WireRow::kGroup + lane * 16) * (16 / Row::kLanes);
      const int64_t row = int64_t(first_token + s.index) * row_bytes + at;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (at + v * 16 >= int(row_bytes)) continue;
        if (bias) add_row<kType>(sum + v * Row::kLanes, load_row(bias + row + v * 16));
        store_sum<kKeeps>(out + row + v * 16, Row::pack(sum + v * Row::kLanes));
      }
    }
  }
};

} // namespace jax_ep
