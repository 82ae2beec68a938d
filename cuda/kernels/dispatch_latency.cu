// Dispatch, latency mode: a row goes into a fixed place of the receiver's own memory, chosen by its source and token, so
// that nobody announces anything first; the receiver finds out from everybody's ids where it belongs, and copies it there.
// That is one pass over memory more than transport "peer", and two flags' flight less. To a rank of another node it goes by way
// of this rank's own memory and its carrier (latency.cuh).
//
// Grid: num_blocks blocks of 512 threads, one per SM, resident together on all ranks of a GPU (a start or a done alone
// holds no SM while it waits for the other). The last block is the router. Steps (latency.cuh says who publishes what):
//   1 enter    a start's slot is free
//   2 route    router: counts the rank's tokens, tells every rank its arrivals, then a flag (slot_route.cuh)
//   3 send     the others: rows to the slots of the ranks that they reach (slot_rows.cuh), then a flag of each block
//   4 place    wait for everybody's arrivals; every block works out its share of the order by itself; zeros where no row comes
//   5 receive  wait for the rows; a warp loads a row once and stores it to every place in the result. No work for the router,
//              which finishes the handle meanwhile, unless it is the only block
//   6 end      the last block gives the slot back
// 2-3: start; 4-5: done; a fused call does both. Idea of fixed slots and a flag with the data: DeepEP's low-latency kernels.
#include <cmath>

#include "cuda/kernels/bulk.h"
#include "cuda/kernels/slot_route.cuh"
#include "cuda/kernels/slot_rows.cuh"

