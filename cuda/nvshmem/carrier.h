// The carrier of transport "nvshmem" (kernels/carrier.h), in a module of its own: jax_ep/_nvshmem.
#pragma once

#include "cuda/kernels/carrier.h"

namespace jax_ep {

cudaError_t launch_nvshmem_carrier(const CarrierParams &p, cudaStream_t stream);
cudaError_t load_nvshmem_carrier();

} // namespace jax_ep
