// A block's exchange with the blocks of the same number on its partners: cells, puts, waits. Every block works alone and at
// its own pace; docs/memory_order.md has who publishes what.
#pragma once

#include "cuda/kernels/nodes.h"
#include "cuda/kernels/route.cuh"

namespace jax_ep {

class NodeLinks {
 public:
  const NodePlan &plan;
  const int num_nodes, own;
  const int rounds; // of this block, and of those of its number on other ranks

  __device__ NodeLinks(const CallParams &call, Session &session, const NodePlan &plan_, int num_tokens)
      : NodeLinks(call, session, plan_, block_share(num_tokens), int(int64_t(plan_.tokens) * blockIdx.x / gridDim.x)) {}

  // This block's tokens of a round. The first one is shorter, by another part of a round in every block: blocks that all did
  // the same at the same time would leave memory idle while they ask and wait (docs/performance.md).
  __device__ TokenRange tokens(int round) const {
    const int64_t begin = share_.begin - first_ + int64_t(round) * plan.tokens;
    return {inside(begin), inside(begin + plan.tokens)};
  }
  // Of a round, what `owner` has for `node`: in the arenas of this rank and of its partners, which have the same shape.
  __device__ int64_t cell_at(int round, int node, int owner) const {
    const int index = has_own() ? node : node - (node > owner);
    return call_.shape.staging() + ((int64_t(blockIdx.x) * 2 + (round & 1)) * plan.cell.num_cells + index) * plan.cell_bytes;
  }
  __device__ bool has_own() const { return plan.cell.num_cells == num_nodes; }
  __device__ char *cell(int round, int node) const { return call_.arena + cell_at(round, node, own); }
  __device__ int32_t *places(int round, int node) const { return reinterpret_cast<int32_t *>(cell(round, node)); }
  __device__ char *records_out(int round, int node) const { return cell(round, node) + plan.cell.out(plan.tokens); }
  __device__ const char *records_in(int round, int node) const { return cell(round, node) + plan.cell.in(plan.tokens); }
  __device__ char *sums_out(int round, int node) const { return cell(round, node) + plan.cell.sums_out(plan.tokens); }
  __device__ char *sums_in(int round, int node) const { return cell(round, node) + plan.cell.sums_in(plan.tokens); }
  __device__ static int count_of(const char *records) { return *reinterpret_cast<const int32_t *>(records); }
  __device__ char *record(char *records, int place) const {
    return records + NodeCell::kHeader + place * plan.cell.record_bytes();
  }
  __device__ const char *record(const char *records, int place) const { return record(const_cast<char *>(records), place); }

  // All threads. Until the partners of all other nodes have raised `flag` for this round. False: leave.
  __device__ bool wait(NodeFlag flag, int round) {
    return __syncthreads_and(wait_for(threadIdx.x, flag, round));
  }
  // Whole warp, likewise.
  __device__ bool wait_in_warp(NodeFlag flag, int round) {
    const bool ok = __all_sync(kFullWarp, wait_for(threadIdx.x % kWarpSize, flag, round));
    __syncwarp(); // what a lane acquired, for all lanes: a vote orders no memory
    return ok;
  }
  // All threads, after their stores: to every other node, `bytes(node)` from `from` to `to` of the cell, then the flag.
  template <class Bytes> __device__ void put(NodeFlag flag, int round, int64_t from, int64_t to, Bytes bytes) {
    __syncthreads(); // every thread's stores, before the posts of those below, whose release covers them
    const int n = threadIdx.x;
    if (n < num_nodes && n != own) put_to(n, flag, round, from, to, bytes(n));
  }
  // One thread, behind a barrier after everybody's stores: to one node.
  __device__ void put_to(int n, NodeFlag flag, int round, int64_t from, int64_t to, int64_t bytes) {
    const int parity = round & 1;
    const int64_t theirs = cell_at(round, own, n), mine = cell_at(round, n, own);
    session_.post(3 * int64_t(call_.num_ranks) + call_.shape.node_flag(flag, parity, n, blockIdx.x),
                  Put{0, 0, mine + from, theirs + to, bytes,
                      call_.shape.node_flags() + call_.shape.node_flag(flag, parity, own, blockIdx.x) * 8,
                      round_word(session_.epoch(), uint64_t(round) + 1), call_.partner(n)});
  }

