// Combine over nodes: a rank asks its partners for the sums of its tokens on their nodes; a partner adds up the rows of the
// node's ranks, as a source does with its own, rounds, and puts the sum back; the rank adds the nodes' sums and the bias.
//
// A question frees what it will be answered in: a rank asks for round j + 2 when it has used the sums of round j, which
// lie in the same cell. So an answer needs no credit, and nobody waits for more than the partner's answer to a question
// that it had before.
#pragma once

#include "cuda/kernels/combine_steps.cuh"
#include "cuda/kernels/nodes.cuh"

namespace jax_ep::combine_steps {

struct NodeSums {
  const CombineParams &p;
  const Plan &plan;
  const GatherPlan &last; // of the sum over nodes
  char *shared;
  const PeerBuffers *peers;
  NodeLinks &links;

  __device__ BulkBarrier *bars() const { return reinterpret_cast<BulkBarrier *>(shared + plan.bars); }
  __device__ char *room() const { return shared + plan.room; }
  __device__ char *rows(char *sums) const { return sums + links.plan.cell.sum_rows(links.plan.tokens); }
  __device__ float *scalars(char *sums) const { return reinterpret_cast<float *>(sums + NodeCell::kHeader); }
  __device__ bool is_own(int expert) const {
    return expert >= 0 && p.call.node_of(expert / p.num_local_experts) == links.own;
  }
};

// What a holder on this node has beside the row of an entry.
__device__ __forceinline__ float scalar_at(const CombineParams &p, const PeerBuffers *peers, int expert, int row, int k) {
  if (expert < 0 || row < 0) return 0.f;
  const float *scalars = peers[expert / p.num_local_experts].get<float>(kScalars);
  return __ldcs(scalars + (p.layout == Layout::kToken ? int64_t(row) * p.call.num_topk + k : row));
}

// Sums of rows on this node, `count` of them, to `out` one after the other. `ask(index)`: the entries, by lane;
// `slots(index)`: of the token, by rank. Writes what the block later loads in bulk, or a carrier reads.
template <DType kType, bool kBulk, bool kWire, class Ask, class Slots>
__device__ __forceinline__ void sum_on_node(const NodeSums &s, int count, char *out, unsigned &parity, Ask ask, Slots slots) {
  constexpr int kUnroll = kBulk ? 1 : 2;
  const CombineParams &p = s.p;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const bool reads_singles = !kWire && p.layout != Layout::kToken;
  auto rows_of = [&](int index, const Holders &holders) {
    return holders.rows(p, s.peers, slots(index), lane, reads_singles, [](int) -> const char * { return nullptr; });
  };
  auto sum_into = [&](auto store) {
    gather_sums<kBulk, true>(s.plan.pull, {unsigned(warp), unsigned(s.plan.pull.num_warps)}, count, s.room(), s.bars(), parity, ask,
                       rows_of, store);
  };
  if constexpr (kWire) sum_into(StoreOutOfWire<kType, false, true>{out, nullptr, p.y_bytes, 0});
  else sum_into(StoreOut<kType, kUnroll, true>{out, nullptr, p.y_bytes, 0});
}

// Which tokens of the round reach which node, to the partners there.
__device__ __noinline__ void ask_round(const CombineParams &p, NodeLinks &links, int round) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, num_topk = p.call.num_topk;
  const int rows = links.place(round, [&](int token) {
    const int64_t at = int64_t(token) * num_topk + lane;
    const int expert = lane < num_topk ? p.topk_clean[at] : -1;
    return expert >= 0 && p.dst_row[at] >= 0 ? 1u << p.call.node_of(expert / p.num_local_experts) : 0u;
  });
  (void)rows; // the answers are what is counted
  JAX_EP_STAMP_ROUND(kPlacesFound, round);
  const TokenRange range = links.tokens(round);
  for (int i = warp; i < range.end - range.begin; i += kWarps) {
    const int token = range.begin + i;
    const Holders holders(p, token, lane);
    const int row = holders.expert >= 0 ? holders.row : -1;
    for (int n = 0; n < links.num_nodes; ++n) {
      const int place = n == links.own ? -1 : links.places(round, n)[i];
      if (place < 0) continue; // the same in all lanes
      links.write_line(links.record(links.records_out(round, n), place), n, token, holders.expert, row, 1.f,
                       p.slot + int64_t(token) * p.call.num_ranks, p.num_local_experts);
    }
  }
  const NodeCell &cell = links.plan.cell;
  links.put(kAsked, round, cell.out(links.plan.tokens), cell.in(links.plan.tokens), [&](int n) {
    return NodeCell::kHeader + NodeLinks::count_of(links.records_out(round, n)) * cell.record_bytes();
  });
  JAX_EP_STAMP_ROUND(kAsked, round);
}