namespace jax_ep {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kMaxStage = 4 * 1024; // bytes of a row that a warp loads at a time
constexpr int kSmallestPiece = 1024;
constexpr int kPieceCost = 1024; // what a piece takes beside its bytes, in bytes
constexpr int kZeroPage = 1024;
constexpr int kMaxPacked = 4 * 1024; // bytes of shared memory that packing rows for other nodes may take

// Dynamic shared memory, planned on the host. Sending, routing and receiving use the room one after the other.
struct Plan {
  SlotPlan slots;
  int arenas, first_slot, invalid, bars, start, kept, zeros, packed, packed_words, room, bytes;
  SlotRoutePlan route;
  int send_pieces, receive_pieces;
  MovePlan send, receive;
};

JAX_EP_HD SlotShape slot_shape(const DispatchParams &p) {
  return {p.call.row_bytes, p.call.side_bytes, p.num_tokens, p.call.num_topk, p.num_experts + p.call.num_ranks};
}

// Equal pieces of a row: as many as let `warps` warps, each with a whole number of them, be done with `rows` rows first.
int pieces_of(int64_t row_bytes, int64_t unit, int64_t rows, int64_t warps) {
  const int64_t units = row_bytes / unit, most = row_bytes / kSmallestPiece;
  int64_t best = 1, least = INT64_MAX;
  for (int64_t pieces = 1; pieces == 1 || pieces <= most; ++pieces) {
    const int64_t cost = (rows * pieces + warps - 1) / warps * (row_bytes / pieces + kPieceCost);
    if (units % pieces == 0 && cost < least) best = pieces, least = cost;
  }
  return int(best);
}

// With routing the last block of several does nothing else: it would come late to its rows, and everybody waits for it.
JAX_EP_HD int mover_blocks(bool is_route, int num_blocks) { return is_route && num_blocks > 1 ? num_blocks - 1 : num_blocks; }

MovePlan move_plan(const DispatchParams &p, int64_t piece_bytes, bool quantises, int64_t side_bytes, int most_warps,
                   int64_t room) {
  MovePlan move{};
  if (quantises || p.use_bulk) {
    const int64_t most = quantises && !p.use_bulk ? kMaxStage / 2 : kMaxStage;
    const int64_t unit = quantises ? 128 * dtype_bytes(p.dtype) : 16, steps = (piece_bytes + most - 1) / most;
    move.stage_bytes = int(round_up((piece_bytes + steps - 1) / steps, unit));
    if (quantises) move.quant_bytes = int(move.stage_bytes / dtype_bytes(p.dtype)), move.scale_bytes = int(side_bytes);
  }
  const int warp_bytes = move.warp_bytes(p.use_bulk);
  move.num_warps = warp_bytes && room / warp_bytes < most_warps ? int(room / warp_bytes) : most_warps;
  return move;
}

Plan make_plan(const DispatchParams &p, bool is_route, bool packs) {
  Plan plan{};
  int64_t at = 0;
  auto take = [&](int64_t bytes) { const int64_t here = at; at = round_up(at + bytes, 128); return int(here); };
  const int64_t num_ranks = p.call.num_ranks;
  plan.slots = SlotPlan::make(p.call.shape);
  plan.arenas = take(num_ranks * 8);
  plan.first_slot = take((num_ranks + 1) * 4);
  plan.invalid = take(4);
  plan.bars = take(2 * kWarps * sizeof(BulkBarrier));
  plan.start = take(int64_t(p.num_local_experts) * 4);
  plan.kept = take(int64_t(p.num_local_experts) * 4);
  plan.zeros = take(p.use_bulk ? kZeroPage : 0);
  const int words = PackedRows::words_of(p.num_tokens);
  packs = packs && p.call.shape.has_nodes() && PackedRows::bytes(int(num_ranks), words) <= kMaxPacked;
  plan.packed_words = packs ? words : 0;
  plan.packed = take(packs ? PackedRows::bytes(int(num_ranks), words) : 0);
  plan.room = int(at);
  const int64_t shared = p.use_bulk ? kBulkSharedBytes : kVectorSharedBytes, room = shared - at;
  const bool quantises = p.quantize != Quantize::kNone;
  const int movers = mover_blocks(is_route, p.num_blocks);
  const int senders = p.weights ? kWarps - 1 : kWarps; // the last one sends weights
  // What a block receives if all is even.
  const double reached = num_ranks * (1 - std::pow(1 - 1.0 / num_ranks, p.call.num_topk));
  const int64_t received = int64_t(std::ceil(p.num_tokens * reached / movers));
  plan.send_pieces = pieces_of(p.x_bytes, quantises ? 128 * dtype_bytes(p.dtype) : 16, p.num_tokens, int64_t(senders) * movers);
  plan.receive_pieces = pieces_of(p.call.row_bytes, 16, received, kWarps);
  plan.send = move_plan(p, p.x_bytes / plan.send_pieces, quantises, p.call.side_bytes / plan.send_pieces, senders, room);
  plan.receive = move_plan(p, p.call.row_bytes / plan.receive_pieces, false, 0, kWarps, room);
  int64_t used = 0;
  for (const MovePlan &move : {plan.send, plan.receive}) {
    const int64_t bytes = int64_t(move.num_warps) * move.warp_bytes(p.use_bulk);
    if (bytes > used) used = bytes;
  }
  if (is_route) {
    plan.route = SlotRoutePlan::make(int(num_ranks), p.num_experts, p.call.num_topk, p.num_tokens, room);
    if (plan.route.bytes > used) used = plan.route.bytes;
  }
  plan.bytes = int(at + used);
  return plan;
}

// Functions of their own: inlined, the loops would cost each other their registers.
template <bool kBulk, class Source>
__device__ __noinline__ unsigned move_rows(const DispatchParams &p, const MovePlan &plan, char *room, BulkBarrier *bars,
                                           unsigned parity, Source source) {
  if constexpr (kBulk) return move_rows_bulk(p, plan, room, bars, parity, source);
  else move_rows_vector(p, plan, room, source);
  return parity;
}

template <bool kRoute, bool kBulk, bool kQuantize>
__global__ void __launch_bounds__(kThreads, 1)
    dispatch_latency_kernel(const __grid_constant__ DispatchParams p, const __grid_constant__ LatencyCall latency,
                            const __grid_constant__ Plan plan) {
  extern __shared__ __align__(128) char shared[];
  JAX_EP_STAMP_BEGIN(p.call.rank);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, num_ranks = p.call.num_ranks;
  const SlotShape shape = slot_shape(p);
  const int movers = mover_blocks(kRoute, gridDim.x);
  // Asked for together, before any of it is used: each takes a trip to memory, and waiting for flags empties the cache.
  const PackedRows packed{reinterpret_cast<uint32_t *>(shared + plan.packed), plan.packed_words};
  SlotRows<kQuantize> to_send(p, shape, packed, plan.send_pieces, plan.send.num_warps, movers);
  const int32_t window = kRoute && p.window ? *p.window : -1, handle_slots = kRoute ? 0 : p.recv_offsets[num_ranks];
  const int64_t first_row = window_start(p);
  SlotCall call(p.call, latency, plan.slots, shape, tag_with(p.call.tag, window), reinterpret_cast<char **>(shared + plan.arenas));
  if (call.is_broken()) { // a call before this one failed
    SlotCall::poison_results(p.outputs, int64_t(blockIdx.x) * kThreads + threadIdx.x, int64_t(gridDim.x) * kThreads);
    if (blockIdx.x == 0) call.dismiss_carrier();
    return;
  }
  to_send.parts = call.parts();
  int32_t *first_slot = reinterpret_cast<int32_t *>(shared + plan.first_slot);
  BulkBarrier *bars = reinterpret_cast<BulkBarrier *>(shared + plan.bars);
  char *room = shared + plan.room;
  const SlotRoute route(p, room, first_slot, reinterpret_cast<int32_t *>(shared + plan.invalid), first_row);
  const bool is_router = kRoute && blockIdx.x == gridDim.x - 1;
  if constexpr (kBulk) {
    if (threadIdx.x < 2 * kWarps) bulk_init(bars + threadIdx.x);
    for (int i = threadIdx.x; i < kZeroPage / 4; i += kThreads) reinterpret_cast<int *>(shared + plan.zeros)[i] = 0;
    bulk_fence(); // the page was written through the generic proxy, and so was x
  }
  unsigned parity = 0;
  OwnRows own{};
  bool has_cut_slots = false;

  FirstIds first_ids{};
  if (is_router) first_ids = begin_count(p, plan.route, room, route.invalid);

  // 1 enter
  bool ok = call.enter(latency, handle_slots); // and a barrier
  JAX_EP_STAMP(kEntered);
  if (ok && is_router) { // 2 route
    count_own(p, plan.route, shape, room, call.parts(), latency.sends, route.invalid, first_ids); // ends with a barrier
    JAX_EP_STAMP(kOwnCounted);
    if (latency.sends) call.publish_routed(shape);
    JAX_EP_STAMP(kRouted);
    bulk_fence(); // the room was used through the generic proxy, and a router that is alone sends, too
    __syncthreads();
  }
  if (ok && latency.sends) { // 3 send
    if (packed.words) count_packed(p, packed);   // several nodes
    if (p.call.shape.has_nodes()) bulk_fence(); // a carrier may have read, through the generic proxy, what is filled again
    if (warp == kWarps - 1) send_weights(p, call.parts(), shape, movers, lane);
    if (int(blockIdx.x) < movers) parity = move_rows<kBulk>(p, plan.send, room, bars, parity, to_send);
    __syncthreads(); // behind all stores
    JAX_EP_STAMP(kSent);
    const int64_t begin = p.weights ? shape.scalars() : shape.packed();
    call.publish_sent(shape, begin, [&](int rank) { return packed.rows_for(p, rank); });
    JAX_EP_STAMP(kFlagged);
  }
  call.write_ticket(latency);
  if (ok && latency.receives) {
    int32_t *start = reinterpret_cast<int32_t *>(shared + plan.start), *kept = reinterpret_cast<int32_t *>(shared + plan.kept);
    TokenRange slots{};
    // 4 place
    if constexpr (kRoute) {
      ok = call.wait_routed();
      JAX_EP_STAMP(kArrivalsHere);
      if (ok) {
        sum_counts(p, shape, call.slot(), route);
        own = own_rows<true>(p, first_row, route.shared(), start, kept);
        has_cut_slots = p.is_token_layout() && route.slots[p.call.rank] != own.num_slots;
        slots = place_arrivals(p, shape, call.slot(), route, movers);
        if (is_router) {
          write_sizes(p, first_row, [&](int s) { return first_slot[s + 1] - first_slot[s]; }, route.shared(), own);
          finish_own(p, route);
        }
        __syncthreads(); // slots are placed, first slots read
        if (p.is_token_layout())
          for (int s = threadIdx.x; s <= num_ranks; s += kThreads) first_slot[s] = in_capacity(p, first_row, first_slot[s]);
      }
    } else {
      for (int s = threadIdx.x; s <= num_ranks; s += kThreads) first_slot[s] = p.recv_offsets[s];
      own = own_rows<false>(p, first_row, route.shared(), start, kept); // ends with a barrier
      slots = block_share(own.num_slots);
    }
    if (ok) {
      JAX_EP_STAMP(kArrivalsPlaced);
      const SlotRowsReceived<kQuantize> rows(p, call.slot(), shape, first_slot, slots, plan.receive_pieces,
                                             plan.receive.num_warps);
      zero_rest<kRoute, kBulk>(p, 0, shared + plan.zeros, kZeroPage, own); // nobody's rows are needed for it
      JAX_EP_STAMP(kZeroed);
      bulk_fence(); // the room was read and written through the generic proxy
      // 5 receive
      ok = call.wait_sent(); // and a barrier
      JAX_EP_STAMP(kRowsHere);
      bulk_fence();          // sides and, without bulk copies, rows came through the generic proxy
      if (ok) move_rows<kBulk>(p, plan.receive, room, bars, parity, rows);
      JAX_EP_STAMP(kReceived);
    }
  }
  // 6 end
  if (call.end(latency, p.outputs, ok) && has_cut_slots) count_pairs(p, own);
  JAX_EP_STAMP(kEnd);
}

using Kernel = void (*)(DispatchParams, LatencyCall, Plan);
template <bool kRoute, bool kBulk> Kernel kernel_of(bool quantises) {
  return quantises ? dispatch_latency_kernel<kRoute, kBulk, true> : dispatch_latency_kernel<kRoute, kBulk, false>;
}
Kernel kernel_for(bool is_route, bool use_bulk, bool quantises) {
  if (is_route) return use_bulk ? kernel_of<true, true>(quantises) : kernel_of<true, false>(quantises);
  return use_bulk ? kernel_of<false, true>(quantises) : kernel_of<false, false>(quantises);
}

} // namespace