  // All threads. Which nodes each token of the round reaches, and where in their chunks it is: `places`, and the counts in
  // the headers of `records_out`. `reaches(token)`: by a warp, lane k says which node its entry reaches, a bit, or 0. Of the
  // own node, if it has a cell, the place is the token's number in the round. Returns the tokens times nodes that are to be put.
  template <class Reaches> __device__ int place(int round, Reaches reaches) {
    __shared__ int s_count[kMaxNodeTokens / kWarpSize];
    __shared__ unsigned s_reached[kMaxNodeTokens];
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, num_warps = blockDim.x / kWarpSize;
    const TokenRange range = tokens(round);
    const int index = threadIdx.x, size = range.end - range.begin;
    for (int i = warp; i < size; i += num_warps) { // a warp each, so that all of a token's loads are under way together
      const unsigned all = __reduce_or_sync(kFullWarp, reaches(range.begin + i));
      if (lane == 0) s_reached[i] = all;
    }
    __syncthreads(); // before each is read
    const unsigned reached = index < size ? s_reached[index] : 0u;
    int sum = 0;
    for (int n = 0; n < num_nodes; ++n) {
      const bool goes = reached >> n & 1;
      if (n == own) {
        if (has_own() && index < size) places(round, n)[index] = goes ? index : -1;
        continue;
      }
      const unsigned going = __ballot_sync(kFullWarp, goes);
      if (lane == 0) s_count[warp] = __popc(going);
      __syncthreads();
      int before = 0, total = 0;
      for (int w = 0; w < num_warps; ++w) {
        before += w < warp ? s_count[w] : 0;
        total += s_count[w];
      }
      if (index < size) places(round, n)[index] = goes ? before + __popc(going & ((1u << lane) - 1)) : -1;
      if (index == 0) *reinterpret_cast<int32_t *>(records_out(round, n)) = total;
      sum += total;
      __syncthreads(); // the counts are read before the next node's are written
    }
    __syncthreads(); // places and counts, for the whole block
    return sum;
  }

  // Whole warp: what is on node n of a token's entries, into the line of its record. `expert`, `row`, `weight`: of lane k.
  __device__ void write_line(char *line, int node, int token, int expert, int row, float weight, const int32_t *slots,
                             int num_local_experts) const {
    const int lane = threadIdx.x % kWarpSize, num_topk = plan.cell.num_topk, per_node = plan.cell.ranks_per_node;
    const bool is_here = expert >= 0 && call_.node_of(expert / num_local_experts) == node;
    if (lane < num_topk) {
      reinterpret_cast<int32_t *>(line)[lane] = is_here ? expert : -1;
      reinterpret_cast<int32_t *>(line + plan.cell.line_rows())[lane] = is_here ? row : -1;
      reinterpret_cast<float *>(line + plan.cell.line_weights())[lane] = is_here ? weight : 0.f;
    }
    for (int i = lane; i < per_node; i += kWarpSize)
      reinterpret_cast<int32_t *>(line + plan.cell.line_slots())[i] = slots[node * per_node + i];
    if (lane == 0) *reinterpret_cast<int32_t *>(line + plan.cell.line_token()) = token;
  }

  // Counts what was put; any thread.
  __device__ void count_rows(int rows) const {
    if (rows) DeviceWord<uint64_t>(session_.control().rows_put).fetch_add(uint64_t(rows), cuda::memory_order_relaxed);
  }

 private:
  // `first`: tokens that the first round has less than others.
  __device__ NodeLinks(const CallParams &call, Session &session, const NodePlan &plan_, TokenRange share, int first)
      : plan(plan_), num_nodes(call.shape.num_nodes), own(call.node_of(call.rank)),
        rounds(share.end > share.begin ? (share.end - share.begin + first + plan_.tokens - 1) / plan_.tokens : 0),
        call_(call), session_(session), share_(share), first_(first) {}

  __device__ int inside(int64_t token) const { return int(max(int64_t(share_.begin), min(token, int64_t(share_.end)))); }
  __device__ bool wait_for(int n, NodeFlag flag, int round) { // true of the own node, and of what is none
    if (n >= num_nodes || n == own) return true;
    uint64_t &word = own_word(flag, round, n);
    const uint64_t least = round_word(session_.epoch(), uint64_t(round) + 1);
    // Acquires what the partner put before. Mostly it is there, and the other way is many instructions.
    if (SystemWord<uint64_t>(word).load(cuda::memory_order_acquire) >= least) return true;
    return wait_long(call_, session_.epoch(), session_.tag(), word, call_.partner(n), least);
  }
  // Out of line, once for all waits; the tag, which a window may have changed, is for the record of a failure.
  __device__ __noinline__ static bool wait_long(const CallParams &call, uint64_t epoch, uint64_t tag, uint64_t &word, int peer,
                                                uint64_t least) {
    return Session(call, epoch, tag).wait_or_left(word, Phase::kRound, peer, least);
  }
  __device__ uint64_t &own_word(NodeFlag flag, int round, int node) const {
    return reinterpret_cast<uint64_t *>(call_.arena + call_.shape.node_flags())[
        call_.shape.node_flag(flag, round & 1, node, blockIdx.x)];
  }

  const CallParams &call_;
  Session &session_;
  const TokenRange share_;
  const int first_;
};

} // namespace jax_ep
