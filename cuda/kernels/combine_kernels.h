// Combine's kernels for every payload type, with and without bulk copies and the FP8 wire.
#pragma once

#include "cuda/kernels/bulk.h"
#include "cuda/kernels/combine_peer.h"

namespace jax_ep {

// `Of::kernel<dtype, uses bulk copies, is on the wire in FP8>()` names one of them.
template <class Of> class CombineKernels {
 public:
  using Kernel = decltype(Of::template kernel<DType::kBF16, true, true>());

  // Null: there is no sum of opaque rows.
  static Kernel get(DType type, bool use_bulk, bool is_wire) {
    if (is_wire) return use_bulk ? of_type<true, true>(type) : of_type<false, true>(type);
    return use_bulk ? of_type<true, false>(type) : of_type<false, false>(type);
  }

  static cudaError_t load() {
    cudaError_t e = cudaSuccess;
    for (DType type : {DType::kBF16, DType::kF16, DType::kF32})
      for (int variant = 0; variant < 4 && !e; ++variant) e = load_kernel(get(type, variant / 2, variant % 2), variant / 2);
    return e;
  }

 private:
  template <bool kBulk, bool kWire> static Kernel of_type(DType type) {
    switch (type) {
      case DType::kBF16: return Of::template kernel<DType::kBF16, kBulk, kWire>();
      case DType::kF16: return Of::template kernel<DType::kF16, kBulk, kWire>();
      case DType::kF32: return Of::template kernel<DType::kF32, kBulk, kWire>();
      case DType::kOpaque: break;
    }
    return nullptr;
  }
};

} // namespace jax_ep
