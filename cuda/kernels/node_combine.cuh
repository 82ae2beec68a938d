// Combine over nodes: a rank asks its partners for the sums of its tokens on their nodes; a partner adds up the rows of the
// node's ranks and puts the sum back; the rank adds its own node's rows, the other nodes' sums and the bias.
//
// A question frees what it will be answered in: a rank asks for round j + 2 when it has used the sums of round j, which
// lie in the same cell. So an answer needs no credit, and nobody waits for more than the partner's answer to a question
// that it had before.
//
// What a block adds up in a round is one list for its warps: the answers to the questions of round j + 1 first, which others
// wait for, then its own tokens of round j. So warps fill and drain their stages once a round. With bulk copies a warp asks
// for its first own rows, and so waits for the answers of round j, before it stores the last of its own answers.
#pragma once

#include "cuda/kernels/combine_steps.cuh"
#include "cuda/kernels/nodes.cuh"

namespace jax_ep::combine_steps {

struct NodeSums {
  const CombineParams &p;
  const Plan &plan;
  const GatherPlan &last; // "fp8_wire": of the sum over nodes
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

// Which tokens of the round reach which node, to the partners there.
__device__ __forceinline__ void ask_round(const CombineParams &p, NodeLinks &links, int round) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, num_topk = p.call.num_topk;
  const int rows = links.place(round, [&](int token) {
    const int64_t at = int64_t(token) * num_topk + lane;
    const int expert = lane < num_topk ? p.topk_clean[at] : -1, row = lane < num_topk ? p.dst_row[at] : -1; // together
    return expert >= 0 && row >= 0 ? 1u << p.call.node_of(expert / p.num_local_experts) : 0u;
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

// What a warp asked for ahead, by lane: entries of a token, and where node `lane` has its sum of an own token.
struct AskedRows {
  Holders holders;
  int place;
};

// The sums of a round's list. `round` -1: the answers of round 0 alone. False: leave.
template <DType kType, bool kBulk, bool kWire>
__device__ __forceinline__ bool sum_round(const NodeSums &s, int round, unsigned &parity) {
  constexpr int kUnroll = kBulk ? 1 : 2;
  // By node: answers that it asked for, and bytes of their rows that are not summed yet (who sums the last ones has them put);
  // its questions, where the answers go, where its sums of this round come and which tokens' they are.
  __shared__ int s_count[kMaxNodes];
  __shared__ unsigned long long s_left[kMaxNodes];
  __shared__ const char *s_asked[kMaxNodes], *s_in[kMaxNodes];
  __shared__ char *s_out[kMaxNodes];
  __shared__ const int32_t *s_places[kMaxNodes];
  NodeLinks &links = s.links;
  const CombineParams &p = s.p;
  const NodeCell &cell = links.plan.cell;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, num_topk = p.call.num_topk;
  const int64_t tokens = links.plan.tokens;
  const int next = round + 1, record_bytes = int(cell.record_bytes()), line_rows = int(cell.line_rows());
  // Whether an expert is on this node, as is_own, but for every row: without a division.
  const int node_experts = cell.ranks_per_node * p.num_local_experts, first_expert = links.own * node_experts;
  const bool has_answers = next < links.rounds;
  if (has_answers && !links.wait(kAsked, next)) return false;
  JAX_EP_STAMP_ROUND(kQuestionHere, next);
  auto put_answer = [&](int node) { // one thread
    links.put_to(node, kArrived, next, cell.sums_out(tokens), cell.sums_in(tokens), cell.sum_rows(tokens) + s_count[node] * cell.row_bytes);
    JAX_EP_STAMP_LANE(kAnswerPosted, next);
  };
  if (const int node = threadIdx.x; node < links.num_nodes) {
    const bool has_asked = has_answers && node != links.own;
    const int count = has_asked ? min(NodeLinks::count_of(links.records_in(next, node)), links.plan.tokens) : 0;
    s_count[node] = count;
    s_left[node] = uint64_t(count) * uint64_t(s.plan.pull.row_bytes);
    if (node != links.own) { // which has a cell for "fp8_wire" alone
      s_asked[node] = links.record(links.records_in(next, node), 0);
      s_out[node] = s.rows(links.sums_out(next, node));
      s_in[node] = s.rows(links.sums_in(round, node));
      s_places[node] = links.places(round, node);
    }
    if (has_asked) *reinterpret_cast<int32_t *>(links.sums_out(next, node)) = count, links.count_rows(count);
    if (has_asked && !count) put_answer(node);
  }
  __syncthreads(); // all of these
  if (p.scalars) {
    for (int node = 0; node < links.num_nodes; ++node) {
      for (int i = threadIdx.x; i < s_count[node] * num_topk; i += kThreads) {
        const char *line = s_asked[node] + i / num_topk * record_bytes;
        const int k = i % num_topk;
        s.scalars(links.sums_out(next, node))[i] = scalar_at(p, s.peers, reinterpret_cast<const int32_t *>(line)[k],
                                                             reinterpret_cast<const int32_t *>(line + line_rows)[k], k);
      }
    }
    __syncthreads(); // every thread's scalars, before the put of any warp
  }
  int answers = 0;
  for (int node = 0; node < links.num_nodes; ++node) answers += s_count[node];
  const TokenRange range = round < 0 ? TokenRange{0, 0} : links.tokens(round);
  const int size = range.end - range.begin;
  // Of an answer: the node that asked, and `index` becomes its number there. Of an own token: -1, and its number in the round.
  auto asker_of = [&](int &index) {
    if (index >= answers) {
      index -= answers;
      return -1;
    }
    int node = links.own;
    do { // not all partners answer the same node first
      if (++node == links.num_nodes) node = 0;
    } while (index >= s_count[node] && (index -= s_count[node], true));
    return node;
  };
  bool ok = true, has_sums = kWire || round < 0; // of this warp: the other nodes' sums of its own tokens are there
  auto wait_for_sums = [&] {
    if (has_sums) return;
    has_sums = true;
    JAX_EP_STAMP_ROUND(kSumsWanted, round);
    ok = links.wait_in_warp(kArrived, round);
    bulk_fence(); // they were written through the generic proxy, or came from a network card; some are now bulk-loaded
    JAX_EP_STAMP_ROUND(kSumsHere, round);
  };
  auto ask = [&](int index) {
    const int node = asker_of(index);
    AskedRows asked;
    asked.place = -1;
    if (node < 0) {
      asked.holders = Holders(p, range.begin + index, lane);
      if (!kWire && lane < links.num_nodes && lane != links.own) asked.place = s_places[lane][index];
    } else {
      const char *line = s_asked[node] + index * record_bytes;
      asked.holders.expert = lane < num_topk ? reinterpret_cast<const int32_t *>(line)[lane] : -1;
      asked.holders.row = lane < num_topk ? reinterpret_cast<const int32_t *>(line + line_rows)[lane] : -1;
    }
    return asked;
  };
  auto rows_of = [&](int index, const AskedRows &asked) {
    const int node = asker_of(index);
    const int32_t *slots = node < 0 ? p.slot + int64_t(range.begin + index) * p.call.num_ranks
                                    : reinterpret_cast<const int32_t *>(s_asked[node] + index * record_bytes + cell.line_slots()) -
                                          p.call.first_of_node();
    Holders holders = asked.holders;
    const bool is_here = unsigned(holders.expert - first_expert) < unsigned(node_experts);
    int place = 0, other = 0;
    if (node < 0) {
      if constexpr (kWire) { // another node's sum is not on the wire in FP8: the own one's is taken apart
        if (!is_here) holders.expert = -1;
      } else {
        wait_for_sums();
        if (!ok) holders.expert = -1;
        // A node's sum stands for its first rank's: it has that place in the order of ranks.
        if (!is_here && holders.expert >= 0) other = holders.expert / node_experts;
        place = __shfl_sync(kFullWarp, asked.place, other);
        if (!is_here && holders.expert >= 0) holders.expert = other * node_experts;
      }
    }
    const bool reads_singles = !kWire && p.layout != Layout::kToken;
    Rows rows = holders.rows(p, s.peers, slots, lane, reads_singles, [&](int) -> const char * {
      return s_in[other] + place * p.y_bytes; // of a rank that cannot be reached
    });
    if constexpr (!kWire) {
      const unsigned here = bits_in_order(rows, is_here); // side by side
      rows.ends = ~here | (here & ~(here >> 1));
    }
    return rows;
  };
  gather_sums<kBulk, true>(s.plan.pull, {unsigned(warp), unsigned(s.plan.pull.num_warps)}, answers + size, s.room(), s.bars(), parity, ask,
                           rows_of, [&](GatherStep step, auto fetch) {
    const int node = asker_of(step.index);
    if constexpr (!kWire) {
      if (node < 0) {
        if (ok) StoreOutOfNodes<kType, kUnroll>{p.out + range.begin * p.y_bytes, p.bias ? p.bias + range.begin * p.y_bytes : nullptr, p.y_bytes}(step, fetch);
        return;
      }
    }
    // Read by a carrier soon, or by this block.
    char *out = kWire && node < 0 ? s.rows(links.sums_in(round, links.own)) : s_out[node];
    if constexpr (kWire) StoreOutOfWire<kType, false, true>{out, nullptr, p.y_bytes, 0}(step, fetch);
    else StoreOut<kType, kUnroll, true>{out, nullptr, p.y_bytes, 0}(step, fetch);
    if (node < 0) return;
    __syncwarp(); // all lanes' stores, before the release
    const unsigned bytes = unsigned(step.end - step.begin);
    // Publishes this warp's bytes to the warp that finds nothing left, and that one's post publishes all of them.
    if (lane == 0 && BlockWord<unsigned long long>(s_left[node]).fetch_sub(bytes, cuda::memory_order_acq_rel) == bytes)
      put_answer(node); // at once, while the sums are still in the L2 cache
  });
  JAX_EP_STAMP_ROUND(kListSummed, next); // numbered as the answers in it: the first list has nothing else
  wait_for_sums(); // of those without an own token, too: the next question frees the cells
  return __syncthreads_and(ok); // sums, places and stages are read
}

// "fp8_wire": the own tokens of the round from sums of all nodes, the own one's too. False: leave.
template <DType kType, bool kBulk>
__device__ __forceinline__ bool sum_nodes(const NodeSums &s, int round, unsigned &parity) {
  NodeLinks &links = s.links;
  const CombineParams &p = s.p;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const TokenRange range = links.tokens(round);
  if (!links.wait(kArrived, round)) return false;
  JAX_EP_STAMP_ROUND(kSumsHere, round);
  bulk_fence(); // all sums were written through the generic proxy, or came from a network card; some are now bulk-loaded
  auto ask = [&](int index) { return lane < links.num_nodes ? links.places(round, lane)[index] : -1; };
  auto rows_of = [&](int, int place) {
    const bool is_there = place >= 0;
    const unsigned below = __ballot_sync(kFullWarp, is_there) & ((1u << lane) - 1);
    const char *src = is_there ? s.rows(links.sums_in(round, lane)) + place * p.y_bytes : nullptr;
    return in_order(is_there, __popc(below), src, 1.f, false);
  };
  gather_sums<kBulk>(s.last, {unsigned(warp), unsigned(s.last.num_warps)}, range.end - range.begin, s.room(), s.bars(), parity, ask,
                     rows_of, StoreOut<kType, kBulk ? 1 : 2>{p.out, p.bias, p.y_bytes, range.begin});
  __syncthreads(); // as above
  JAX_EP_STAMP_ROUND(kNodesSummed, round);
  return true;
}

// Scalars of the round's own tokens, from where they lie or came.
__device__ __forceinline__ void pull_round_scalars(const NodeSums &s, int round) {
  NodeLinks &links = s.links;
  const CombineParams &p = s.p;
  if (!p.out_scalars) return;
  const TokenRange range = links.tokens(round);
  for (int i = threadIdx.x; i < (range.end - range.begin) * p.call.num_topk; i += kThreads) {
    const int index = i / p.call.num_topk, k = i % p.call.num_topk;
    const int64_t at = int64_t(range.begin) * p.call.num_topk + i;
    const int expert = p.topk_clean[at], row = expert >= 0 ? p.dst_row[at] : -1;
    float value = 0.f;
    if (row >= 0 && s.is_own(expert)) {
      value = scalar_at(p, s.peers, expert, row, k);
    } else if (row >= 0) {
      const int node = p.call.node_of(expert / p.num_local_experts);
      value = s.scalars(links.sums_in(round, node))[links.places(round, node)[index] * p.call.num_topk + k];
    }
    p.out_scalars[at] = value;
  }
  __syncthreads(); // sums and places are read
}

} // namespace jax_ep::combine_steps
