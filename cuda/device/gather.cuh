// Sums of rows that lie anywhere in reachable memory: the inner loop of combine, on one rank and across ranks.
//
// A warp takes one piece of one sum at a time. `Rows` says where the sum's rows lie (lane i holds the i-th); their
// bytes come through shared memory in two stages (bulk copies: one stage is filled while the other is summed), or
// straight into registers (vectors). The caller's sink gets 16 bytes of the i-th row from `fetch`.
#pragma once

#include <utility>

#include "cuda/device/copy.cuh"

namespace jax_ep {

// The rows of one sum. Lane i < count holds the address of row i of the sum; its factor may still be on its way from
// memory when the row is fetched, so it stays in the lane that asked for it until
// GatherStep::weight_in_order.
struct Rows {
  const char *src;
  float weight;
  int weight_lane;    // where row i's factor is
  unsigned is_scaled; // bit i: row i has a factor
  int count;          // the same in all lanes
  unsigned ends = 0;  // bit i: row i is the last one of a sum within the sum, for sinks that add those up first
};

// For `ends`, by lanes that gave `in_order` a row.
__device__ __forceinline__ unsigned bits_in_order(const Rows &rows, bool bit) {
  const bool is_set = __shfl_sync(kFullWarp, int(bit), rows.weight_lane) != 0;
  return __ballot_sync(kFullWarp, is_set) & (rows.count < kWarpSize ? (1u << rows.count) - 1 : kFullWarp);
}

// Rows scattered over the lanes of a warp (`has_row`, each with its own place `order` < number of rows).
__device__ __forceinline__ Rows in_order(bool has_row, int order, const char *src, float weight, bool is_scaled) {
  const int lane = threadIdx.x % kWarpSize;
  const int count = __popc(__ballot_sync(kFullWarp, has_row));
  int from = lane;
  for (int i = 0; i < count; ++i) {
    const unsigned at = __ballot_sync(kFullWarp, has_row && order == i);
    if (lane == i) from = __ffs(at) - 1;
  }
  const auto bits = __shfl_sync(kFullWarp, reinterpret_cast<unsigned long long>(src), from);
  const bool scaled = __shfl_sync(kFullWarp, int(is_scaled), from) != 0 && lane < count;
  return {reinterpret_cast<const char *>(bits), weight, from, __ballot_sync(kFullWarp, scaled), count};
}

// How rows are cut, planned on the host.
struct GatherPlan {
  int row_bytes;   // of a source row
  int unit;        // cuts lie at multiples of it
  int piece_bytes; // what a warp takes of a row before it takes the next one; a multiple of the unit
  int num_pieces;
  int stage_bytes; // shared memory of one stage; 0 with vectors
  int num_warps;   // per block

  // For sums of up to `max_rows` rows. With bulk copies: stages for at most `max_warps` warps, fewer if each can then
  // hold kStageUnits units of the rows that a sum is likely to have, and one of the most that it can have.
  static GatherPlan make(int64_t row_bytes, int unit, int max_rows, int num_pieces, int max_warps, int64_t room,
                         bool use_bulk) {
    const int units = int((row_bytes + unit - 1) / unit);
    if (num_pieces > units) num_pieces = units;
    const int piece = (units + num_pieces - 1) / num_pieces * unit;
    GatherPlan g{int(row_bytes), unit, piece, int((row_bytes + piece - 1) / piece), 0, max_warps};
    if (!use_bulk) return g;
    const int likely = max_rows < kLikelyRows ? max_rows : kLikelyRows;
    for (; g.num_warps > 0; --g.num_warps) {
      g.stage_bytes = int(room / (2 * g.num_warps) / 128 * 128);
      const bool is_enough = g.num_warps <= kFewWarps || g.stage_bytes >= int64_t(kStageUnits) * unit * likely;
      if (is_enough && g.stage_bytes >= int64_t(unit) * max_rows) break;
    }
    return g;
  }
  static constexpr int kStageUnits = 2, kLikelyRows = 6, kFewWarps = 8;
  JAX_EP_HD int64_t shared_bytes() const { return int64_t(2) * num_warps * stage_bytes; }
};

// One step of a warp: bytes [begin, end) of the rows of one sum. What the sink needs of them, in few registers.
struct GatherStep {
  int index; // which sum
  int begin, end;
  int count;          // rows
  unsigned is_scaled; // as in Rows, and so are these
  float weight;
  int weight_lane;
  unsigned ends;

