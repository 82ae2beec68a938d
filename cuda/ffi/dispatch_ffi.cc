// Targets jax_ep_dispatch (routes) and jax_ep_redispatch (reuses a handle), in throughput and latency mode, whole and in
// halves. Operand and result order: jax_ep/primitives.py.
#include "cuda/ffi/targets.h"

#include <cuda_runtime_api.h>

#include "cuda/ffi/call.h"
#include "cuda/kernels/dispatch_peer.h"

namespace jax_ep {
namespace {

constexpr Launches<DispatchParams> kLaunches{launch_dispatch, launch_dispatch_nodes, launch_dispatch_latency};

// What both operations take from attributes; x is operand 0, side operand 1, recv_x and recv_side results 0 and 1.
DispatchParams base_params(const CallAttributes &a, const RankContext &rank, Buffers &b) {
  DispatchParams p{};
  const int64_t T = a.num_tokens, N = a.num_rows;
  p.num_tokens = int32_t(T), p.num_experts = int32_t(a.num_experts);
  p.num_local_experts = int32_t(a.num_experts / a.num_ranks);
  p.layout = a.layout_kind(), p.zero_tail = a.zero_tail != 0;
  p.capacity = int32_t(p.layout == Layout::kBatched ? N / p.num_local_experts : N);
  p.num_slots = int32_t(a.num_handle_slots()), p.alignment = int32_t(a.expert_alignment);
  p.dtype = DType(a.dtype), p.quantize = Quantize(a.quantize);
  const bool quantises = p.quantize != Quantize::kNone;
  p.x_bytes = quantises ? a.row_bytes * dtype_bytes(p.dtype) : a.row_bytes;
  p.x = b.arg<const char>(0, T * p.x_bytes);
  p.side = b.arg<const char>(1, quantises ? 0 : T * a.side_bytes);
  p.recv_x = b.ret<char>(0, N * a.row_bytes);
  p.recv_side = b.ret<char>(1, N * a.side_bytes);
  p.outputs.add(p.recv_x, N * a.row_bytes);
  if (p.recv_side) p.outputs.add(p.recv_side, N * a.side_bytes);
  p.num_blocks = a.num_blocks(rank);
  p.use_bulk = a.use_bulk(rank);
  return p;
}

int64_t scalars_bytes(const CallAttributes &a) {
  return a.num_rows * 4 * (a.layout_kind() == Layout::kToken ? a.num_topk : 1);
}

template <Part part>
ffi::Error dispatch(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs) {
  auto a = CallAttributes::read(attrs);
  if (!a) return a.error();
  auto rank = find_rank(a->key);
  if (!rank) return rank.error();
  Buffers b("dispatch", part, args, rets);
  const int64_t T = a->num_tokens, K = a->num_topk, R = a->num_ranks, N = a->num_rows, S = a->num_handle_slots();
  const int64_t L = a->num_experts / R;
  const bool has_weights = T > 0 && b.has_rows(3);
  const int64_t weights_bytes = has_weights ? scalars_bytes(*a) : 0;
  DispatchParams p = base_params(*a, **rank, b);
  p.topk_idx = b.arg<const int32_t>(2, T * K * 4);
  p.weights = b.arg<const float>(3, has_weights ? T * K * 4 : 0);
  p.window = b.arg<const int32_t>(4, 4);
  p.recv_weights = b.ret<float>(2, weights_bytes);
  p.slot_meta = b.ret<int32_t>(3, S * K * 4);
  p.slot_token = b.ret<int32_t>(4, S * 4);
  p.group_sizes = b.ret<int32_t>(5, L * 4);
  p.counts = b.ret<int32_t>(6, L * 4);
  p.stats = b.ret<int32_t>(7, 8 * 4);
  p.topk_clean = b.ret<int32_t>(8, T * K * 4);
  p.slot = b.ret<int32_t>(9, T * R * 4);
  p.dst_row = b.ret<int32_t>(10, T * K * 4);
  p.recv_offsets = b.ret<int32_t>(11, (R + 1) * 4);
  if (p.recv_weights) p.outputs.add(p.recv_weights, weights_bytes);
  p.outputs.add(p.slot_meta, S * K * 4);
  p.outputs.add(p.slot_token, S * 4);
  p.outputs.add(p.topk_clean, T * K * 4);
  p.outputs.add(p.slot, T * R * 4);
  p.outputs.add(p.dst_row, T * K * 4);
  p.outputs.add(p.recv_offsets, (R + 1) * 4); // -1 tells later calls with the handle (Session::has_handle)
  for (auto [at, n] : {std::pair{p.group_sizes, L}, {p.counts, L}, {p.stats, int64_t(8)}})
    p.outputs.add(at, n * 4, /*sizes=*/true);
  p.call = make_call(**rank, *a, Op::kDispatch, part, stream, {has_weights},
                     {{p.recv_x, N * a->row_bytes},
                      {p.recv_weights, weights_bytes},
                      {p.slot_meta, S * K * 4},
                      {p.slot_token, S * 4},
                      {p.recv_side, N * a->side_bytes}});
  return launch_part("dispatch", part, **rank, *a, p, b, stream, kLaunches);
}

template <Part part>
ffi::Error redispatch(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs) {
  auto a = CallAttributes::read(attrs);
  if (!a) return a.error();
  auto rank = find_rank(a->key);
  if (!rank) return rank.error();
  Buffers b("redispatch", part, args, rets);
  const int64_t T = a->num_tokens, K = a->num_topk, R = a->num_ranks, N = a->num_rows, S = a->num_handle_slots();
  const int64_t L = a->num_experts / R;
  const bool has_weights = T > 0 && b.has_rows(2);
  const int64_t weights_bytes = has_weights ? scalars_bytes(*a) : 0;
  DispatchParams p = base_params(*a, **rank, b);
  p.weights = b.arg<const float>(2, has_weights ? T * K * 4 : 0);
  p.topk_clean = b.arg<int32_t>(3, T * K * 4);
  p.slot = b.arg<int32_t>(4, T * R * 4);
  p.dst_row = b.arg<int32_t>(5, T * K * 4);
  p.slot_meta = b.arg<int32_t>(6, S * K * 4);
  p.slot_token = b.arg<int32_t>(7, S * 4);
  p.recv_offsets = b.arg<int32_t>(8, (R + 1) * 4);
  p.group_sizes = b.arg<int32_t>(9, L * 4);
  p.counts = b.arg<int32_t>(10, L * 4);
  p.recv_weights = b.ret<float>(2, weights_bytes);
  if (p.recv_weights) p.outputs.add(p.recv_weights, weights_bytes);
  p.call = make_call(**rank, *a, Op::kRedispatch, part, stream, {has_weights},
                     {{p.recv_x, N * a->row_bytes}, {p.recv_weights, weights_bytes}, {}, {}, {p.recv_side, N * a->side_bytes}});
  return launch_part("redispatch", part, **rank, *a, p, b, stream, kLaunches);
}

} // namespace

XLA_FFI_Handler *dispatch_handler(Part part, bool is_recordable) {
  switch (part) {
    case Part::kThroughput: return execute_handler<dispatch<Part::kThroughput>>(is_recordable);
    case Part::kLatency: return execute_handler<dispatch<Part::kLatency>>(is_recordable);
    case Part::kStart: return execute_handler<dispatch<Part::kStart>>(is_recordable);
    case Part::kDone: return execute_handler<dispatch<Part::kDone>>(is_recordable);
  }
  return nullptr;
}

XLA_FFI_Handler *redispatch_handler(Part part, bool is_recordable) {
  switch (part) {
    case Part::kThroughput: return execute_handler<redispatch<Part::kThroughput>>(is_recordable);
    case Part::kLatency: return execute_handler<redispatch<Part::kLatency>>(is_recordable);
    case Part::kStart: return execute_handler<redispatch<Part::kStart>>(is_recordable);
    case Part::kDone: return execute_handler<redispatch<Part::kDone>>(is_recordable);
  }
  return nullptr;
}

} // namespace jax_ep
