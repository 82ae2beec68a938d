// Combine, latency mode: the holder sums its rows of a token and stores the sum straight into the token's place in the
// source's own memory; the source adds what came from each rank, with several nodes first of each node's ranks. To a rank of
// another node a sum goes by way of the holder's own memory and its carrier (latency.cuh).
//
// Grid: num_blocks blocks of 512 threads, one per SM, resident together on all ranks of a GPU (a start or a done alone
// holds no SM while it waits for the other). Steps (latency.cuh says who publishes what):
//   1 enter    the slot is free: its last call was received everywhere
//   2 send     a warp takes a piece of the rows of one (source, token) on this rank, and stores their sum; then a flag
//   3 receive  wait for all flags; a warp takes a piece of a token's sum from every rank that has one
//   4 end      the last block gives the slot back
// 2: start; 3: done; a fused call does both. Rounding tree: docs/concepts.md.
#include <cmath>

#include "cuda/kernels/bulk.h"
#include "cuda/kernels/combine_kernels.h"
#include "cuda/kernels/combine_sum.cuh"
#include "cuda/kernels/latency.cuh"

namespace jax_ep {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kBatch = 1024;         // sums that a block looks up at a time
constexpr int kSmallestPiece = 1024;

// Dynamic shared memory, planned on the host. Sending and receiving use the stages one after the other.
struct Plan {
  SlotPlan slots;
  int arenas, first_slot, bars, places, room, bytes;
  GatherPlan send, receive;
};

// Sums lie in the slot as rows do; there are no counts.
JAX_EP_HD SlotShape slot_shape(const CombineParams &p) { return {p.call.row_bytes, 0, p.num_tokens, p.call.num_topk, 0}; }

Plan make_plan(const CombineParams &p) {
  Plan plan{};
  int64_t at = 0;
  auto take = [&](int64_t bytes) { const int64_t here = at; at = round_up(at + bytes, 128); return int(here); };
  const int num_ranks = p.call.num_ranks, num_topk = p.call.num_topk;
  plan.slots = SlotPlan::make(p.call.shape);
  plan.arenas = take(int64_t(num_ranks) * 8);
  plan.first_slot = take((num_ranks + 1) * 4);
  plan.bars = take(2 * kWarps * sizeof(BulkBarrier));
  plan.places = take(kBatch * 8);
  plan.room = int(at);
  const int64_t room = kBulkSharedBytes - at;
  const int holders = num_ranks < num_topk ? num_ranks : num_topk;
  // As many pieces as give every warp of the grid one, since the first one takes longest.
  auto pieces = [&](int64_t row_bytes, double sums) {
    const int64_t wanted = int64_t(kWarps * p.num_blocks / (sums + 1) + 0.5), most = row_bytes / kSmallestPiece;
    const int64_t n = wanted < most ? wanted : most;
    return int(n < 1 ? 1 : n);
  };
  const double reached = num_ranks * (1 - std::pow(1 - 1.0 / num_ranks, num_topk)); // ranks of a token, with even routing
  plan.send = GatherPlan::make(p.y_bytes, kVectorUnit, p.layout == Layout::kToken ? 1 : num_topk,
                               pieces(p.y_bytes, p.num_tokens * reached), kWarps, room, p.use_bulk);
  plan.receive = GatherPlan::make(p.call.row_bytes, p.quantize == Quantize::kFp8Wire ? WireRow::kGroupBytes : kVectorUnit,
                                  holders, pieces(p.call.row_bytes, p.num_tokens), kWarps, room, p.use_bulk);
  const int64_t send = plan.send.shared_bytes(), receive = plan.receive.shared_bytes();
  plan.bytes = int(at + (send > receive ? send : receive));
  return plan;
}

// Where the sums of a batch go.
struct InPlaces {
  char *const *places;
  __device__ char *operator()(int index) const { return places[index]; }
};

// This block's share of the rank's slots. The token of the thread's first one is asked for with them, before the call is
// entered.
struct SlotShare {
  int begin, end, token;
  __device__ SlotShare(const CombineParams &p, int64_t num_slots)
      : begin(int(num_slots * blockIdx.x / gridDim.x)), end(int(num_slots * (blockIdx.x + 1) / gridDim.x)),
        token(begin + int(threadIdx.x) < end ? p.slot_token[begin + threadIdx.x] : 0) {}
};

// Its sums, with their scalars.
template <DType kType, bool kBulk, bool kWire>
__device__ __noinline__ unsigned send_sums(const CombineParams &p, const Plan &plan, const SlotShape &shape, char *shared,
                                           Parts parts, SlotShare share) {
  constexpr int kUnroll = kBulk ? 1 : 2;
  const int32_t *first_slot = reinterpret_cast<const int32_t *>(shared + plan.first_slot);
  char **places = reinterpret_cast<char **>(shared + plan.places);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int num_topk = p.call.num_topk;
  const bool is_token_layout = p.layout == Layout::kToken;
  unsigned parity = 0;
  for (int batch = share.begin; batch < share.end; batch += kBatch) {
    const int count = min(kBatch, share.end - batch);
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const int slot = batch + i, token = slot == share.begin + int(threadIdx.x) ? share.token : p.slot_token[slot];
      int source = 0;
      while (first_slot[source + 1] <= slot) ++source;
      int place = token;
      if (p.call.is_remote(source)) { // one after the other, by slots
        place = slot - first_slot[source];
        reinterpret_cast<int32_t *>(parts[source] + shape.packed())[token] = place;
      }
      places[i] = parts[source] + shape.rows() + place * shape.row_bytes;
      if (!p.scalars) continue;
      float *scalars = reinterpret_cast<float *>(parts[source] + shape.scalars()) + int64_t(token) * num_topk;
      for (int k = 0; k < num_topk; ++k) {
        const int meta = p.slot_meta[int64_t(slot) * num_topk + k];
        scalars[k] = meta < 0 ? 0.f : p.scalars[is_token_layout ? int64_t(slot) * num_topk + k : meta];
      }
    }
    __syncthreads();
    auto ask = [&](int index) { // which row of y lane k adds
      if (is_token_layout) return lane == 0 ? batch + index : -1;
      return lane < num_topk ? p.slot_meta[int64_t(batch + index) * num_topk + lane] : -1;
    };
    auto rows_of = [&](int, int row) {
      const float weight = row >= 0 && p.weights ? p.weights[row] : 1.f;
      const unsigned below = __ballot_sync(kFullWarp, row >= 0) & ((1u << lane) - 1);
      return in_order(row >= 0, __popc(below), p.y + row * p.y_bytes, weight, p.weights != nullptr);
    };
    auto sum_into = [&](auto store) {
      gather_sums<kBulk>(plan.send, {unsigned(warp), unsigned(plan.send.num_warps)}, count, shared + plan.room,
                         reinterpret_cast<BulkBarrier *>(shared + plan.bars), parity, ask, rows_of, store);
    };
    if constexpr (kWire) sum_into(StoreWire<kType, InPlaces>{{places}});
    else sum_into(StorePartial<kType, kUnroll, InPlaces>{{places}});
    __syncthreads(); // the places are read no more
  }
  __syncthreads();
  return parity;
}

