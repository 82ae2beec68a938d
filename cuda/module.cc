// The Python extension jax_ep._cuda: FFI targets for XLA and the runtime's functions for jax_ep/bootstrap.py.
// Loads without a GPU and without a driver; nothing touches CUDA before a function is called.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include "cuda/ffi/targets.h"
#include "cuda/kernels/dispatch_peer.h"
#include "cuda/layout.h"
#include "cuda/loopback_py.h"
#include "cuda/runtime/python.h"

namespace nb = nanobind;

NB_MODULE(_cuda, m) {
  nb::set_leak_warnings(false); // capsules and the bind callback live as long as XLA, past module teardown

  m.attr("protocol") = jax_ep::kProtocol;
  const int machine_code[] = {JAX_EP_MACHINE_CODE}; // compute capabilities, 90 for 9.0 (from CMake)
  nb::list architectures;
  for (int a : machine_code) architectures.append(a);
  m.attr("machine_code") = architectures;
  m.attr("max_num_sms") = jax_ep::kMaxBlocks;
  m.def("max_experts", &jax_ep::max_experts, nb::arg("num_ranks"), "experts that a group of this size can have");
  m.attr("ffi_api_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.def("targets", &jax_ep::ffi_targets, "{name: {stage: capsule}} for jax.ffi.register_ffi_target");
  m.def(
      "arena_shape",
      [](int num_ranks, int num_experts, int64_t row_bytes, int num_topk, int64_t staging_bytes) {
        const jax_ep::ArenaShape s =
            jax_ep::arena_shape(num_ranks, num_experts, row_bytes, num_topk, staging_bytes);
        return std::pair<int32_t, int64_t>(s.count_words, s.staging_bytes);
      },
      nb::arg("num_ranks"), nb::arg("num_experts"), nb::arg("row_bytes"), nb::arg("num_topk"),
      nb::arg("staging_bytes"), "(count_words, staging_bytes): the size class that serves a call");
  m.def(
      "arena_bytes",
      [](int num_ranks, int32_t count_words, int64_t staging_bytes) {
        return jax_ep::ArenaShape{num_ranks, count_words, staging_bytes}.bytes();
      },
      nb::arg("num_ranks"), nb::arg("count_words"), nb::arg("staging_bytes"), "symmetric memory of one rank");

  jax_ep::export_runtime(m);
  jax_ep::export_loopback(m);
}
