// Dispatch, expert and batched layouts, between GPUs: a row crossed the link once, to the row of the token's first kept
// entry on this rank; the receiver's SMs make the copies for the others.
//
// Flag: `ready` of the arena, as a staged pair uses it in its rounds; a pair is either staged or direct, so the word has
// one meaning in a call. The sender's leader releases round 1 after all its blocks have stored all rows; the receiver's
// leader acquires it, a grid barrier passes it on.
#pragma once

#include "cuda/kernels/move.cuh"

namespace jax_ep {

// A function of its own: inlined, its loop would cost the one that sends rows its registers. `parity` is not used after.
template <bool kBulk>
__device__ __noinline__ void copy_received(const DispatchParams &p, Session &session, const MovePlan &plan, char *room,
                                           BulkBarrier *bars, unsigned parity) {
  const CallParams &call = p.call;
  auto sends_to = [&](int r) {
    return !call.is_remote(r) && call.crosses_once(r, call.peers[r], p.layout) && session.announce_of(r)->is_staged == 0;
  };
  auto copies_from = [&](int r) {
    return !call.is_remote(r) && call.crosses_once(r, call.peers[r], p.layout) && !call.is_staged_for(r, call.peers[r]);
  };
  if (!any_pair(call, sends_to, copies_from)) return;
  __threadfence_system(); // this thread's rows and metadata, before the ready flag that the leader stores after the barrier
  if (!session.grid_barrier()) return;
  if (session.is_leader()) {
    const uint64_t word = round_word(session.epoch(), 1);
    for (int r = threadIdx.x; r < call.num_ranks; r += blockDim.x)
      if (sends_to(r)) // publishes all that this rank has stored to r
        partner_word(call.peers[r].arena, call.shape.ready(), call.rank).store(word, cuda::memory_order_release);
    for (int r = threadIdx.x; r < call.num_ranks; r += blockDim.x)
      if (copies_from(r)) wait_partner(session, partner_word(call.arena, call.shape.ready(), r), r, word);
  }
  if (!session.grid_barrier()) return; // the acquired rows, for every block
  bulk_fence();                        // they came through the generic or the peer's asynchronous proxy
  const ReceivedRows rows(p, plan.num_warps);
  if constexpr (kBulk) move_rows_bulk(p, plan, room, bars, parity, rows);
  else move_rows_vector(p, plan, room, rows);
}

} // namespace jax_ep
