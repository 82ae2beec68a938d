// From XLA's call frame to a kernel's parameters: what all handlers share.
//
// Shapes and dtypes were checked at trace time (jax_ep/shapes.py); handlers check only what Python cannot know:
// the device's binding, a failed group, and that each buffer holds the bytes that its kernel will touch.
#pragma once

#include <string>
#include <string_view>

#include "cuda/ffi/targets.h"
#include "cuda/kernels/latency.h"
#include "cuda/kernels/nodes.h"
#include "cuda/runtime/registry.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

namespace ffi = xla::ffi;

// Static facts of a call site, the same on all ranks (jax_ep/lowering.py writes them).
struct CallAttributes {
  std::string_view key; // names the arena: group, size class
  int64_t num_ranks, num_experts, num_topk, layout, expert_alignment, zero_tail;
  int64_t num_tokens, num_rows;  // of a rank; rows of recv_x (dispatch) or y (combine)
  int64_t row_bytes, side_bytes; // of a received row (dispatch) or a row of the result (combine), and what lies beside it
  int64_t dtype, quantize;       // of the first operand; what becomes of it
  int64_t num_sms;   // 0: the group's default
  int64_t num_slots; // of the arena; 0: throughput mode
  int64_t num_nodes, num_carriers, chunk_tokens, put_delay_ns; // 1: one node; the rest for more
  int64_t staging_bytes, force_staged, force_vector, setup_timeout_ns, first_timeout_ns, timeout_ns;

  static ffi::ErrorOr<CallAttributes> read(const ffi::Dictionary &attrs);
  bool use_bulk(const RankContext &rank) const { return rank.has_bulk && !force_vector; }
  int32_t num_blocks(const RankContext &rank) const;
  Layout layout_kind() const { return Layout(layout); }
  // Rows of the handle's slot arrays, of which each is a distinct (source, token) that reaches this rank.
  int64_t num_handle_slots() const { return layout_kind() == Layout::kToken ? num_rows : num_ranks * num_tokens; }
  // Bytes of a row as it crosses, with its side array: what a staging window must hold one of.
  int64_t crossing_bytes() const {
    if (num_nodes > 1 && !num_slots) return row_bytes + round_up(side_bytes, 16); // sums of nodes are not quantised
    if (Quantize(quantize) == Quantize::kFp8Wire) return partial_row_bytes(row_bytes, DType(dtype), Quantize::kFp8Wire);
    return row_bytes + round_up(side_bytes, 16);
  }
};

// Buffers of a call by their position in the whole operation, whichever part of it this is; a wrong count or too few
// bytes becomes an error that names the operand.
class Buffers {
 public:
  Buffers(const char *op, Part part, ffi::RemainingArgs args, ffi::RemainingRets rets)
      : op_(op), part_(part), args_(args), rets_(rets) {}
  template <class T> T *arg(size_t i, int64_t bytes) { return static_cast<T *>(operand(i + (part_ == Part::kDone), bytes)); }
  // Null in a start, which has none of the results.
  template <class T> T *ret(size_t i, int64_t bytes) {
    return part_ == Part::kStart ? nullptr : static_cast<T *>(result(i, bytes));
  }
  bool has_rows(size_t i) const; // of an operand that may be absent
  LatencyCall latency();         // with the ticket: a result of a start, the first operand of a done
  const std::string &problem() const { return problem_; } // the first one, empty if all is well

 private:
  void *operand(size_t i, int64_t bytes) { return get(args_.get<ffi::AnyBuffer>(i), "operand", i, bytes); }
  void *result(size_t i, int64_t bytes);
  void *get(ffi::ErrorOr<ffi::AnyBuffer> buffer, const char *kind, size_t i, int64_t bytes);

  const char *op_;
  Part part_;
  ffi::RemainingArgs args_;
  ffi::RemainingRets rets_;
  std::string problem_;
};

// A buffer of this rank that peers touch.
struct Shared {
  const void *at = nullptr;
  int64_t bytes = 0;
};

