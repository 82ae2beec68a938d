// Target jax_ep_combine, in throughput and latency mode, whole and in halves. Operand and result order:
// jax_ep/primitives.py; in throughput mode the last result is the partial sums, added by the lowering.
#include "cuda/ffi/targets.h"

#include <cuda_runtime_api.h>

#include "cuda/ffi/call.h"
#include "cuda/kernels/combine_peer.h"

namespace jax_ep {
namespace {

constexpr Launches<CombineParams> kLaunches{launch_combine, launch_combine_nodes, launch_combine_latency};

template <Part part>
ffi::Error combine(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs) {
  auto a = CallAttributes::read(attrs);
  if (!a) return a.error();
  auto rank = find_rank(a->key);
  if (!rank) return rank.error();
  Buffers b("combine", part, args, rets);
  const int64_t T = a->num_tokens, K = a->num_topk, R = a->num_ranks, C = a->num_rows, S = a->num_handle_slots();
  const bool is_token_layout = a->layout_kind() == Layout::kToken;
  CombineParams p{};
  p.num_tokens = int32_t(T), p.num_local_experts = int32_t(a->num_experts / R);
  p.layout = a->layout_kind(), p.dtype = DType(a->dtype), p.quantize = Quantize(a->quantize), p.y_bytes = a->row_bytes;
  p.num_blocks = a->num_blocks(**rank);
  p.use_bulk = a->use_bulk(**rank);
  const int64_t weights_bytes = b.has_rows(1) ? C * 4 : 0;
  const int64_t scalars_bytes = b.has_rows(2) ? C * 4 * (is_token_layout ? K : 1) : 0;
  const bool is_summed = part == Part::kThroughput && has_partials(p.layout, p.quantize);
  const int64_t crossing_bytes = partial_row_bytes(p.y_bytes, p.dtype, p.quantize);
  const int64_t partial_bytes = is_summed ? S * crossing_bytes : 0;
  p.y = b.arg<const char>(0, C * a->row_bytes);
  p.weights = b.arg<const float>(1, weights_bytes);
  p.scalars = b.arg<const float>(2, scalars_bytes);
  p.bias = b.arg<const char>(3, b.has_rows(3) ? T * a->row_bytes : 0);
  p.topk_clean = b.arg<const int32_t>(4, T * K * 4);
  p.slot = b.arg<const int32_t>(5, T * R * 4);
  p.dst_row = b.arg<const int32_t>(6, T * K * 4);
  p.slot_meta = b.arg<const int32_t>(7, S * K * 4);
  p.slot_token = b.arg<const int32_t>(8, S * 4);
  p.recv_offsets = b.arg<const int32_t>(9, (R + 1) * 4);
  p.out = b.ret<char>(0, T * a->row_bytes);
  p.out_scalars = b.ret<float>(1, scalars_bytes ? T * K * 4 : 0);
  p.partial = part == Part::kThroughput ? b.ret<char>(2, partial_bytes) : nullptr;
  p.outputs.add(p.out, T * a->row_bytes);
  if (p.out_scalars) p.outputs.add(p.out_scalars, T * K * 4);
  // Peers read partial sums, and y itself where a token has one row here.
  const Shared y{p.y, C * a->row_bytes}, rows = is_summed ? Shared{p.partial, partial_bytes} : y;
  p.call = make_call(**rank, *a, Op::kCombine, part, stream, {weights_bytes > 0, scalars_bytes > 0},
                     {rows, {p.scalars, scalars_bytes}, y, {p.weights, weights_bytes}, {}});
  p.call.row_bytes = crossing_bytes;
  return launch_part("combine", part, **rank, *a, p, b, stream, kLaunches);
}

} // namespace

XLA_FFI_Handler *combine_handler(Part part, bool is_recordable) {
  switch (part) {
    case Part::kThroughput: return execute_handler<combine<Part::kThroughput>>(is_recordable);
    case Part::kLatency: return execute_handler<combine<Part::kLatency>>(is_recordable);
    case Part::kStart: return execute_handler<combine<Part::kStart>>(is_recordable);
    case Part::kDone: return execute_handler<combine<Part::kDone>>(is_recordable);
  }
  return nullptr;
}

} // namespace jax_ep