// Lane k, if it is the first kept entry of its rank, holds that rank's sum of the token.
struct HeldSums {
  int expert, row;
  __device__ HeldSums() : expert(-1), row(-1) {}
  __device__ HeldSums(const CombineParams &p, int64_t token, int lane) {
    const int64_t at = token * p.call.num_topk + lane;
    const bool is_entry = lane < p.call.num_topk;
    expert = is_entry ? p.topk_clean[at] : -1;
    row = is_entry ? p.dst_row[at] : -1;
  }
  // `kNodes`: with the last one of each node's.
  template <bool kNodes>
  __device__ Rows rows(const CombineParams &p, const SlotShape &shape, const char *slot, int64_t token, int lane) const {
    const int rank = expert >= 0 && row >= 0 ? expert / p.num_local_experts : -1;
    const unsigned same = __match_any_sync(kFullWarp, rank >= 0 ? unsigned(rank) : 0x80000000u | lane);
    const bool is_first = rank >= 0 && (same & ((1u << lane) - 1)) == 0;
    const char *part = slot + rank * shape.bytes();
    int order = 0, place = int(token);
    bool is_last = true;
    if (kNodes && is_first && p.call.is_remote(rank)) place = reinterpret_cast<const int32_t *>(part + shape.packed())[token];
    for (unsigned left = __ballot_sync(kFullWarp, is_first); left; left &= left - 1) {
      const int other = __shfl_sync(kFullWarp, rank, __ffs(left) - 1);
      order += other < rank;
      if (kNodes && other > rank && p.call.node_of(other) == p.call.node_of(rank)) is_last = false;
    }
    Rows rows = in_order(is_first, order, part + shape.rows() + place * shape.row_bytes, 1.f, false);
    if constexpr (kNodes) rows.ends = bits_in_order(rows, is_last);
    return rows;
  }
};

