// The FFI targets of the extension, as jax.ffi.register_ffi_target takes them.
#pragma once

#include <nanobind/nanobind.h>

#include "xla/ffi/api/c_api.h"

namespace jax_ep {

// What a target does of its operation: the whole exchange, in one of the two modes, or a half of it.
enum class Part { kThroughput, kLatency, kStart, kDone };

// The execute handlers; `is_recordable`: of the targets "..._graph", which XLA may record into command buffers.
XLA_FFI_Handler *dispatch_handler(Part part, bool is_recordable);
XLA_FFI_Handler *redispatch_handler(Part part, bool is_recordable);
XLA_FFI_Handler *combine_handler(Part part, bool is_recordable);

// {target: {"instantiate": capsule, "initialize": capsule, "execute": capsule}}
nanobind::dict ffi_targets();

} // namespace jax_ep
