// From XLA's call frame to a kernel's parameters: what all handlers share.
//
// Shapes and dtypes were checked at trace time (jax_ep/shapes.py); handlers check only what Python cannot know:
// the device's binding, a failed group, and that each buffer holds the bytes that its kernel will touch.
#pragma once

#include <string>
#include <string_view>

#include "cuda/kernels/params.h"
#include "cuda/runtime/registry.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

namespace ffi = xla::ffi;

// Static facts of a call site, the same on all ranks (jax_ep/lowering.py writes them).
struct CallAttributes {
  std::string_view key; // names the arena: group, size class
  int64_t num_ranks, num_experts, num_topk, layout, expert_alignment, zero_tail;
  int64_t row_bytes, side_bytes; // of a received row (dispatch) or a row of the result (combine), and what lies beside it
  int64_t dtype, quantize;       // of the first operand; what becomes of it
  int64_t num_sms; // 0: the group's default
  int64_t staging_bytes, force_staged, force_vector, setup_timeout_ns, first_timeout_ns, timeout_ns;

  static ffi::ErrorOr<CallAttributes> read(const ffi::Dictionary &attrs);
  bool use_bulk(const RankContext &rank) const { return rank.has_bulk && !force_vector; }
  Layout layout_kind() const { return Layout(layout); }
  // Bytes of a row as it crosses, with its side array: what a staging window must hold one of.
  int64_t crossing_bytes() const {
    if (Quantize(quantize) == Quantize::kFp8Wire) return partial_row_bytes(row_bytes, DType(dtype), Quantize::kFp8Wire);
    return row_bytes + round_up(side_bytes, 16);
  }
};

// Buffers of a call by position; a wrong count or too few bytes becomes an error that names the operand.
class Buffers {
 public:
  Buffers(const char *op, ffi::RemainingArgs args, ffi::RemainingRets rets) : op_(op), args_(args), rets_(rets) {}
  template <class T> T *arg(size_t i, int64_t bytes) { return static_cast<T *>(get(args_.get<ffi::AnyBuffer>(i), "operand", i, bytes)); }
  template <class T> T *ret(size_t i, int64_t bytes) { return static_cast<T *>(get(ret_buffer(i), "result", i, bytes)); }
  int64_t arg_dim(size_t i, size_t dim) const;
  int64_t ret_dim(size_t i, size_t dim) const;
  const std::string &problem() const { return problem_; } // the first one, empty if all is well

 private:
  ffi::ErrorOr<ffi::AnyBuffer> ret_buffer(size_t i) const;
  void *get(ffi::ErrorOr<ffi::AnyBuffer> buffer, const char *kind, size_t i, int64_t bytes);

  const char *op_;
  ffi::RemainingArgs args_;
  ffi::RemainingRets rets_;
  std::string problem_;
};

// A buffer of this rank that peers touch.
struct Shared {
  const void *at = nullptr;
  int64_t bytes = 0;
};

// Everything in CallParams. `what` is hashed into the tag that ranks compare.
CallParams make_call(const RankContext &rank, const CallAttributes &a, Op op, std::initializer_list<int64_t> what,
                     const Shared (&shared)[kNumBuffers]);

// The context of the current device, or an error: not bound, or a failed group. CUDA's own ordinal is asked: XLA's
// DeviceOrdinal need not equal it when a process sees only some of its devices.
ffi::ErrorOr<const RankContext *> find_rank(std::string_view key);

// Instantiate handler of every target: binds the arena while the program compiles.
ffi::Error instantiate(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary attrs);
// Initialize handler of every target: meets the process' other devices before the first executions, and binds what
// no compilation in this process has bound.
ffi::Error initialize(ffi::RunId run, ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary attrs);

} // namespace jax_ep