// The first piece of a token's sum that this warp receives.
__device__ __forceinline__ unsigned first_piece() { return threadIdx.x / kWarpSize * gridDim.x + blockIdx.x; }

// This rank's tokens, from what all ranks left in its slot. `first`: what the handle says of the warp's first one, which was
// asked for before the block waited.
template <DType kType, bool kBulk, bool kWire, bool kNodes>
__device__ __noinline__ void receive_sums(const CombineParams &p, const Plan &plan, const SlotShape &shape, char *shared,
                                          const char *slot, HeldSums first, unsigned parity) {
  constexpr int kUnroll = kBulk ? 1 : 2;
  const int lane = threadIdx.x % kWarpSize, first_token = int(first_piece() / plan.receive.num_pieces);
  auto ask = [&](int index) { return index == first_token ? first : HeldSums(p, index, lane); };
  auto rows_of = [&](int index, const HeldSums &held) { return held.template rows<kNodes>(p, shape, slot, index, lane); };
  auto sum_into = [&](auto store) {
    gather_sums<kBulk>(plan.receive, {first_piece(), gridDim.x * plan.receive.num_warps}, p.num_tokens,
                       shared + plan.room, reinterpret_cast<BulkBarrier *>(shared + plan.bars), parity, ask, rows_of, store);
  };
  if constexpr (kWire) sum_into(StoreOutOfWire<kType, kNodes>{p.out, p.bias, p.y_bytes, 0});
  else if constexpr (kNodes) sum_into(StoreOutOfNodes<kType, kUnroll>{p.out, p.bias, p.y_bytes});
  else sum_into(StoreOut<kType, kUnroll>{p.out, p.bias, p.y_bytes, 0});
  if (!p.out_scalars) return;
  const int64_t end = int64_t(p.num_tokens) * p.call.num_topk;
  for (int64_t at = int64_t(blockIdx.x) * kThreads + threadIdx.x; at < end; at += int64_t(gridDim.x) * kThreads) {
    const int expert = p.topk_clean[at];
    const bool is_kept = expert >= 0 && p.dst_row[at] >= 0;
    const char *part = slot + (is_kept ? expert / p.num_local_experts : 0) * shape.bytes();
    p.out_scalars[at] = is_kept ? reinterpret_cast<const float *>(part + shape.scalars())[at] : 0.f;
  }
}

