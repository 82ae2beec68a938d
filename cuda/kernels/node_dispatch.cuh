// Dispatch over nodes: a token goes once to each other node that it reaches, with its side, weights, and the rows that it
// becomes there; the partner there stores it to those rows, as a source does with its own tokens.
#pragma once

#include "cuda/kernels/move.cuh"
#include "cuda/kernels/nodes.cuh"

namespace jax_ep {

// The tokens of a round to their rows on this node and to the chunks of the others: a row is read once, and stored to each.
template <bool kRoute, bool kQuantizes> struct RoundRows {
  struct Item {
    Destination to; // lane k: entry k
    int place;      // lane n: the place in the chunk for node n, -1: none
  };
  static constexpr bool kQuantize = kQuantizes;
  const DispatchParams &p;
  const PeerBuffers *peers;
  const NodeLinks &links;
  int round, first, index, step, size;
  bool takes_sides;

  __device__ RoundRows(const DispatchParams &p_, const PeerBuffers *peers_, const NodeLinks &links_, int round_, const MovePlan &plan)
      : p(p_), peers(peers_), links(links_), round(round_), index(int(threadIdx.x / kWarpSize)), step(plan.num_warps),
        takes_sides(plan.taken_bytes != 0) {
    const TokenRange range = links.tokens(round);
    first = range.begin, size = range.end - range.begin;
  }
  __device__ Item next(int lane) {
    for (; index < size; index += step) {
      const bool is_other = lane < links.num_nodes && lane != links.own;
      const Item item{Destination(p, peers, first + index, lane), is_other ? links.places(round, lane)[index] : -1};
      const bool has_slot = kRoute && item.to.slot >= 0 && peers[item.to.rank].is_reachable(); // as next_destination
      if (!__any_sync(kFullWarp, item.to.is_kept || has_slot || item.place >= 0)) continue;
      index += step;
      return item;
    }
    return {Destination(), -1};
  }
  __device__ bool is_end(const Item &item) const { return item.to.token == INT_MAX; }
  __device__ int bytes() const { return int(p.x_bytes); }
  __device__ const char *src(const Item &item) const { return p.x + item.to.token * p.x_bytes; }
  __device__ char *dst(const Item &item) const {
    return item.to.has_row ? peers[item.to.rank].at[kRows] + item.to.row * p.call.row_bytes : nullptr;
  }
  __device__ char *second(const Item &item) const {
    if (item.place < 0) return nullptr;
    return links.record(links.records_out(round, int(threadIdx.x % kWarpSize)), item.place);
  }
  __device__ const char *side_src(const Item &item) const { return p.side + item.to.token * p.call.side_bytes; }
  __device__ char *side_dst(const Item &item) const {
    return item.to.has_row ? peers[item.to.rank].at[kSide] + item.to.row * p.call.side_bytes : nullptr;
  }
  __device__ char *second_side(const Item &item) const {
    char *record = second(item);
    return record ? record + links.plan.cell.side() : nullptr;
  }
  __device__ void finish(const Item &item, const char *scales, int lane) const {
    char *record = second(item);
    if (p.recv_side && !takes_sides) {
      const char *side = kQuantize ? scales : side_src(item);
      copy_side(side, side_dst(item), p.call.side_bytes, lane);
      copy_side(side, second_side(item), p.call.side_bytes, lane);
    }
    send_scalars<kRoute>(p, peers, item.to, lane);
    // Of entries on other nodes, too, which have no row here; a weight is what the user gave.
    const int expert = item.to.expert, row = item.to.row;
    for (unsigned left = __ballot_sync(kFullWarp, record != nullptr); left; left &= left - 1) {
      const int node = __ffs(left) - 1;
      char *line = reinterpret_cast<char *>(__shfl_sync(kFullWarp, reinterpret_cast<unsigned long long>(record), node)) +
                   links.plan.cell.line();
      links.write_line(line, node, item.to.token, expert, row, item.to.weight, p.slot + int64_t(item.to.token) * p.call.num_ranks,
                       p.num_local_experts);
    }
  }
};
template <bool kRoute, bool kQuantize> constexpr bool kHasSecond<RoundRows<kRoute, kQuantize>> = true;
template <bool kRoute, bool kQuantize> constexpr bool kTakesSides<RoundRows<kRoute, kQuantize>> = true;
template <bool kRoute, bool kQuantize> constexpr bool kReadsOnce<RoundRows<kRoute, kQuantize>> = true;
template <bool kRoute, bool kQuantize> constexpr bool kWritesOnce<RoundRows<kRoute, kQuantize>> = true;

// The chunks of a round that came from other nodes, to their rows on this one.
template <bool kRoute> struct HandedRows {
  struct Item {
    Destination to;
    const char *record; // null: past the last
  };
  static constexpr bool kQuantize = false;
  const DispatchParams &p;
  const PeerBuffers *peers;
  const NodeLinks &links;
  int round, node = -1, index, count = 0, step; // warps take turns, whatever node a record came from

  __device__ HandedRows(const DispatchParams &p_, const PeerBuffers *peers_, const NodeLinks &links_, int round_, int num_warps)
      : p(p_), peers(peers_), links(links_), round(round_), index(int(threadIdx.x / kWarpSize)), step(num_warps) {}
  __device__ Item next(int lane) {
    const NodeCell &cell = links.plan.cell;
    Item item{};
    while (true) {
      while (index >= count) {
        if (++node >= links.num_nodes) {
          node = links.num_nodes;
          return item;
        }
        index -= count, count = 0;
        if (node == links.own) continue;
        count = min(NodeLinks::count_of(links.records_in(round, node)), links.plan.tokens);
      }
      item.record = links.record(links.records_in(round, node), index);
      index += step;
      const char *line = item.record + cell.line();
      const bool is_entry = lane < cell.num_topk;
      item.to.token = *reinterpret_cast<const int32_t *>(line + cell.line_token());
      item.to.expert = is_entry ? reinterpret_cast<const int32_t *>(line)[lane] : -1;
      item.to.row = is_entry ? reinterpret_cast<const int32_t *>(line + cell.line_rows())[lane] : -1;
      item.to.weight = is_entry ? reinterpret_cast<const float *>(line + cell.line_weights())[lane] : 0.f;
      const int32_t *slots = reinterpret_cast<const int32_t *>(line + cell.line_slots()) - p.call.first_of_node();
      item.to.settle(p, peers, slots, lane);
      const bool has_slot = kRoute && item.to.slot >= 0;
      if (__any_sync(kFullWarp, item.to.is_kept || has_slot)) return item;
      item.record = nullptr;
    }
  }
  __device__ bool is_end(const Item &item) const { return item.record == nullptr; }
  __device__ int bytes() const { return int(p.call.row_bytes); }
  __device__ const char *src(const Item &item) const { return item.record; }
  __device__ char *dst(const Item &item) const {
    return item.to.has_row ? peers[item.to.rank].at[kRows] + item.to.row * p.call.row_bytes : nullptr;
  }
  __device__ void finish(const Item &item, const char *, int lane) const {
    const int64_t side = p.call.side_bytes;
    if (p.recv_side)
      copy_side(item.record + links.plan.cell.side(),
                item.to.has_row ? peers[item.to.rank].at[kSide] + item.to.row * side : nullptr, side, lane);
    send_scalars<kRoute>(p, peers, item.to, lane);
  }
};

template <bool kRoute> constexpr bool kWritesOnce<HandedRows<kRoute>> = true; // it reads cells, which are filled again

// Moves with whichever copies the kernel has.
template <bool kBulk, class Source>
__device__ __forceinline__ void move_rows(const DispatchParams &p, const MovePlan &plan, char *room, BulkBarrier *bars,
                                          unsigned &parity, Source source) {
  if constexpr (kBulk) parity = move_rows_bulk(p, plan, room, bars, parity, source);
  else move_rows_vector(p, plan, room, source);
}

// Fills this block's chunks of the round and has them put, and stores what stays on the node. False: leave.
template <bool kRoute, bool kBulk, bool kQuantize>
__device__ __forceinline__ bool put_round(const DispatchParams &p, const PeerBuffers *peers, const MovePlan &plan, char *room,
                                       BulkBarrier *bars, unsigned &parity, NodeLinks &links, int round) {
  // The partners have handed on what lay in this parity's cells before, so it was carried, too.
  if (round >= 2) {
    if (!links.wait(kReturned, round - 2)) return false;
    if constexpr (kBulk) bulk_fence(); // a carrier read them through the generic proxy; bulk stores fill them again
  }
  JAX_EP_STAMP_ROUND(kReturned, round);
  const int rows = links.place(round, [&](int token) {
    const int lane = threadIdx.x % kWarpSize;
    const int64_t at = int64_t(token) * p.call.num_topk + lane;
    const int expert = lane < p.call.num_topk ? p.topk_clean[at] : -1;
    if (expert < 0) return 0u;
    const int rank = expert / p.num_local_experts;
    // When routing, a slot without a row (all dropped) still gets its metadata.
    const bool goes = kRoute && !p.is_token_layout() ? p.slot[int64_t(token) * p.call.num_ranks + rank] >= 0 : p.dst_row[at] >= 0;
    return goes ? 1u << p.call.node_of(rank) : 0u;
  });
  JAX_EP_STAMP_ROUND(kPlacesFound, round);
  if (threadIdx.x == 0) links.count_rows(rows);
  move_rows<kBulk>(p, plan, room, bars, parity, RoundRows<kRoute, kQuantize>(p, peers, links, round, plan));
  JAX_EP_STAMP_ROUND(kFilled, round);
  const NodeCell &cell = links.plan.cell;
  const int64_t out = cell.out(links.plan.tokens), in = cell.in(links.plan.tokens);
  links.put(kArrived, round, out, in, [&](int n) {
    return NodeCell::kHeader + NodeLinks::count_of(links.records_out(round, n)) * cell.record_bytes();
  });
  JAX_EP_STAMP_ROUND(kPosted, round);
  return true;
}

// Waits for the chunks of the round from all other nodes and hands them on. False: leave.
template <bool kRoute, bool kBulk>
__device__ __forceinline__ bool hand_on_round(const DispatchParams &p, const PeerBuffers *peers, const MovePlan &plan, char *room,
                                           BulkBarrier *bars, unsigned &parity, NodeLinks &links, int round) {
  if (!links.wait(kArrived, round)) return false;
  JAX_EP_STAMP_ROUND(kChunkHere, round);
  bulk_fence(); // records came through the generic proxy, or a network card; acquired by the wait
  move_rows<kBulk>(p, plan, room, bars, parity, HandedRows<kRoute>(p, peers, links, round, plan.num_warps));
  JAX_EP_STAMP_ROUND(kHandedOn, round);
  if (round + 2 < links.rounds) // the cells are read; those of the last rounds go back with finish
    links.put(kReturned, round, 0, 0, [](int) { return int64_t(0); });
  else
    __syncthreads(); // stages are free for the next move
  return true;
}

} // namespace jax_ep
