// One call of latency mode: when a slot may be written, when it is complete, how the call ends.
//
// A source stores into its part of the receiver's slot and then, block by block, a flag; the receiver waits for the flags
// of all blocks of all sources. No block waits for another one of its own grid, and nobody for a peer that only receives.
// docs/memory_order.md has who publishes what. All ranks use as many blocks; the tag in each flag tells when they do not.
#pragma once

#include "cuda/device/sync.cuh"
#include "cuda/kernels/latency.h"

namespace jax_ep {

class SlotCall {
 public:
  // `tag`: what all ranks must pass alike.
  __device__ SlotCall(const CallParams &call, const LatencyCall &latency, const SlotShape &shape, uint64_t tag)
      : call_(call), session_(latency.ticket ? Session(call, ticket_epoch(latency.ticket)) : Session(call)), shape_(shape),
        expected_(sent_word(session_.epoch(), tag ^ tag >> 20 ^ tag >> 40)), slot_(call.shape.slot_of(session_.epoch())) {}

  __device__ bool is_broken() const { return session_.is_broken(); }
  __device__ uint64_t epoch() const { return session_.epoch(); }

  // This rank's part of `peer`'s slot, and its own slot with the parts of all sources.
  __device__ char *part_at(int peer) const {
    return call_.peers[peer].arena + call_.shape.slot(slot_) + call_.rank * shape_.bytes();
  }
  __device__ const char *slot() const { return call_.arena + call_.shape.slot(slot_); }

  // A ticket of a start that took place and was not received yet. The same answer in all threads of the block.
  __device__ bool has_started(const LatencyCall &latency) {
    if (latency.ticket && session_.epoch() > session_.control().epoch && threadIdx.x == 0)
      session_.fail(Failure::kMismatch, Phase::kAnnounce, call_.rank, session_.control().epoch, session_.epoch());
    return __syncthreads_and(!session_.is_aborted());
  }

  // Before the first store: every receiver has read what the call num_slots before this one left in the slot.
  __device__ bool may_send() {
    const uint64_t before = epoch() > uint64_t(call_.shape.num_slots) ? epoch() - call_.shape.num_slots : 0;
    for (int p = threadIdx.x; p < call_.num_ranks; p += blockDim.x)
      wait_for(credit_from(p), Phase::kClaim, p, before);
    return __syncthreads_and(!session_.is_aborted());
  }

  // One warp: publishes what its lanes stored before.
  __device__ void publish_routed(int lane) const {
    __threadfence_system(); // this lane's ids and weights, before the flags
    __syncwarp();
    publish(call_.shape.routed(), lane, kWarpSize);
  }
  // All threads of the block: publishes all that it stored.
  __device__ void publish_sent() const {
    __threadfence_system(); // this thread's rows, before the flags
    __syncthreads();
    publish(call_.shape.sent(), threadIdx.x, blockDim.x);
  }

  // Until every block of every source has published; acquires it for this block. False: leave.
  __device__ bool wait_routed() { return wait_blocks(call_.shape.routed()); }
  __device__ bool wait_sent() { return wait_blocks(call_.shape.sent()); }

  // The block touches nothing shared any more. True in the block that ends the call: all others have, and it alone goes on.
  __device__ bool end(const LatencyCall &latency, const Outputs &outputs) {
    __shared__ bool s_is_last;
    __syncthreads();
    Control &control = session_.control();
    if (threadIdx.x == 0) {
      // Releases this block's reads and results to the last one, which acquires those of all.
      s_is_last = DeviceWord<uint32_t>(control.exited).fetch_add(1, cuda::memory_order_acq_rel) == gridDim.x - 1;
    }
    __syncthreads();
    if (!s_is_last) return false;
    const bool is_complete = __syncthreads_and(!session_.is_aborted());
    if (threadIdx.x == 0) control.exited = 0; // for the next kernel of the stream
    if (is_complete) {
      if (threadIdx.x == 0 && latency.sends) control.epoch = epoch();
      __threadfence_system(); // carries what was acquired to system scope
      if (latency.receives)
        for (int p = threadIdx.x; p < call_.num_ranks; p += blockDim.x) // publishes that this rank has read the slot
          SystemWord<uint64_t>(credit_at(call_.peers[p].arena, call_.rank)).store(epoch(), cuda::memory_order_release);
    } else {
      // Peers still store into this rank's slots, which are its own memory; what they wait for will never come.
      session_.send_finish(flag_word(epoch(), kFailed, uint64_t(call_.failure->culprit) & (kMaxRanks - 1),
                                     call_.failure->code == uint32_t(Failure::kMismatch)));
      if (threadIdx.x == 0) control.broken = 1;
      poison(outputs, threadIdx.x, blockDim.x);
    }
    return is_complete;
  }

 private:
  __device__ static uint64_t ticket_epoch(const int32_t *ticket) {
    return uint64_t(uint32_t(ticket[0])) | uint64_t(uint32_t(ticket[1])) << 32;
  }
  __device__ uint64_t &block_flag(char *arena, int64_t flags, int source, int block) const {
    return *reinterpret_cast<uint64_t *>(arena + flags + call_.shape.block_flag(slot_, source, block));
  }
  __device__ uint64_t &credit_at(char *arena, int receiver) const {
    return reinterpret_cast<uint64_t *>(arena + call_.shape.credit())[slot_ * call_.num_ranks + receiver];
  }
  __device__ uint64_t &credit_from(int receiver) const { return credit_at(call_.arena, receiver); }

  __device__ void publish(int64_t flags, int thread, int threads) const {
    for (int p = thread; p < call_.num_ranks; p += threads)
      SystemWord<uint64_t>(block_flag(call_.peers[p].arena, flags, call_.rank, blockIdx.x))
          .store(expected_, cuda::memory_order_release);
  }

  // Until the word is at least `least`, or its peer has left. Returns what was seen.
  __device__ uint64_t wait_for(uint64_t &word, Phase phase, int peer, uint64_t least) {
    SystemWord<uint64_t> flag(word);
    uint64_t left = 0;
    unsigned polls = 0;
    session_.wait(
        [&](uint64_t *seen) {
          if ((*seen = flag.load(cuda::memory_order_acquire)) >= least) return true;
          if (++polls % 64) return false; // a second word, looked at less often
          left = session_.finish_from(peer).load(cuda::memory_order_acquire);
          return flag_state(left) == kFailed;
        },
        phase, peer, least);
    const uint64_t seen = flag.load(cuda::memory_order_acquire); // complete after all, before its source left?
    if (seen < least && flag_state(left) == kFailed) session_.fail_revoked(phase, peer, least, left);
    return seen;
  }

  __device__ bool wait_blocks(int64_t flags) {
    for (int i = threadIdx.x; i < call_.num_ranks * int(gridDim.x); i += blockDim.x) {
      const int peer = i / gridDim.x, block = i % gridDim.x;
      // Acquires what the block stored into this rank's slot.
      const uint64_t seen = wait_for(block_flag(call_.arena, flags, peer, block), Phase::kRound, peer,
                                     sent_word(session_.epoch(), 0));
      if (session_.is_aborted()) break;
      if (seen == expected_) continue;
      // Of this call with another tag: another program. Of a later one: this one was received before.
      session_.fail(Failure::kMismatch, Phase::kAnnounce, peer, expected_, seen);
      break;
    }
    return __syncthreads_and(!session_.is_aborted());
  }

  const CallParams &call_;
  Session session_;
  SlotShape shape_;
  uint64_t expected_;
  int slot_;
};

} // namespace jax_ep
