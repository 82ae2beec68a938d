// The FFI targets of the extension, as jax.ffi.register_ffi_target takes them.
#pragma once

#include <nanobind/nanobind.h>

#include "xla/ffi/api/c_api.h"

namespace jax_ep {

XLA_FFI_Handler *dispatch_handler();
XLA_FFI_Handler *redispatch_handler();
XLA_FFI_Handler *combine_handler();

// {target: {"instantiate": capsule, "initialize": capsule, "execute": capsule}}
nanobind::dict ffi_targets();

} // namespace jax_ep
