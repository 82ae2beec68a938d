// The Python extension jax_ep._cuda: FFI targets for XLA and the runtime's functions for jax_ep/bootstrap.py.
// Loads without a GPU and without a driver; nothing touches CUDA before a function is called.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include "cuda/ffi/targets.h"
#include "cuda/kernels/dispatch_peer.h"
#include "cuda/kernels/latency.h"
#include "cuda/layout.h"
#include "cuda/loopback_py.h"
#include "cuda/runtime/python.h"

namespace nb = nanobind;

static std::tuple<int32_t, int64_t, int32_t, int32_t> size_class(const jax_ep::ArenaShape &s) {
  return {s.count_words, s.staging_bytes, s.num_slots, s.num_nodes};
}

NB_MODULE(_cuda, m) {
  nb::set_leak_warnings(false); // capsules and the bind callback live as long as XLA, past module teardown

  m.attr("protocol") = jax_ep::kProtocol;
  m.attr("cuda_major") = CUDART_VERSION / 1000;
  const int machine_code[] = {JAX_EP_MACHINE_CODE}; // compute capabilities, 90 for 9.0 (from CMake)
  nb::list architectures;
  for (int a : machine_code) architectures.append(a);
  m.attr("machine_code") = architectures;
  m.attr("max_num_sms") = jax_ep::kMaxBlocks;
  m.def("max_experts", &jax_ep::max_experts, nb::arg("num_ranks"), "experts that a group of this size can have");
  m.def("max_latency_experts", &jax_ep::max_latency_experts, nb::arg("num_ranks"), "likewise in latency mode");
  m.attr("ffi_api_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.def("targets", &jax_ep::ffi_targets, "{name: {stage: capsule}} for jax.ffi.register_ffi_target");
  m.def(
      "arena_shape",
      [](int num_ranks, int num_experts, int64_t row_bytes, int num_topk, int64_t staging_bytes) {
        return size_class(jax_ep::arena_shape(num_ranks, num_experts, row_bytes, num_topk, staging_bytes));
      },
      nb::arg("num_ranks"), nb::arg("num_experts"), nb::arg("row_bytes"), nb::arg("num_topk"),
      nb::arg("staging_bytes"), "(count_words, staging_bytes, 0, 1): the size class that serves a call");
  m.def(
      "node_arena_shape",
      [](int num_ranks, int num_nodes, int num_experts, int64_t row_bytes, int num_topk, int64_t node_bytes) {
        return size_class(jax_ep::node_arena_shape(num_ranks, num_nodes, num_experts, row_bytes, num_topk, node_bytes));
      },
      nb::arg("num_ranks"), nb::arg("num_nodes"), nb::arg("num_experts"), nb::arg("row_bytes"), nb::arg("num_topk"),
      nb::arg("node_bytes"), "(count_words, staging_bytes, 0, num_nodes) over several nodes");
  m.def(
      "latency_arena_shape",
      [](int num_ranks, int num_nodes, int num_experts, int64_t row_bytes, int num_topk, int64_t num_tokens, int num_slots) {
        return size_class(
            jax_ep::latency_arena_shape(num_ranks, num_nodes, num_experts, row_bytes, num_topk, num_tokens, num_slots));
      },
      nb::arg("num_ranks"), nb::arg("num_nodes"), nb::arg("num_experts"), nb::arg("row_bytes"), nb::arg("num_topk"),
      nb::arg("num_tokens"), nb::arg("num_slots"), "(count_words, staging_bytes, num_slots, num_nodes) in latency mode");
  m.def(
      "arena_bytes",
      [](int num_ranks, int32_t count_words, int64_t staging_bytes, int32_t num_slots, int32_t num_nodes) {
        return jax_ep::ArenaShape{num_ranks, count_words, staging_bytes, num_slots, num_nodes}.bytes();
      },
      nb::arg("num_ranks"), nb::arg("count_words"), nb::arg("staging_bytes"), nb::arg("num_slots"),
      nb::arg("num_nodes"), "symmetric memory of one rank");

  m.def(
      "heap_arena_bytes",
      [](int num_ranks, int32_t count_words, int64_t staging_bytes, int32_t num_slots, int32_t num_nodes) {
        return jax_ep::heap_arena_bytes(jax_ep::ArenaShape{num_ranks, count_words, staging_bytes, num_slots, num_nodes});
      },
      nb::arg("num_ranks"), nb::arg("count_words"), nb::arg("staging_bytes"), nb::arg("num_slots"),
      nb::arg("num_nodes"), "what an arena takes in a symmetric heap");

  jax_ep::export_runtime(m);
  jax_ep::export_loopback(m);
}
