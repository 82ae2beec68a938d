// Targets jax_ep_dispatch (routes) and jax_ep_redispatch (reuses a handle). Operand and result order:
// jax_ep/primitives.py.
#include "cuda/ffi/targets.h"

#include <cuda_runtime_api.h>

#include "cuda/ffi/call.h"
#include "cuda/kernels/dispatch_peer.h"

namespace jax_ep {
namespace {

// What both targets take from attributes and shapes; T is x' first dimension, C that of recv_x.
DispatchParams base_params(const CallAttributes &a, const RankContext &rank, int64_t num_tokens, int64_t capacity,
                           int64_t num_slots) {
  DispatchParams p{};
  p.num_tokens = int32_t(num_tokens), p.num_experts = int32_t(a.num_experts);
  p.num_local_experts = int32_t(a.num_experts / a.num_ranks);
  p.capacity = int32_t(capacity), p.num_slots = int32_t(num_slots), p.alignment = int32_t(a.expert_alignment);
  p.layout = a.layout_kind(), p.zero_tail = a.zero_tail != 0;
  p.num_blocks = a.num_sms ? int32_t(a.num_sms) : rank.num_sms;
  p.use_bulk = rank.has_bulk;
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
  const int64_t T = b.arg_dim(0, 0), K = a->num_topk, R = a->num_ranks, C = b.ret_dim(0, 0), S = b.ret_dim(2, 0);
  const int64_t L = a->num_experts / R;
  const bool has_weights = T > 0 && b.arg_dim(2, 0) > 0;
  DispatchParams p = base_params(*a, **rank, T, C, S);
  p.x = b.arg<const char>(0, T * a->row_bytes);
  p.topk_idx = b.arg<const int32_t>(1, T * K * 4);
  p.weights = b.arg<const float>(2, has_weights ? T * K * 4 : 0);
  p.recv_x = b.ret<char>(0, C * a->row_bytes);
  p.recv_weights = b.ret<float>(1, has_weights ? scalars_bytes(*a, C) : 0);
  p.slot_meta = b.ret<int32_t>(2, S * K * 4);
  p.slot_token = b.ret<int32_t>(3, S * 4);
  p.group_sizes = b.ret<int32_t>(4, L * 4);
  p.counts = b.ret<int32_t>(5, L * 4);
  p.stats = b.ret<int32_t>(6, 8 * 4);
  p.topk_clean = b.ret<int32_t>(7, T * K * 4);
  p.slot = b.ret<int32_t>(8, T * R * 4);
  p.dst_row = b.ret<int32_t>(9, T * K * 4);
  p.recv_offsets = b.ret<int32_t>(10, (R + 1) * 4);
  p.outputs.add(p.recv_x, C * a->row_bytes);
  if (p.recv_weights) p.outputs.add(p.recv_weights, scalars_bytes(*a, C));
  p.outputs.add(p.slot_meta, S * K * 4);
  p.outputs.add(p.slot_token, S * 4);
  p.outputs.add(p.topk_clean, T * K * 4);
  p.outputs.add(p.slot, T * R * 4);
  p.outputs.add(p.dst_row, T * K * 4);
  for (auto [at, n] : {std::pair{p.group_sizes, L}, {p.counts, L}, {p.stats, int64_t(8)}, {p.recv_offsets, R + 1}})
    p.outputs.add(at, n * 4, /*sizes=*/true);
  p.call = make_call(**rank, *a, Op::kDispatch, {T, C, has_weights},
                     {{p.recv_x, C * a->row_bytes},
                      {p.recv_weights, p.recv_weights ? scalars_bytes(*a, C) : 0},
                      {p.slot_meta, S * K * 4},
                      {p.slot_token, S * 4}});
  return launch(p, b, stream);
}

ffi::Error redispatch(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                      ffi::Dictionary attrs) {
  auto a = CallAttributes::read(attrs);
  if (!a) return a.error();
  auto rank = find_rank(a->key);
  if (!rank) return rank.error();
  Buffers b("redispatch", args, rets);
  const int64_t T = b.arg_dim(0, 0), K = a->num_topk, R = a->num_ranks, C = b.ret_dim(0, 0), S = b.arg_dim(5, 0);
  const int64_t L = a->num_experts / R;
  const bool has_weights = T > 0 && b.arg_dim(1, 0) > 0;
  DispatchParams p = base_params(*a, **rank, T, C, S);
  p.x = b.arg<const char>(0, T * a->row_bytes);
  p.weights = b.arg<const float>(1, has_weights ? T * K * 4 : 0);
  p.topk_clean = b.arg<int32_t>(2, T * K * 4);
  p.slot = b.arg<int32_t>(3, T * R * 4);
  p.dst_row = b.arg<int32_t>(4, T * K * 4);
  p.slot_meta = b.arg<int32_t>(5, S * K * 4);
  p.slot_token = b.arg<int32_t>(6, S * 4);
  p.recv_offsets = b.arg<int32_t>(7, (R + 1) * 4);
  p.group_sizes = b.arg<int32_t>(8, L * 4);
  p.counts = b.arg<int32_t>(9, L * 4);
  p.recv_x = b.ret<char>(0, C * a->row_bytes);
  p.recv_weights = b.ret<float>(1, has_weights ? scalars_bytes(*a, C) : 0);
  p.outputs.add(p.recv_x, C * a->row_bytes);
  if (p.recv_weights) p.outputs.add(p.recv_weights, scalars_bytes(*a, C));
  p.call = make_call(**rank, *a, Op::kRedispatch, {T, C, has_weights},
                     {{p.recv_x, C * a->row_bytes},
                      {p.recv_weights, p.recv_weights ? scalars_bytes(*a, C) : 0},
                      {},
                      {}});
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
