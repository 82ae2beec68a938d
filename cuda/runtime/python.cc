#include "cuda/runtime/python.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <mutex>

#include "cuda/runtime/local_device.h"
#include "cuda/runtime/registry.h"
#include "cuda/runtime/service.h"
#include "cuda/runtime/setup_time.h"

namespace nb = nanobind;

namespace jax_ep {
namespace {

using Unlocked = nb::call_guard<nb::gil_scoped_release>;

Nonce to_nonce(nb::bytes bytes) {
  Nonce nonce{};
  if (bytes.size() != nonce.size()) fail("a nonce has " + std::to_string(nonce.size()) + " bytes");
  std::copy_n(static_cast<const uint8_t *>(bytes.data()), nonce.size(), nonce.begin());
  return nonce;
}

// One service per process; a second call gives the same address.
std::string start_service(nb::bytes nonce_bytes) {
  static std::mutex &mutex = *new std::mutex;
  static Service *service = nullptr; // never destroyed: it serves peers until the process ends
  const Nonce nonce = to_nonce(nonce_bytes);
  std::lock_guard<std::mutex> lock(mutex);
  if (service == nullptr) {
    service = new Service(nonce, [](const Request &request) { return Registry::get().answer(request); });
  }
  return service->address();
}

void add_process(int process, const std::string &address, nb::bytes nonce) {
  Registry::get().peers().add(process, {address, to_nonce(nonce)});
}

nb::dict device_dict(int device) {
  const DeviceInfo &info = device_info(device);
  nb::dict d;
  d["uuid"] = info.uuid;
  d["name"] = info.name;
  d["num_sms"] = info.num_sms;
  d["compute_capability"] = nb::make_tuple(info.cc_major, info.cc_minor);
  return d;
}

nb::dict register_pool(int device, uint64_t small_ptr, uint64_t large_ptr) {
  Pool pool;
  {
    nb::gil_scoped_release unlocked;
    pool = Registry::get().register_pool(device, small_ptr, large_ptr);
  }
  nb::dict d;
  d["base"] = reinterpret_cast<uintptr_t>(pool.base);
  d["bytes"] = pool.bytes;
  d["exportable"] = pool.is_exportable;
  return d;
}

nb::dict stats() {
  Stats s;
  {
    nb::gil_scoped_release unlocked;
    s = Registry::get().stats();
  }
  nb::dict setup_ms;
  const char *names[kNumSetupPhases] = {"memory", "kernels", "peers", "attach"};
  for (int i = 0; i < kNumSetupPhases; ++i) setup_ms[names[i]] = double(setup_ns()[size_t(i)].load()) * 1e-6;
  nb::dict d;
  d["groups"] = s.groups;
  d["arenas"] = s.arenas;
  d["symmetric_bytes"] = s.symmetric_bytes;
  d["peers_mapped"] = s.peers_mapped;
  d["pools_mapped"] = s.pools_mapped;
  d["pools_registered"] = s.pools_registered;
  d["calls"] = s.calls;
  d["direct_calls"] = s.calls - s.staged_calls;
  d["staged_calls"] = s.staged_calls;
  d["vector_calls"] = s.vector_calls;
  d["recorded_calls"] = s.recorded_calls;
  d["rows_put"] = s.rows_put;
  d["dispatch_entered_ns"] = s.dispatch_entered_ns;
  d["attached"] = num_attached().load();
  d["setup_ms"] = setup_ms;
  return d;
}

nb::list failures() {
  nb::list all;
  for (const FailureReport &f : Registry::get().failures()) {
    nb::dict d;
    d["error"] = failure_name(f.record.code);
    d["text"] = describe(f.record);
    d["op"] = op_name(f.record.op);
    d["phase"] = phase_name(f.record.phase);
    d["rank"] = f.record.rank;
    d["peer"] = f.record.peer;
    d["call"] = f.record.epoch;
    d["expected"] = f.record.expected;
    d["seen"] = f.record.seen;
    d["key"] = f.key;
    d["device"] = f.device;
    all.append(d);
  }
  return all;
}

// `carrier`, `params_bytes`: from jax_ep._nvshmem. `at`: the heap of each process as this one sees it, 0: it does not.
void set_symmetric_heap(uintptr_t base, int64_t bytes, int device, uintptr_t carrier, int64_t params_bytes,
                        const std::vector<uintptr_t> &at) {
  if (params_bytes != int64_t(sizeof(CarrierParams))) fail("jax_ep._nvshmem was built from other sources than jax_ep._cuda; rebuild both");
  SymmetricHeap heap;
  heap.base = reinterpret_cast<char *>(base);
  heap.bytes = bytes;
  heap.device = device;
  heap.launch = reinterpret_cast<LaunchCarrier>(carrier);
  for (uintptr_t a : at) heap.at.push_back(reinterpret_cast<char *>(a));
  Registry::get().set_heap(std::move(heap));
}

void warm_up(const std::vector<int> &devices) {
  for (int device : devices) LocalDevice::get(device).warm();
}

} // namespace

void export_runtime(nb::module_ &m) {
  export_bind(m);
  m.def("num_devices", &num_devices, Unlocked());
  m.def("device_info", &device_dict, nb::arg("device"));
  m.def("can_access_peer", &can_access_peer, nb::arg("device"), nb::arg("peer"));
  m.def("register_pool", &register_pool, nb::arg("device"), nb::arg("small_ptr"), nb::arg("large_ptr"));
  m.def("start_service", &start_service, nb::arg("nonce"));
  m.def("add_process", &add_process, nb::arg("process"), nb::arg("address"), nb::arg("nonce"));
  m.def("set_symmetric_heap", &set_symmetric_heap, nb::arg("base"), nb::arg("bytes"), nb::arg("device"),
        nb::arg("carrier"), nb::arg("params_bytes"), nb::arg("at"));
  m.def("warm_up", &warm_up, Unlocked(), nb::arg("devices"));
  m.def("stats", &stats);
  m.def("failures", &failures);
  m.def("synchronize", [] { Registry::get().synchronize(); }, Unlocked());
  m.def("reset_local", [] { Registry::get().reset(); }, Unlocked());
}

} // namespace jax_ep