// Everything in CallParams. The tag that ranks compare is a hash of what all of them must have alike, and of `what`; it
// is the same for start and done. On a stream that records, all of it holds for every replay: what depends on addresses
// is decided anew because XLA records anew when one of them changes, and numbers that count calls are the device's.
CallParams make_call(const RankContext &rank, const CallAttributes &a, Op op, Part part, cudaStream_t stream,
                     std::initializer_list<int64_t> what, const Shared (&shared)[kNumBuffers]);

// Starts the carrier of a call over several nodes, unless a rank of this one cannot reach a buffer (in latency mode none is
// touched): then what to say.
std::string start_carrier(const RankContext &rank, const CallAttributes &a, const CallParams &call, int num_blocks,
                          bool is_latency, cudaStream_t stream);

// How an operation is launched: on one node in throughput mode, on several, and in latency mode.
template <class Params> struct Launches {
  cudaError_t (*one)(Params, cudaStream_t);
  cudaError_t (*nodes)(Params, cudaStream_t);
  cudaError_t (*latency)(const Params &, const LatencyCall &, cudaStream_t);
};

// Hands complete parameters to the launch that they are for, unless a buffer was wrong.
template <class Params>
ffi::Error launch_part(const char *op, Part part, const RankContext &rank, const CallAttributes &a, Params &p, Buffers &b,
                       cudaStream_t stream, const Launches<Params> &launches) {
  const LatencyCall latency = b.latency();
  if (part == Part::kStart) { // there is nothing to poison but the ticket
    p.outputs = Outputs{};
    p.outputs.add(latency.ticket_result, 8, /*sizes=*/true);
  }
  if (!b.problem().empty()) return ffi::Error(ffi::ErrorCode::kInvalidArgument, b.problem());
  const bool is_latency = part != Part::kThroughput;
  if (a.num_nodes > 1) {
    const std::string problem = start_carrier(rank, a, p.call, p.num_blocks, is_latency, stream);
    if (!problem.empty()) return ffi::Error(ffi::ErrorCode::kInvalidArgument, std::string(op) + ": " + problem);
  }
  if (cudaError_t e = is_latency        ? launches.latency(p, latency, stream)
                      : a.num_nodes > 1 ? launches.nodes(p, stream)
                                        : launches.one(p, stream))
    return ffi::Error(ffi::ErrorCode::kInternal, std::string(op) + ": launch failed: " + cudaGetErrorString(e));
  return ffi::Error::Success();
}

// The context of the current device, or an error: not bound, or a failed group. CUDA's own ordinal is asked: XLA's
// DeviceOrdinal need not equal it when a process sees only some of its devices.
ffi::ErrorOr<const RankContext *> find_rank(std::string_view key);

using Execute = ffi::Error(cudaStream_t, ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary);
// `is_recordable`: XLA may record the call into a command buffer, which replays the kernel without coming here again.
template <Execute execute> XLA_FFI_Handler *execute_handler(bool is_recordable) {
  XLA_FFI_DEFINE_HANDLER(kLaunched, execute,
                         ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>()
                             .RemainingArgs().RemainingRets().Attrs());
  XLA_FFI_DEFINE_HANDLER(kRecordable, execute,
                         ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>()
                             .RemainingArgs().RemainingRets().Attrs(),
                         {ffi::Traits::kCmdBufferCompatible});
  return is_recordable ? kRecordable : kLaunched;
}

// Instantiate handler of every target: binds the arena while the program compiles.
ffi::Error instantiate(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary attrs);
// Initialize handler of every target: meets the process' other devices before the first executions, and binds what
// no compilation in this process has bound.
ffi::Error initialize(ffi::RunId run, ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary attrs);
// The same for targets that may be recorded. XLA runs this stage before every execution, replayed or not, so this is where
// the failure of an earlier call is found when nothing else of ours runs on the host.
ffi::Error initialize_recordable(ffi::RunId run, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs);

} // namespace jax_ep
