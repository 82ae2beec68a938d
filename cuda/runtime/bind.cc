#include "cuda/runtime/bind.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "cuda/runtime/local_device.h"
#include "cuda/runtime/python.h"
#include "cuda/runtime/registry.h"
#include "cuda/runtime/rendezvous.h"
#include "cuda/runtime/setup_time.h"

namespace nb = nanobind;

namespace jax_ep {
namespace {

using PyGroups = std::vector<std::vector<std::pair<int, int>>>;

// Guarded by Python's lock. Leaked on purpose: XLA may instantiate while the interpreter winds down.
nb::object &callback() {
  static nb::object &object = *new nb::object;
  return object;
}

PyGroups unflatten(const BindRequest &request) {
  const size_t ranks = size_t(request.num_ranks), values = request.groups.size();
  if (ranks == 0 || values == 0 || values % (2 * ranks) != 0) {
    fail("attribute groups has " + std::to_string(values) + " values, expected a multiple of 2 * num_ranks = " +
         std::to_string(2 * ranks));
  }
  PyGroups groups(values / (2 * ranks));
  for (size_t i = 0; i < values; i += 2) {
    groups[i / (2 * ranks)].emplace_back(int(request.groups[i]), int(request.groups[i + 1]));
  }
  return groups;
}

std::string call_python(const BindRequest &request, const ArenaShape &shape) {
  if (!Py_IsInitialized()) return "SetupError: the Python interpreter has ended";
  const PyGroups groups = unflatten(request);
  nb::gil_scoped_acquire lock;
  try {
    if (!callback().is_valid() || callback().is_none()) return "SetupError: jax_ep was not imported";
    return nb::cast<std::string>(callback()(request.key, groups, request.num_ranks, shape.count_words,
                                            shape.staging_bytes, shape.num_slots, shape.num_nodes,
                                            request.num_sms + request.node_sms,
                                            double(request.setup_timeout_ns) * 1e-9));
  } catch (const std::exception &e) { // nb::python_error holds references: it must die under the lock
    return std::string("SetupError: ") + e.what();
  }
}

void bind(const std::string &key, const PyGroups &groups, int process, int num_ranks, int count_words,
          int64_t staging_bytes, int num_slots, int num_nodes, int max_num_sms, double timeout_s,
          const std::vector<std::vector<int>> &gpus, int64_t heap_offset) {
  BindSpec spec;
  spec.key = key;
  spec.gpus = gpus;
  for (const auto &group : groups) {
    spec.groups.emplace_back();
    for (auto [p, d] : group) spec.groups.back().push_back({p, d});
  }
  spec.process = process;
  spec.shape = ArenaShape{num_ranks, count_words, staging_bytes, num_slots, num_nodes};
  spec.max_num_sms = max_num_sms;
  spec.heap_offset = heap_offset;
  spec.deadline = Clock::now() + std::chrono::nanoseconds(int64_t(timeout_s * 1e9));
  Registry::get().bind(spec);
}

// Is the arena bound already? Counted, because this is what a program that shares it costs at set-up.
bool attach(const std::string &key, int num_sms) {
  const Deadline start = Clock::now();
  if (!Registry::get().serves(key, num_sms)) return false;
  num_attached() += 1;
  setup_ns()[size_t(SetupPhase::kAttach)] +=
      std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
  return true;
}

} // namespace

std::string bind_from_instantiate(const BindRequest &request) noexcept {
  try {
    if (attach(request.key, int(request.num_sms + request.node_sms))) return "";
    if (num_devices() == 0) return ""; // compiled here, run elsewhere: execution would say "not bound"
    const int ranks = int(request.num_ranks), experts = int(request.num_experts), topk = int(request.num_topk);
    const int nodes = int(request.num_nodes);
    if (request.num_slots)
      return call_python(request, latency_arena_shape(ranks, nodes, experts, request.row_bytes, topk, request.num_tokens,
                                                      int(request.num_slots)));
    return call_python(request, nodes > 1 ? node_arena_shape(ranks, nodes, experts, request.row_bytes, topk,
                                                             request.staging_bytes)
                                          : arena_shape(ranks, experts, request.row_bytes, topk, request.staging_bytes));
  } catch (const std::exception &e) {
    return e.what();
  }
}

std::string rendezvous(std::string_view key, int64_t run_id, int device, int64_t timeout_ns) {
  return rendezvous_of(Registry::get().num_local(key), key, run_id, device, timeout_ns);
}

void export_bind(nb::module_ &m) {
  m.def("set_bind_callback", [](nb::object fn) { callback() = std::move(fn); }, nb::arg("fn").none());
  m.def("bind", &bind, nb::call_guard<nb::gil_scoped_release>(), nb::arg("key"), nb::arg("groups"),
        nb::arg("process"), nb::arg("num_ranks"), nb::arg("count_words"), nb::arg("staging_bytes"),
        nb::arg("num_slots"), nb::arg("num_nodes"), nb::arg("max_num_sms"), nb::arg("timeout_s"), nb::arg("gpus"),
        nb::arg("heap_offset") = -1);
  m.def("attach", &attach, nb::arg("key"), nb::arg("num_sms"), "whether a call site finds its arena bound already");
}

} // namespace jax_ep