// Answers the partners' questions of the round. False: leave.
template <DType kType, bool kBulk, bool kWire>
__device__ __noinline__ bool answer_round(const NodeSums &s, int round, unsigned &parity) {
  NodeLinks &links = s.links;
  const CombineParams &p = s.p;
  const NodeCell &cell = links.plan.cell;
  const int lane = threadIdx.x % kWarpSize, num_topk = p.call.num_topk, first_rank = p.call.first_of_node();
  if (!links.wait(kAsked, round)) return false;
  JAX_EP_STAMP_ROUND(kQuestionHere, round);
  const int64_t tokens = links.plan.tokens;
  for (int i = 1; i < links.num_nodes; ++i) {
    const int n = (links.own + i) % links.num_nodes; // not all partners answer the same node first
    const char *asked = links.records_in(round, n);
    const int count = min(NodeLinks::count_of(asked), links.plan.tokens);
    char *sums = links.sums_out(round, n);
    sum_on_node<kType, kBulk, kWire>(
        s, count, s.rows(sums), parity,
        [&](int index) {
          const char *line = links.record(asked, index);
          Holders holders;
          holders.expert = lane < num_topk ? reinterpret_cast<const int32_t *>(line)[lane] : -1;
          holders.row = lane < num_topk ? reinterpret_cast<const int32_t *>(line + cell.line_rows())[lane] : -1;
          return holders;
        },
        [&](int index) {
          return reinterpret_cast<const int32_t *>(links.record(asked, index) + cell.line_slots()) - first_rank;
        });
    if (p.scalars) {
      for (int i = threadIdx.x; i < count * num_topk; i += kThreads) {
        const char *line = links.record(asked, i / num_topk);
        const int k = i % num_topk;
        s.scalars(sums)[i] = scalar_at(p, s.peers, reinterpret_cast<const int32_t *>(line)[k],
                                       reinterpret_cast<const int32_t *>(line + cell.line_rows())[k], k);
      }
    }
    JAX_EP_STAMP_ROUND(kAnswered, round);
    if (threadIdx.x == 0) *reinterpret_cast<int32_t *>(sums) = count, links.count_rows(count);
    __syncthreads(); // every thread's stores, before the post, whose release covers them
    if (threadIdx.x == 0) // at once, while the sums are still in the L2 cache
      links.put_to(n, kArrived, round, cell.sums_out(tokens), cell.sums_in(tokens), cell.sum_rows(tokens) + count * cell.row_bytes);
    JAX_EP_STAMP_ROUND(kAnswerPosted, round);
  }
  return true;
}

// The sums of this rank's tokens of the round. False: leave.
template <DType kType, bool kBulk, bool kWire>
__device__ __noinline__ bool finish_round(const NodeSums &s, int round, unsigned &parity) {
  constexpr int kUnroll = kBulk ? 1 : 2;
  NodeLinks &links = s.links;
  const CombineParams &p = s.p;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, num_topk = p.call.num_topk;
  const TokenRange range = links.tokens(round);
  const int size = range.end - range.begin;
  // Of the own node, to where the others' come.
  sum_on_node<kType, kBulk, kWire>(
      s, size, s.rows(links.sums_in(round, links.own)), parity,
      [&](int index) {
        Holders holders(p, range.begin + index, lane);
        if (!s.is_own(holders.expert)) holders.expert = -1;
        return holders;
      },
      [&](int index) { return p.slot + int64_t(range.begin + index) * p.call.num_ranks; });
  JAX_EP_STAMP_ROUND(kOwnSummed, round);
  if (!links.wait(kArrived, round)) return false; // a barrier, too: own sums are written, stages are read
  JAX_EP_STAMP_ROUND(kSumsHere, round);
  bulk_fence(); // all sums were written through the generic proxy, or came from a network card; some are now bulk-loaded
  auto ask = [&](int index) { return lane < links.num_nodes ? links.places(round, lane)[index] : -1; };
  auto rows_of = [&](int, int place) {
    const bool is_there = place >= 0;
    const unsigned below = __ballot_sync(kFullWarp, is_there) & ((1u << lane) - 1);
    const char *src = is_there ? s.rows(links.sums_in(round, lane)) + place * p.y_bytes : nullptr;
    return in_order(is_there, __popc(below), src, 1.f, false);
  };
  gather_sums<kBulk>(s.last, {unsigned(warp), unsigned(s.last.num_warps)}, size, s.room(), s.bars(), parity, ask, rows_of,
                     StoreOut<kType, kUnroll>{p.out, p.bias, p.y_bytes, range.begin});
  JAX_EP_STAMP_ROUND(kNodesSummed, round);
  if (p.out_scalars) {
    for (int i = threadIdx.x; i < size * num_topk; i += kThreads) {
      const int index = i / num_topk, k = i % num_topk;
      const int64_t at = int64_t(range.begin + index) * num_topk + k;
      const int expert = p.topk_clean[at], row = expert >= 0 ? p.dst_row[at] : -1;
      float value = 0.f;
      if (row >= 0 && s.is_own(expert)) {
        value = scalar_at(p, s.peers, expert, row, k);
      } else if (row >= 0) {
        const int node = p.call.node_of(expert / p.num_local_experts);
        value = s.scalars(links.sums_in(round, node))[links.places(round, node)[index] * num_topk + k];
      }
      p.out_scalars[at] = value;
    }
  }
  __syncthreads(); // sums and places are read, stages are free
  JAX_EP_STAMP_ROUND(kRoundDone, round);
  return true;
}

} // namespace jax_ep::combine_steps
