// Staged path: rows for a rank whose XLA buffers a peer cannot reach go through a window in its arena, in rounds
// of B tokens per source. Slower than the direct path and always right.
//
// Both sides of a pair know from the announce whether the pair is staged, and run the same rounds. Round j uses
// the half j % 2 of the window [2][num_ranks][B] records. Flags (layout.h): the pusher waits until round j - 2 is
// drained (`free`), all its blocks push, the leader releases `ready`; the drainer's leader acquires it, a grid
// barrier passes it on, all blocks drain, the leader releases `free`. Each pair of ranks runs the rounds in the
// same order and a push never waits for a later drain, so rounds cannot deadlock.
#pragma once

#include "cuda/device/sync.cuh"

namespace jax_ep {

// Where one peer's announced buffers lie for this device; without rows: staged, not reachable.
struct PeerBuffers {
  char *at[kNumBuffers];
  bool is_other_gpu;
  __device__ bool is_reachable() const { return at[kRows] != nullptr; }
  template <class T> __device__ T *get(Buffer b) const { return reinterpret_cast<T *>(at[b]); }
};

__device__ __forceinline__ void fill_peer_buffers(const CallParams &call, const Session &session, PeerBuffers *table) {
  for (int i = threadIdx.x; i < call.num_ranks * kNumBuffers; i += blockDim.x) {
    const int p = i / kNumBuffers, b = i % kNumBuffers;
    const Announce *a = session.announce_of(p);
    char *base = call.peers[p].same_process ? nullptr : call.peers[p].pool;
    table[p].at[b] = a->is_staged ? nullptr : base + a->buffer[b];
    if (b == 0) table[p].is_other_gpu = p != call.rank && call.peers[p].is_other_gpu;
  }
}

struct TokenRange { int begin, end; };

struct Rounds {
  const CallParams &call;
  int tokens_per_round, count;

  __device__ Rounds(const CallParams &c, int num_tokens)
      : call(c), tokens_per_round(int(min(c.staging().tokens_per_round(c.shape), int64_t(1) << 30))),
        count(int((int64_t(num_tokens) + tokens_per_round - 1) / tokens_per_round)) {}

  __device__ TokenRange tokens(int round, int num_tokens) const {
    const int64_t begin = int64_t(round) * tokens_per_round;
    return {int(begin), int(min(begin + tokens_per_round, int64_t(num_tokens)))};
  }
  // Record of the token at `index` in a round, in `owner`'s window for `partner`.
  __device__ char *record(char *arena, int round, int partner, int index) const {
    const int64_t window = (int64_t(round & 1) * call.num_ranks + partner) * tokens_per_round + index;
    return arena + call.shape.staging() + window * call.staging().record_bytes();
  }
};

// Waits until a partner's ready or free word reaches `expected`; ends as well when the partner leaves, so that no
// deadline is spent on it.
template <class Word>
__device__ __forceinline__ void wait_partner(Session &session, Word word, int partner, uint64_t expected) {
  bool has_left = false;
  session.wait(
      [&](uint64_t *seen) {
        return (*seen = word.load(cuda::memory_order_acquire)) >= expected || (has_left = session.has_left(partner));
      },
      Phase::kRound, partner, expected);
  if (has_left && word.load(cuda::memory_order_acquire) < expected) session.fail_left(partner, expected);
}
__device__ __forceinline__ SystemWord<uint64_t> partner_word(char *arena, int64_t offset, int index) {
  return SystemWord<uint64_t>(reinterpret_cast<uint64_t *>(arena + offset)[index]);
}

// Runs all rounds of a call. `pushes_to(p)` / `drains_from(p)`: is the pair staged in that direction;
// `push(round)` / `drain(round)`: moves records, all blocks. False: a peer failed, leave.
template <class PushesTo, class DrainsFrom, class Push, class Drain>
__device__ bool run_rounds(Session &session, const Rounds &rounds, PushesTo pushes_to, DrainsFrom drains_from,
                           Push push, Drain drain) {
  const CallParams &call = rounds.call;
  const uint64_t epoch = session.epoch();
  for (int round = 0; round < rounds.count; ++round) {
    if (session.is_leader()) {
      for (int p = threadIdx.x; p < call.num_ranks; p += blockDim.x) {
        // Direct partners too: their buffers are read and written between rounds.
        if (session.has_left(p)) session.fail_left(p, 0);
        if (round < 2 || !pushes_to(p)) continue;
        // Credit: the partner has drained round - 2, this half of its window may be overwritten.
        wait_partner(session, partner_word(call.arena, call.shape.free_(), p), p, round_word(epoch, round - 1));
      }
    }
    if (!session.grid_barrier()) return false;
    push(round);
    __threadfence_system(); // records, before the ready flag that the leader stores after the barrier
    if (!session.grid_barrier()) return false;
    if (session.is_leader()) {
      for (int p = threadIdx.x; p < call.num_ranks; p += blockDim.x) {
        if (pushes_to(p)) // publishes this rank's records of the round in p's window
          partner_word(call.peers[p].arena, call.shape.ready(), call.rank)
              .store(round_word(epoch, round + 1), cuda::memory_order_release);
      }
      for (int p = threadIdx.x; p < call.num_ranks; p += blockDim.x) {
        if (!drains_from(p)) continue;
        wait_partner(session, partner_word(call.arena, call.shape.ready(), p), p, round_word(epoch, round + 1));
      }
    }
    if (!session.grid_barrier()) return false; // the acquired records, for every block
    drain(round);
    if (!session.grid_barrier()) return false; // every block has read the half
    if (session.is_leader()) {
      for (int p = threadIdx.x; p < call.num_ranks; p += blockDim.x)
        if (drains_from(p)) // gives the half back
          partner_word(call.peers[p].arena, call.shape.free_(), call.rank)
              .store(round_word(epoch, round + 1), cuda::memory_order_release);
    }
  }
  return true;
}

// Is there any pair of either kind? The same answer in all threads.
template <class PushesTo, class DrainsFrom>
__device__ bool any_pair(const CallParams &call, PushesTo pushes_to, DrainsFrom drains_from) {
  bool any = false;
  for (int p = threadIdx.x; p < call.num_ranks; p += blockDim.x) any |= pushes_to(p) || drains_from(p);
  return __syncthreads_or(any);
}

} // namespace jax_ep