template <DType kType, bool kBulk, bool kWire>
__global__ void __launch_bounds__(kThreads, 1)
    combine_latency_kernel(const __grid_constant__ CombineParams p, const __grid_constant__ LatencyCall latency,
                           const __grid_constant__ Plan plan) {
  extern __shared__ __align__(128) char shared[];
  JAX_EP_STAMP_BEGIN(p.call.rank);
  const SlotShape shape = slot_shape(p);
  // Asked for together, before any of it is used: each takes a trip to memory.
  const int32_t num_slots = p.recv_offsets[p.call.num_ranks];
  SlotCall call(p.call, latency, plan.slots, shape, p.call.tag, reinterpret_cast<char **>(shared + plan.arenas));
  if (call.is_broken()) { // a call before this one failed
    SlotCall::poison_results(p.outputs, int64_t(blockIdx.x) * kThreads + threadIdx.x, int64_t(gridDim.x) * kThreads);
    if (blockIdx.x == 0) call.dismiss_carrier();
    return;
  }
  const SlotShare share(p, num_slots); // none of a handle that failed, whose number is negative
  int32_t *first_slot = reinterpret_cast<int32_t *>(shared + plan.first_slot);
  for (int r = threadIdx.x; r <= p.call.num_ranks; r += kThreads) first_slot[r] = p.recv_offsets[r];
  if (kBulk && threadIdx.x < 2 * kWarps) bulk_init(reinterpret_cast<BulkBarrier *>(shared + plan.bars) + threadIdx.x);
  bulk_fence(); // y was written through the generic proxy, by an earlier kernel
  unsigned parity = 0;
  // 1 enter
  bool ok = call.enter(latency, num_slots); // and a barrier
  JAX_EP_STAMP(kEntered);
  if (ok && latency.sends) { // 2 send
    parity = send_sums<kType, kBulk, kWire>(p, plan, shape, shared, call.parts(), share); // ends with a barrier behind all stores
    JAX_EP_STAMP(kSent);
    call.publish_sent(shape, p.scalars ? shape.scalars() : shape.packed(),
                      [&](int rank) { return first_slot[rank + 1] - first_slot[rank]; });
    JAX_EP_STAMP(kFlagged);
  }
  call.write_ticket(latency);
  if (ok && latency.receives) { // 3 receive
    HeldSums first;
    const int token = int(first_piece() / plan.receive.num_pieces);
    if (token < p.num_tokens) first = HeldSums(p, token, threadIdx.x % kWarpSize);
    bulk_fence(); // stages were read and written through the generic proxy
    ok = call.wait_sent(); // and a barrier
    JAX_EP_STAMP(kRowsHere);
    bulk_fence();          // sums came through the generic proxy
    if (ok && p.call.shape.has_nodes())
      receive_sums<kType, kBulk, kWire, true>(p, plan, shape, shared, call.slot(), first, parity);
    else if (ok) receive_sums<kType, kBulk, kWire, false>(p, plan, shape, shared, call.slot(), first, parity);
    JAX_EP_STAMP(kReceived);
  }
  call.end(latency, p.outputs, ok); // 4
  JAX_EP_STAMP(kEnd);
}

struct Named {
  template <DType kType, bool kBulk, bool kWire> static auto kernel() { return combine_latency_kernel<kType, kBulk, kWire>; }
};
using Kernels = CombineKernels<Named>;

} // namespace

cudaError_t launch_combine_latency(const CombineParams &p, const LatencyCall &latency, cudaStream_t stream) {
  if (p.num_blocks < 1 || p.num_blocks > kMaxBlocks || p.call.shape.num_slots < 1) return cudaErrorInvalidConfiguration;
  const Plan plan = make_plan(p);
  const auto kernel = Kernels::get(p.dtype, p.use_bulk, p.quantize == Quantize::kFp8Wire);
  if (!kernel || plan.send.num_warps < 1 || plan.receive.num_warps < 1) return cudaErrorInvalidConfiguration;
  const SlotShape shape = slot_shape(p);
  if (p.call.shape.num_slot_parts() * shape.bytes() > p.call.shape.slot_bytes()) return cudaErrorInvalidConfiguration;
  kernel<<<p.num_blocks, kThreads, plan.bytes, stream>>>(p, latency, plan);
  return cudaGetLastError();
}

cudaError_t load_combine_latency_kernels() { return Kernels::load(); }

} // namespace jax_ep