  __device__ float weight_in_order() const { return __shfl_sync(kFullWarp, weight, weight_lane); }
};

// The steps of one warp, one after the other. Where a sum's rows lie is looked up in two parts, both by the whole warp:
// `ask(index)` starts the loads, while the sum before is still under way, and `rows_of(index, answer)` uses them.
template <class Ask, class RowsOf> class GatherSteps {
 public:
  __device__ GatherSteps(const GatherPlan &plan, unsigned num_sums, unsigned first, unsigned stride, Ask ask,
                         RowsOf rows_of)
      : plan_(plan), ask_(ask), rows_of_(rows_of), items_(num_sums * plan.num_pieces), item_(first), stride_(stride) {
    if (item_ < items_) answer_ = ask_(int(item_ / plan_.num_pieces));
  }

  __device__ bool next(GatherStep &step) {
    if (at_ >= end_) {
      if (item_ >= items_) return false;
      index_ = int(item_ / plan_.num_pieces);
      rows_ = rows_of_(index_, answer_);
      at_ = int(item_ % plan_.num_pieces) * plan_.piece_bytes;
      end_ = min(at_ + plan_.piece_bytes, plan_.row_bytes);
      chunk_ = plan_.piece_bytes;
      const int stage = plan_.stage_bytes;
      if (stage && rows_.count * chunk_ > stage) { // equal steps that fit
        const int fit = stage / (rows_.count * plan_.unit), units = chunk_ / plan_.unit;
        const int steps = (units + fit - 1) / fit;
        chunk_ = (units + steps - 1) / steps * plan_.unit;
      }
      if ((item_ += stride_) < items_) answer_ = ask_(int(item_ / plan_.num_pieces));
    }
    step = {index_, at_, min(at_ + chunk_, end_), rows_.count, rows_.is_scaled, rows_.weight, rows_.weight_lane, rows_.ends};
    at_ = step.end;
    return true;
  }
  // Where this lane's row of the latest step lies.
  __device__ const char *src() const { return rows_.src; }

 private:
  const GatherPlan &plan_;
  Ask ask_;
  RowsOf rows_of_;
  unsigned items_, item_, stride_; // item_: the next one
  decltype(std::declval<Ask>()(0)) answer_{};
  int index_ = 0, at_ = 0, end_ = 0, chunk_ = 0;
  Rows rows_{};
};

// Warps that share sums: `warp` of `num_warps`.
struct WarpShare { unsigned warp, num_warps; };

// Runs sums [0, num_sums) through `sink(step, fetch)`. `fetch(i, at)` is what a lane finds at byte `at` of row i; all
// lanes call it together, those that want nothing with `at` < 0. `room`: the block's stages; `bars`: two barriers per
// warp; `parity`: of both, kept between calls. `kOnce`: nobody reads the rows again soon, and other things in the L2 cache
// are worth more.
template <bool kBulk, bool kOnce = false, class Ask, class RowsOf, class Sink>
__device__ __forceinline__ void gather_sums(const GatherPlan &plan, WarpShare share, unsigned num_sums, char *room,
                                            BulkBarrier *bars, unsigned &parity, Ask ask, RowsOf rows_of, Sink sink) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  if (warp >= plan.num_warps) return;
  GatherSteps<Ask, RowsOf> steps(plan, num_sums, share.warp, share.num_warps, ask, rows_of);
  GatherStep now;
  if constexpr (!kBulk) {
    while (steps.next(now)) {
      sink(now, [&](int i, int at) {
        const auto src = __shfl_sync(kFullWarp, reinterpret_cast<unsigned long long>(steps.src()), i);
        return at >= 0 ? load_row(reinterpret_cast<const char *>(src) + at) : int4{};
      });
    }
  } else {
    char *stages = room + int64_t(2) * warp * plan.stage_bytes;
    BulkBarrier *bar = bars + 2 * warp;
    bool has_now = false;
    for (int stage = 0;; stage ^= 1) { // of `now`
      GatherStep coming;
      const bool has_coming = steps.next(coming);
      if (has_coming && coming.count) {
        const int bytes = coming.end - coming.begin;
        BulkBarrier *there = bar + (stage ^ 1);
        if (lane == 0) bulk_expect(there, unsigned(bytes * coming.count));
        __syncwarp(); // bytes are expected before the first of them can arrive
        if (lane < coming.count) {
          char *to = stages + (stage ^ 1) * plan.stage_bytes + lane * bytes;
          if constexpr (kOnce) bulk_load(to, steps.src() + coming.begin, unsigned(bytes), there, bulk_once());
          else bulk_load(to, steps.src() + coming.begin, unsigned(bytes), there);
        }
      }
      if (has_now) {
        if (now.count) {
          bulk_wait_loaded(bar + stage, parity >> stage & 1);
          parity ^= 1u << stage;
        }
        const char *here = stages + stage * plan.stage_bytes - now.begin;
        const int bytes = now.end - now.begin;
        sink(now, [&](int i, int at) {
          return at >= 0 ? *reinterpret_cast<const int4 *>(here + i * bytes + at) : int4{};
        });
        __syncwarp();
        bulk_fence_shared(); // lanes have read the stage before the copy engine refills it
      }
      if (!has_coming) return;
      now = coming, has_now = true;
    }
  }
}

} // namespace jax_ep
