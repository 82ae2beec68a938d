#include "cuda/kernels/warmup.h"

#include <cstring>
#include <exception>
#include <vector>

#include "cuda/kernels/bulk.h"
#include "cuda/loopback.h"

namespace jax_ep {
namespace {

// A group of one rank: what is dispatched and combined unweighted with k = 1 comes back unchanged.
std::string round_trip(int device, Layout layout, DType dtype, bool use_bulk, int num_slots) {
  constexpr int kTokens = 8, kExperts = 4, kRowBytes = 512;
  LoopbackShape s{};
  s.num_ranks = 1, s.num_tokens = kTokens, s.num_topk = 1, s.num_experts = kExperts, s.row_bytes = kRowBytes;
  s.capacity = kTokens, s.alignment = 1, s.layout = layout, s.dtype = dtype, s.zero_tail = true, s.use_bulk = use_bulk;
  s.num_sms = 2, s.staging_bytes = 1 << 20, s.timeout_ns = int64_t(20) * 1000000000, s.num_slots = num_slots;
  Loopback ranks(device, s);
  std::vector<uint16_t> x(kTokens * kRowBytes / 2), y(x.size());
  std::vector<int32_t> ids(kTokens);
  for (size_t i = 0; i < x.size(); ++i) x[i] = uint16_t(0x3c00 + i % 251); // ordinary numbers in all three types
  for (int t = 0; t < kTokens; ++t) ids[t] = (t * 3) % kExperts;
  ranks.write("x", 0, x.data(), int64_t(x.size()) * 2);
  ranks.write("topk_idx", 0, ids.data(), kTokens * 4);
  for (const char *op : {"dispatch", "redispatch"}) {
    ranks.fill("recv_x", 0xff);
    ranks.launch(op, {}, {});
    ranks.synchronize();
  }
  ranks.read("recv_x", 0, y.data());
  ranks.write("y", 0, y.data(), int64_t(y.size()) * 2);
  ranks.launch("combine", {}, {});
  ranks.synchronize();
  ranks.read("out", 0, y.data());
  if (ranks.failure(0).code) return "warm-up: a kernel reported a failure on private memory";
  if (std::memcmp(x.data(), y.data(), x.size() * 2)) return "warm-up: dispatch and combine changed known data";
  return "";
}

} // namespace

std::string warm_kernels(int device) {
  int before = 0;
  cudaGetDevice(&before);
  std::string problem;
  try {
    for (int bulk = 0; bulk <= has_bulk_copies(device) && problem.empty(); ++bulk)
      for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32})
        for (int num_slots : {0, 2})
          if (problem.empty())
            problem = round_trip(device, dtype == DType::kF16 ? Layout::kToken : Layout::kExpert, dtype, bulk, num_slots);
    // Those over several nodes are loaded and not run: they need a group of two ranks.
    for (auto load : {load_dispatch_nodes_kernels, load_combine_nodes_kernels, load_test_carrier})
      if (cudaError_t e = problem.empty() ? load() : cudaSuccess) problem = cudaGetErrorString(e);
  } catch (const std::exception &e) {
    problem = e.what();
  }
  cudaGetLastError(); // leave no error behind for XLA to find
  cudaSetDevice(before);
  return problem;
}

} // namespace jax_ep
