// Dispatch to ranks whose buffers are out of reach: records of whole tokens through their windows, in rounds.
#pragma once

#include "cuda/kernels/move.cuh"

namespace jax_ep {

// Dispatch: the source pushes each token of the round, with its rows' places, to every staged receiver.
template <bool kRoute, bool kQuantize> __device__ void stage_dispatch(const DispatchParams &p, Session &session) {
  const CallParams &call = p.call;
  const int lane = threadIdx.x % kWarpSize, num_topk = call.num_topk, num_ranks = call.num_ranks;
  const int64_t warp = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / kWarpSize;
  const int64_t num_warps = int64_t(gridDim.x) * blockDim.x / kWarpSize;
  const StagingShape shape = call.staging();
  const bool is_token_layout = p.is_token_layout();
  auto pushes_to = [&](int r) { return session.announce_of(r)->is_staged != 0; };
  auto drains_from = [&](int r) { return call.is_staged_for(r, call.peers[r]); };
  if (!any_pair(call, pushes_to, drains_from)) return;
  const Rounds rounds(call, p.num_tokens);

  auto copy_one_side = [&](const char *src, char *dst) {
    copy_side(src, lane == 0 ? dst : nullptr, call.side_bytes, lane);
  };
  auto push = [&](int round) {
    const TokenRange tokens = rounds.tokens(round, p.num_tokens);
    const int64_t size = tokens.end - tokens.begin;
    for (int64_t i = warp; i < size * num_ranks; i += num_warps) {
      const int index = int(i % size), rank = int(i / size), token = tokens.begin + index;
      if (!pushes_to(rank)) continue;
      char *record = rounds.record(call.peers[rank].arena, round, call.rank, index);
      const int slot = p.slot[int64_t(token) * num_ranks + rank];
      if (lane == 0) *reinterpret_cast<int32_t *>(record + shape.slot()) = slot;
      if (slot < 0) continue;
      if (lane < num_topk) {
        const int64_t at = int64_t(token) * num_topk + lane;
        const int expert = p.topk_clean[at];
        const bool is_here = expert >= 0 && expert / p.num_local_experts == rank;
        const int meta = is_token_layout ? expert - rank * p.num_local_experts : p.dst_row[at];
        reinterpret_cast<int32_t *>(record + shape.meta())[lane] = is_here ? meta : -1;
        reinterpret_cast<float *>(record + shape.scalars())[lane] = is_here && p.recv_weights ? p.weights[at] : 0.f;
      }
      const char *x = p.x + token * p.x_bytes;
      if constexpr (kQuantize) {
        warp_quantize(p.dtype, x, int(call.row_bytes), record, record + shape.side(), p.quantize);
      } else {
        warp_copy(record, x, call.row_bytes, lane);
        copy_one_side(p.side + token * call.side_bytes, record + shape.side());
      }
    }
  };
  auto drain = [&](int round) {
    const TokenRange tokens = rounds.tokens(round, p.num_tokens);
    const int64_t size = tokens.end - tokens.begin;
    for (int64_t i = warp; i < size * num_ranks; i += num_warps) {
      const int index = int(i % size), rank = int(i / size);
      if (!drains_from(rank)) continue;
      const char *record = rounds.record(call.arena, round, rank, index);
      const int slot = *reinterpret_cast<const int32_t *>(record + shape.slot());
      if (slot < 0) continue;
      const int meta = lane < num_topk ? reinterpret_cast<const int32_t *>(record + shape.meta())[lane] : -1;
      const float weight = lane < num_topk ? reinterpret_cast<const float *>(record + shape.scalars())[lane] : 0.f;
      if (lane < num_topk) {
        const int64_t at = int64_t(slot) * num_topk + lane;
        if (kRoute) p.slot_meta[at] = meta;
        if (p.recv_weights && is_token_layout) p.recv_weights[at] = weight;
        if (p.recv_weights && !is_token_layout && meta >= 0) p.recv_weights[meta] = weight;
      }
      if (kRoute && lane == 0) p.slot_token[slot] = tokens.begin + index;
      // Token layout: one row, at the slot. Expert layout: one row per k that stays here.
      unsigned todo = is_token_layout ? 1u : __ballot_sync(kFullWarp, meta >= 0);
      for (; todo; todo &= todo - 1) {
        const int row = is_token_layout ? slot : __shfl_sync(kFullWarp, meta, __ffs(todo) - 1);
        warp_copy(p.recv_x + row * call.row_bytes, record, call.row_bytes, lane);
        if (p.recv_side) copy_one_side(record + shape.side(), p.recv_side + row * call.side_bytes);
      }
    }
  };
  run_rounds(session, rounds, pushes_to, drains_from, push, drain);
}

} // namespace jax_ep
