// Targets jax_ep_dispatch (routes) and jax_ep_redispatch (reuses a handle). Operand and result order:
// jax_ep/primitives.py.
#include "cuda/ffi/targets.h"

#include <cuda_runtime_api.h>

#include "cuda/ffi/call.h"
#include "cuda/kernels/dispatch_peer.h"

namespace jax_ep {
namespace {

// What both targets take from attributes and shapes; x is operand 0, side operand 1, recv_x and recv_side results 0 and 1.
DispatchParams base_params(const CallAttributes &a, const RankContext &rank, Buffers &b, int64_t num_slots) {
  DispatchParams p{};
  const int64_t T = b.arg_dim(0, 0), rows = b.ret_dim(0, 0);
  p.num_tokens = int32_t(T), p.num_experts = int32_t(a.num_experts);
  p.num_local_experts = int32_t(a.num_experts / a.num_ranks);
  p.layout = a.layout_kind(), p.zero_tail = a.zero_tail != 0;
  p.capacity = int32_t(p.layout == Layout::kBatched ? rows / p.num_local_experts : rows);
  p.num_slots = int32_t(num_slots), p.alignment = int32_t(a.expert_alignment);
  p.dtype = DType(a.dtype), p.quantize = Quantize(a.quantize);
  const bool quantises = p.quantize != Quantize::kNone;
  p.x_bytes = quantises ? a.row_bytes * dtype_bytes(p.dtype) : a.row_bytes;
  p.x = b.arg<const char>(0, T * p.x_bytes);
  p.side = b.arg<const char>(1, quantises ? 0 : T * a.side_bytes);
  p.recv_x = b.ret<char>(0, rows * a.row_bytes);
  p.recv_side = b.ret<char>(1, rows * a.side_bytes);
  p.outputs.add(p.recv_x, rows * a.row_bytes);
  if (p.recv_side) p.outputs.add(p.recv_side, rows * a.side_bytes);
  p.num_blocks = a.num_sms ? int32_t(a.num_sms) : rank.num_sms;
  p.use_bulk = a.use_bulk(rank);
  return p;
}

ffi::Error launch(const DispatchParams &p, const Buffers &buffers, cudaStream_t stream) {
  if (!buffers.problem().empty()) return ffi::Error(ffi::ErrorCode::kInvalidArgument, buffers.problem());
  if (cudaError_t e = launch_dispatch(p, stream))
    return ffi::Error(ffi::ErrorCode::kInternal, std::string("dispatch: launch failed: ") + cudaGetErrorString(e));
  return ffi::Error::Success();
}

int64_t scalars_bytes(const CallAttributes &a, int64_t rows) {
  return rows * 4 * (a.layout_kind() == Layout::kToken ? a.num_topk : 1);
}

ffi::Error dispatch(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    ffi::Dictionary attrs) {
  auto a = CallAttributes::read(attrs);
  if (!a) return a.error();
  auto rank = find_rank(a->key);
  if (!rank) return rank.error();
  Buffers b("dispatch", args, rets);
  const int64_t T = b.arg_dim(0, 0), K = a->num_topk, R = a->num_ranks, N = b.ret_dim(0, 0), S = b.ret_dim(3, 0);
  const int64_t L = a->num_experts / R;
  const bool has_weights = T > 0 && b.arg_dim(3, 0) > 0;
  const int64_t weights_bytes = has_weights ? scalars_bytes(*a, N) : 0;
  DispatchParams p = base_params(*a, **rank, b, S);
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
  for (auto [at, n] : {std::pair{p.group_sizes, L}, {p.counts, L}, {p.stats, int64_t(8)}, {p.recv_offsets, R + 1}})
    p.outputs.add(at, n * 4, /*sizes=*/true);
  p.call = make_call(**rank, *a, Op::kDispatch, {T, N, has_weights},
                     {{p.recv_x, N * a->row_bytes},
                      {p.recv_weights, weights_bytes},
                      {p.slot_meta, S * K * 4},
                      {p.slot_token, S * 4},
                      {p.recv_side, N * a->side_bytes}});
  return launch(p, b, stream);
}

ffi::Error redispatch(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                      ffi::Dictionary attrs) {
  auto a = CallAttributes::read(attrs);
  if (!a) return a.error();
  auto rank = find_rank(a->key);
  if (!rank) return rank.error();
  Buffers b("redispatch", args, rets);
  const int64_t T = b.arg_dim(0, 0), K = a->num_topk, R = a->num_ranks, N = b.ret_dim(0, 0), S = b.arg_dim(6, 0);
  const int64_t L = a->num_experts / R;
  const bool has_weights = T > 0 && b.arg_dim(2, 0) > 0;
  const int64_t weights_bytes = has_weights ? scalars_bytes(*a, N) : 0;
  DispatchParams p = base_params(*a, **rank, b, S);
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
  p.call = make_call(**rank, *a, Op::kRedispatch, {T, N, has_weights},
                     {{p.recv_x, N * a->row_bytes}, {p.recv_weights, weights_bytes}, {}, {}, {p.recv_side, N * a->side_bytes}});
  return launch(p, b, stream);
}

} // namespace

XLA_FFI_DEFINE_HANDLER(kDispatch, dispatch,
                       ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER(kRedispatch, redispatch,
                       ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .RemainingArgs().RemainingRets().Attrs());

XLA_FFI_Handler *dispatch_handler() { return kDispatch; }
XLA_FFI_Handler *redispatch_handler() { return kRedispatch; }

} // namespace jax_ep
