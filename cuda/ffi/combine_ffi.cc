// Target jax_ep_combine. Operand and result order: jax_ep/primitives.py; the last result is the scratch of the
// expert layout, added by the lowering.
#include "cuda/ffi/targets.h"

#include <cuda_runtime_api.h>

#include "cuda/ffi/call.h"
#include "cuda/kernels/combine_peer.h"

namespace jax_ep {
namespace {

ffi::Error combine(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   ffi::Dictionary attrs) {
  auto a = CallAttributes::read(attrs);
  if (!a) return a.error();
  auto rank = find_rank(a->key);
  if (!rank) return rank.error();
  Buffers b("combine", args, rets);
  const int64_t T = b.arg_dim(4, 0), K = a->num_topk, R = a->num_ranks, C = b.arg_dim(0, 0), S = b.arg_dim(7, 0);
  const bool is_token_layout = a->layout_kind() == Layout::kToken;
  CombineParams p{};
  p.num_tokens = int32_t(T), p.num_local_experts = int32_t(a->num_experts / R);
  p.layout = a->layout_kind(), p.dtype = DType(a->dtype), p.quantize = Quantize(a->quantize), p.y_bytes = a->row_bytes;
  p.num_blocks = a->num_sms ? int32_t(a->num_sms) : (*rank)->num_sms;
  p.use_bulk = a->use_bulk(**rank);
  const int64_t weights_bytes = b.arg_dim(1, 0) > 0 ? C * 4 : 0;
  const int64_t scalars_bytes = b.arg_dim(2, 0) > 0 ? C * 4 * (is_token_layout ? K : 1) : 0;
  const bool is_summed = has_partials(p.layout, p.quantize);
  const int64_t crossing_bytes = partial_row_bytes(p.y_bytes, p.dtype, p.quantize);
  const int64_t partial_bytes = is_summed ? S * crossing_bytes : 0;
  p.y = b.arg<const char>(0, C * a->row_bytes);
  p.weights = b.arg<const float>(1, weights_bytes);
  p.scalars = b.arg<const float>(2, scalars_bytes);
  p.bias = b.arg<const char>(3, b.arg_dim(3, 0) > 0 ? T * a->row_bytes : 0);
  p.topk_clean = b.arg<const int32_t>(4, T * K * 4);
  p.slot = b.arg<const int32_t>(5, T * R * 4);
  p.dst_row = b.arg<const int32_t>(6, T * K * 4);
  p.slot_meta = b.arg<const int32_t>(7, S * K * 4);
  p.slot_token = b.arg<const int32_t>(8, S * 4);
  p.recv_offsets = b.arg<const int32_t>(9, (R + 1) * 4);
  p.out = b.ret<char>(0, T * a->row_bytes);
  p.out_scalars = b.ret<float>(1, scalars_bytes ? T * K * 4 : 0);
  p.partial = b.ret<char>(2, partial_bytes);
  p.outputs.add(p.out, T * a->row_bytes);
  if (p.out_scalars) p.outputs.add(p.out_scalars, T * K * 4);
  // Peers read partial sums, and y itself where a token has one row here.
  const Shared y{p.y, C * a->row_bytes}, rows = is_summed ? Shared{p.partial, partial_bytes} : y;
  p.call = make_call(**rank, *a, Op::kCombine, {T, C, weights_bytes > 0, scalars_bytes > 0},
                     {rows, {p.scalars, scalars_bytes}, y, {p.weights, weights_bytes}, {}});
  p.call.row_bytes = crossing_bytes;
  if (!b.problem().empty()) return ffi::Error(ffi::ErrorCode::kInvalidArgument, b.problem());
  if (cudaError_t e = launch_combine(p, stream))
    return ffi::Error(ffi::ErrorCode::kInternal, std::string("combine: launch failed: ") + cudaGetErrorString(e));
  return ffi::Error::Success();
}

} // namespace

XLA_FFI_DEFINE_HANDLER(kCombine, combine,
                       ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .RemainingArgs().RemainingRets().Attrs());

XLA_FFI_Handler *combine_handler() { return kCombine; }

} // namespace jax_ep
