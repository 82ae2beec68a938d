// Loopback for Python: bytes in, bytes out; the tests give them meaning with NumPy.
#include "cuda/loopback_py.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "cuda/loopback.h"

namespace nb = nanobind;

namespace jax_ep {

void export_loopback(nb::module_ &m) {
  nb::class_<Loopback> loopback(m, "Loopback", "R ranks on R streams of one device: the kernels without XLA (a test aid).");
  loopback.attr("has_stamps") = Loopback::has_stamps();
  loopback
      .def("__init__",
           [](Loopback *self, int device, int num_ranks, int num_tokens, int num_topk, int num_experts, int row_bytes,
              int capacity, int alignment, int layout, int dtype, bool zero_tail, bool has_weights, bool has_bias,
              bool use_bulk, bool force_staged, int num_sms, int64_t staging_bytes, double timeout_s, int side_bytes,
              int window, int quantize, int wire, bool crosses_once, int num_slots, int num_nodes, int num_carriers,
              int chunk_tokens, int64_t max_delay_ns) {
             LoopbackShape s{};
             s.num_ranks = num_ranks, s.num_tokens = num_tokens, s.num_topk = num_topk, s.num_experts = num_experts;
             s.row_bytes = row_bytes, s.capacity = capacity, s.alignment = alignment, s.layout = Layout(layout);
             s.dtype = DType(dtype), s.zero_tail = zero_tail, s.has_weights = has_weights, s.has_bias = has_bias;
             s.use_bulk = use_bulk, s.force_staged = force_staged, s.num_sms = num_sms;
             s.side_bytes = side_bytes, s.window = window, s.quantize = Quantize(quantize), s.wire = Quantize(wire);
             s.crosses_once = crosses_once, s.num_slots = num_slots;
             s.num_nodes = num_nodes, s.num_carriers = num_carriers, s.chunk_tokens = chunk_tokens, s.max_delay_ns = max_delay_ns;
             s.staging_bytes = staging_bytes, s.timeout_ns = int64_t(timeout_s * 1e9);
             new (self) Loopback(device, s);
           },
           nb::kw_only(), nb::arg("device") = 0, nb::arg("num_ranks"), nb::arg("num_tokens"), nb::arg("num_topk"),
           nb::arg("num_experts"), nb::arg("row_bytes"), nb::arg("capacity"), nb::arg("alignment") = 1,
           nb::arg("layout"), nb::arg("dtype"), nb::arg("zero_tail") = true, nb::arg("has_weights") = true,
           nb::arg("has_bias") = false, nb::arg("use_bulk") = true, nb::arg("force_staged") = false,
           nb::arg("num_sms") = 8, nb::arg("staging_bytes") = 1 << 20, nb::arg("timeout_s") = 20.0,
           nb::arg("side_bytes") = 0, nb::arg("window") = -1, nb::arg("quantize") = 0, nb::arg("wire") = 0, nb::arg("crosses_once") = false,
           nb::arg("num_slots") = 0, nb::arg("num_nodes") = 1, nb::arg("num_carriers") = 1,
           nb::arg("chunk_tokens") = 0, nb::arg("max_delay_ns") = 0)
      .def("bytes", &Loopback::bytes)
      .def("write", [](Loopback &self, const std::string &name, int rank,
                       nb::bytes data) { self.write(name, rank, data.c_str(), int64_t(data.size())); })
      .def("read",
           [](const Loopback &self, const std::string &name, int rank) {
             std::vector<char> data(size_t(self.bytes(name)));
             if (!data.empty()) self.read(name, rank, data.data());
             return nb::bytes(data.data(), data.size());
           })
      .def("fill", &Loopback::fill)
      .def("launch", &Loopback::launch, nb::arg("op"), nb::arg("delay_ns") = std::vector<int64_t>{},
           nb::arg("absent") = std::vector<int>{}, nb::call_guard<nb::gil_scoped_release>())
      .def("synchronize", &Loopback::synchronize, nb::call_guard<nb::gil_scoped_release>())
      .def("time", &Loopback::time, nb::call_guard<nb::gil_scoped_release>())
      .def("failure",
           [](const Loopback &self, int rank) {
             const FailureRecord f = self.failure(rank);
             nb::dict d;
             d["code"] = f.code, d["phase"] = f.phase, d["rank"] = f.rank, d["peer"] = f.peer, d["epoch"] = f.epoch;
             return d;
           })
      .def("rows_put", &Loopback::rows_put)
      .def("stamps",
           [](const Loopback &self) { // tests/gpu/stamps.py makes tables of them
             nb::list ranks;
             for (const auto &blocks : self.stamps()) {
               nb::list of_rank;
               for (const StampsOfBlock &block : blocks) {
                 nb::list stamps;
                 for (const auto &s : block.stamps) stamps.append(nb::make_tuple(s.phase, s.number, s.ns, s.clock));
                 nb::dict d;
                 d["block"] = block.block, d["is_carrier"] = block.is_carrier, d["dropped"] = block.dropped;
                 d["stamps"] = stamps;
                 of_rank.append(d);
               }
               ranks.append(of_rank);
             }
             return ranks;
           })
      .def("reset", &Loopback::reset, nb::call_guard<nb::gil_scoped_release>());
}

} // namespace jax_ep