int max_latency_experts(int num_ranks) {
  // make_plan's room without bulk copies. Receiving: per rank a pointer, a first slot and two sums; per expert start, total and
  // two more, and its share of the own groups' start and kept. Counting, 32 tokens a segment: ids and places, arrivals of each
  // rank; per expert and rank a count and a word of bits.
  const double room = kVectorSharedBytes - 2048 - 32 * kMaxTopk * 4 - num_ranks * 24.0;
  const double receive = room / (16 + 8.0 / num_ranks);
  const double count = (room - 32 * kMaxTopk * 4 - num_ranks * 32.0 * 4) / (8 + 8.0 / num_ranks);
  const double most = receive < count ? receive : count;
  return most < 0 ? 0 : int(most);
}

cudaError_t launch_dispatch_latency(const DispatchParams &p, const LatencyCall &latency, cudaStream_t stream) {
  if (p.num_blocks < 1 || p.num_blocks > kMaxBlocks || p.call.shape.num_slots < 1) return cudaErrorInvalidConfiguration;
  const bool is_route = p.topk_idx != nullptr || p.stats != nullptr || p.window != nullptr;
  const int64_t most = p.use_bulk ? kBulkSharedBytes : kVectorSharedBytes;
  Plan plan = make_plan(p, is_route, true);
  if (plan.bytes > most) plan = make_plan(p, is_route, false); // as many experts as max_latency_experts leave no room
  if (plan.bytes > most || plan.send.num_warps < 1 || plan.receive.num_warps < 1) return cudaErrorInvalidConfiguration;
  const SlotShape shape = slot_shape(p);
  if (p.call.shape.num_slot_parts() * shape.bytes() > p.call.shape.slot_bytes()) return cudaErrorInvalidConfiguration;
  kernel_for(is_route, p.use_bulk, p.quantize != Quantize::kNone)<<<p.num_blocks, kThreads, plan.bytes, stream>>>(p, latency,
                                                                                                                   plan);
  return cudaGetLastError();
}

cudaError_t load_dispatch_latency_kernels() {
  cudaError_t e = cudaSuccess;
  for (int variant = 0; variant < 8 && !e; ++variant) {
    const bool use_bulk = variant / 4;
    e = load_kernel(kernel_for(variant & 1, use_bulk, variant & 2), use_bulk);
  }
  return e;
}

} // namespace jax_ep
