// One call of latency mode: when a slot may be written, when it is complete, how the call ends.
//
// A source stores into its part of the receiver's slot and then, block by block, a flag; the receiver waits for the flags
// of all blocks of all sources, its own rank's with them, and nobody for a peer that only receives.
// docs/memory_order.md has who publishes what. All ranks use as many blocks; the tag in each flag tells when they do not.
// For a rank of another node a source fills a part of its own arena, of which its carrier then puts the bytes and the flags.
// Every step costs a trip to memory or two, so what a step does not need (a look at the abort word, a fence in every thread)
// it does not do.
#pragma once

#include "cuda/device/sync.cuh"
#include "cuda/kernels/latency.h"

namespace jax_ep {

// Where the slots of an arena lie, worked out on the host: it takes a division.
struct SlotPlan {
  int64_t first, bytes;
  static SlotPlan make(const ArenaShape &shape) { return {shape.slot(0), shape.slot_bytes()}; }
};

// This rank's part of everybody's slot; of a rank of another node, what will be put there.
struct Parts {
  char *const *arenas; // shared memory
  int64_t at;
  __device__ char *operator[](int peer) const { return arenas[peer] + at; }
};

// Several nodes: the puts of a call. Functions of their own, since one node needs none of it.
struct SlotPuts {
  const CallParams &call;
  int64_t part_at; // in an arena: this rank's part of the call's slot
  uint64_t epoch, expected;
  int slot;

  // What is to be put to `peer` lies in the own slot behind the parts of all sources; from this rank's own part:
  __device__ static int64_t outbox(const CallParams &call, const SlotShape &shape, int peer) {
    const int place = peer < call.rank ? peer : peer - call.shape.ranks_per_node(); // among the ranks of other nodes
    return (call.num_ranks + place - call.rank) * shape.bytes();
  }
  // Bytes [begin, end) of the part for `peer`, then its word at `signal`. The word of the put before has arrived
  // (memory_order.md).
  __device__ void put(const SlotShape &shape, int peer, int word, int64_t begin, int64_t end, int64_t signal) const {
    const int64_t dst = part_at + begin, src = dst + outbox(call, shape, peer);
    Session(call, epoch).post(call.shape.slot_put(slot, peer, word), Put{0, 0, src, dst, end - begin, signal, expected, peer});
  }
  __device__ int64_t place_of_word(int source) const { return int64_t(slot) * call.num_ranks + source; }
};

// All threads of the router block, after a barrier behind the table.
inline __device__ __noinline__ void put_routed(SlotPuts puts, const SlotShape &shape) {
  const CallParams &call = puts.call;
  const int64_t signal = call.shape.routed() + puts.place_of_word(call.rank) * 8;
  for (int p = threadIdx.x; p < call.num_ranks; p += blockDim.x)
    if (call.is_remote(p)) puts.put(shape, p, kPutRouted, 0, shape.scalars(), signal);
}

// All threads of every block, after a barrier behind their stores: the last block has all that was stored put, in equal parts.
// That is from `begin` to the end of the rows, of which there are `rows_for(rank)`.
template <class RowsFor>
__device__ __noinline__ void put_filled(SlotPuts puts, const SlotShape &shape, int64_t begin, RowsFor rows_for) {
  __shared__ bool s_is_last;
  const CallParams &call = puts.call;
  Control &control = Session(call, puts.epoch).control();
  if (threadIdx.x == 0) {
    // Releases what this block has stored into the outbox to the last one, which acquires that of all.
    s_is_last = DeviceWord<uint32_t>(control.filled).fetch_add(1, cuda::memory_order_acq_rel) == gridDim.x - 1;
    if (s_is_last) control.filled = 0; // for the next kernel of the stream
  }
  __syncthreads();
  if (!s_is_last) return;
  for (int i = threadIdx.x; i < call.num_ranks * kSlotPuts; i += blockDim.x) {
    const int p = i / kSlotPuts, n = i % kSlotPuts;
    if (!call.is_remote(p)) continue;
    const int rows = rows_for(p);
    const int64_t end = shape.rows() + rows * shape.row_bytes, step = round_up((end - begin + kSlotPuts - 1) / kSlotPuts, 128);
    const int64_t from = min(begin + n * step, end);
    puts.put(shape, p, n, from, min(from + step, end), call.shape.sent() + (puts.place_of_word(call.rank) * kMaxBlocks + n) * 8);
    if (n == 0) DeviceWord<uint64_t>(control.rows_put).fetch_add(uint64_t(rows), cuda::memory_order_relaxed);
  }
}

// Last block of a complete call. `gives_credit`: this rank has read the slot, which its sources wait for.
inline __device__ __noinline__ void end_over_nodes(SlotPuts puts, bool gives_credit) {
  const CallParams &call = puts.call;
  Session session(call, puts.epoch);
  const int64_t signal = call.shape.credit() + puts.place_of_word(call.rank) * 8;
  for (int p = threadIdx.x; p < call.num_ranks && gives_credit; p += blockDim.x)
    if (call.is_remote(p))
      session.post(call.shape.slot_put(puts.slot, p, kPutCredit), Put{0, 0, 0, 0, 0, signal, puts.epoch, p});
  if (threadIdx.x == 0) call.failure->rows_put = session.control().rows_put;
  __syncthreads(); // the posts of all threads, before the carrier may go
  session.dismiss_carrier();
}

class SlotCall {
 public:
  // `arenas`: shared memory, [R], filled with the peers' addresses before the call's number is looked at, so that both are on
  // their way together; read behind the barrier of enter(). For a rank of another node: the address from which this rank's
  // part lies where what will be put there does. `tag`: what all ranks must pass alike.
  __device__ SlotCall(const CallParams &call, const LatencyCall &latency, const SlotPlan &slots, const SlotShape &shape,
                      uint64_t tag, char **arenas)
      : call_(call), arenas_(arenas), session_(latency.ticket ? Session(call, ticket_epoch(latency.ticket)) : Session(call)),
        is_done_(latency.ticket != nullptr), is_alone_(latency.sends && latency.receives && call.shape.num_slots == kFusedSlots) {
    for (int p = threadIdx.x; p < call.num_ranks; p += blockDim.x)
      arenas[p] = call.is_remote(p) ? call.arena + SlotPuts::outbox(call, shape, p) : call.peers[p].arena;
    expected_ = sent_word(session_.epoch(), tag ^ tag >> 20 ^ tag >> 40);
    slot_ = call.shape.slot_of(session_.epoch());
    slot_at_ = slots.first + slot_ * slots.bytes, part_at_ = slot_at_ + call.rank * shape.bytes();
  }

  __device__ bool is_broken() const { return session_.is_broken(); }
  __device__ uint64_t epoch() const { return session_.epoch(); }

  // This rank's part of a peer's slot, in each peer's arena; and its own slot with the parts of all sources.
  __device__ Parts parts() const { return {arenas_, part_at_}; }
  __device__ const char *slot() const { return call_.arena + slot_at_; }

  // All threads of the block, once: whether the call may begin. A start needs its slot: every receiver has read what the call
  // num_slots before this one left there. A fused call alternates two slots of an arena of its own and knows it: whoever
  // sent its part of the call before had received the one before that. A done needs a start that took place.
  // `num_slots`: of the handle that is used (of one that failed: -1, as in Session::has_handle), 0 when the call makes one.
  __device__ bool enter(const LatencyCall &latency, int32_t num_slots) {
    bool ok = true;
    if (num_slots < 0)
      ok = fail(call_, epoch(), Failure::kPeerFailed, Phase::kAnnounce, call_.rank, 0, uint32_t(num_slots));
    if (latency.ticket && epoch() > session_.control().epoch)
      ok = fail(call_, epoch(), Failure::kMismatch, Phase::kAnnounce, call_.rank, session_.control().epoch, epoch());
    if (latency.sends && !is_alone_) {
      const uint64_t before = epoch() > uint64_t(call_.shape.num_slots) ? epoch() - call_.shape.num_slots : 0;
      for (int p = threadIdx.x; p < call_.num_ranks && ok; p += blockDim.x) {
        uint64_t &credit = credit_at(call_.arena, p);
        if (p == call_.rank && credit < before) { // its done comes later in this very stream: nothing to wait for
          ok = fail(call_, epoch(), Failure::kPeerTimeout, Phase::kClaim, p, before, credit);
        } else {
          ok = wait_for(call_, epoch(), credit, Phase::kClaim, p, before) != kNever;
        }
      }
    }
    ok = __syncthreads_and(ok);
    if (latency.sends && !is_alone_) bulk_fence(); // what a receiver read through the generic proxy is stored over in bulk
    return ok;
  }

  // A start: what its done must know.
  __device__ void write_ticket(const LatencyCall &latency) const {
    if (latency.ticket_result && blockIdx.x == 0 && threadIdx.x < 2)
      latency.ticket_result[threadIdx.x] = int32_t(uint32_t(epoch() >> 32 * threadIdx.x));
  }

  // All threads of the block, after a barrier behind their stores: the release of the thread that stores the flag covers
  // what that barrier ordered before it.
  __device__ void publish_routed(const SlotShape &shape) const { // one block of a rank alone
    for (int p = threadIdx.x; p < call_.num_ranks; p += blockDim.x)
      if (!call_.is_remote(p))
        SystemWord<uint64_t>(routed_at(arenas_[p], call_.rank)).store(expected_, cuda::memory_order_release);
    if (call_.shape.has_nodes()) put_routed(puts(), shape);
  }
  // Every block. `begin`, `rows_for`: as put_filled() takes them.
  template <class RowsFor> __device__ void publish_sent(const SlotShape &shape, int64_t begin, RowsFor rows_for) const {
    for (int p = threadIdx.x; p < call_.num_ranks; p += blockDim.x)
      if (!call_.is_remote(p))
        SystemWord<uint64_t>(sent_at(arenas_[p], call_.rank, blockIdx.x)).store(expected_, cuda::memory_order_release);
    if (call_.shape.has_nodes()) put_filled(puts(), shape, begin, rows_for);
  }

  // Until every source has published its table, or every block of every source its rows; acquires them for this block.
  // False: leave.
  __device__ bool wait_routed() {
    bool ok = is_unread();
    for (int p = threadIdx.x; p < call_.num_ranks && ok; p += blockDim.x) ok = is_here(routed_at(call_.arena, p), p);
    return __syncthreads_and(ok);
  }
  __device__ bool wait_sent() {
    bool ok = is_unread();
    const int most = call_.shape.has_nodes() ? max(int(gridDim.x), kSlotPuts) : int(gridDim.x); // words of a source
    for (int i = threadIdx.x; i < call_.num_ranks * most && ok; i += blockDim.x) {
      const int source = i / most, n = i % most; // by block, or of a source of another node by put
      if (n < (call_.is_remote(source) ? kSlotPuts : int(gridDim.x))) ok = is_here(sent_at(call_.arena, source, n), source);
    }
    return __syncthreads_and(ok);
  }

  // The block touches nothing shared any more; `ok`: no wait of it failed. True in the block that ends a complete call: all
  // others have, and it alone goes on.
  __device__ bool end(const LatencyCall &latency, const Outputs &outputs, bool ok) {
    constexpr uint32_t kFailedBlock = 1u << 16; // counted beside the blocks, which saves a look at the abort word
    static_assert(kMaxBlocks < kFailedBlock);
    __shared__ uint32_t s_exited;
    __syncthreads();
    JAX_EP_STAMP(kDone);
    Control &control = session_.control();
    if (threadIdx.x == 0) {
      // Releases this block's reads and results to the last one, which acquires those of all.
      const uint32_t one = ok ? 1 : 1 + kFailedBlock;
      s_exited = DeviceWord<uint32_t>(control.exited).fetch_add(one, cuda::memory_order_acq_rel) + one;
    }
    __syncthreads();
    if (s_exited % kFailedBlock != gridDim.x) return false;
    const bool is_complete = s_exited < kFailedBlock;
    if (threadIdx.x == 0) control.exited = 0; // for the next kernel of the stream
    if (is_complete) {
      if (threadIdx.x == 0 && latency.sends) control.epoch = epoch();
      if (latency.receives) {
        for (int p = threadIdx.x; p < call_.num_ranks; p += blockDim.x) { // publishes that this rank has read the slot
          if (call_.is_remote(p)) continue;
          SystemWord<uint64_t> credit(credit_at(arenas_[p], call_.rank));
          if (is_alone_) credit.store(epoch(), cuda::memory_order_relaxed); // nobody waits for it
          else credit.store(epoch(), cuda::memory_order_release);
        }
      }
      if (call_.shape.has_nodes()) end_over_nodes(puts(), latency.receives && !is_alone_);
    } else {
      give_up(call_, epoch(), outputs);
    }
    return is_complete;
  }
  // One block of a call that does nothing: its carrier may go.
  __device__ void dismiss_carrier() { session_.dismiss_carrier(); }

  // Of a call that failed, or begins after one that did.
  __device__ __noinline__ static void poison_results(const Outputs &outputs, int64_t first, int64_t count) {
    poison(outputs, first, count);
  }

 private:
  // What seldom runs, and what waits, in functions of their own and once per kernel: the rest is then short enough to come
  // quickly out of memory, which counts where every instruction runs once.
  __device__ __noinline__ static bool fail(const CallParams &call, uint64_t epoch, Failure code, Phase phase, int peer,
                                           uint64_t expected, uint64_t seen) {
    Session(call, epoch).fail(code, phase, peer, expected, seen);
    return false;
  }
  __device__ __noinline__ static void give_up(const CallParams &call, uint64_t epoch, const Outputs &outputs) {
    Session session(call, epoch);
    // Peers still store into this rank's slots, which are its own memory; what they wait for will never come.
    session.send_finish(flag_word(epoch, kFailed, uint64_t(call.failure->culprit) & (kMaxRanks - 1),
                                  call.failure->code == uint32_t(Failure::kMismatch)));
    if (threadIdx.x == 0) session.control().broken = 1;
    poison_results(outputs, threadIdx.x, blockDim.x);
    if (call.shape.has_nodes()) __syncthreads(); // the posts of all threads, before the carrier may go
    session.dismiss_carrier();
  }

  __device__ SlotPuts puts() const { return {call_, part_at_, epoch(), expected_, slot_}; }
  __device__ static uint64_t ticket_epoch(const int32_t *ticket) {
    return uint64_t(uint32_t(ticket[0])) | uint64_t(uint32_t(ticket[1])) << 32;
  }
  static constexpr uint64_t kNever = ~uint64_t(0);

  __device__ uint64_t &routed_at(char *arena, int source) const {
    return reinterpret_cast<uint64_t *>(arena + call_.shape.routed())[slot_ * call_.num_ranks + source];
  }
  __device__ uint64_t &credit_at(char *arena, int receiver) const {
    return reinterpret_cast<uint64_t *>(arena + call_.shape.credit())[slot_ * call_.num_ranks + receiver];
  }
  __device__ uint64_t &sent_at(char *arena, int source, int block) const {
    return reinterpret_cast<uint64_t *>(arena + call_.shape.sent())[(slot_ * call_.num_ranks + source) * kMaxBlocks + block];
  }

  // What a start has sent is received once: the sources overwrite it from then on, even while somebody reads it again. The
  // last thread looks for its rank's own credit, while others look for flags.
  __device__ bool is_unread() {
    if (!is_done_ || threadIdx.x != blockDim.x - 1) return true;
    const uint64_t received = credit_at(call_.arena, call_.rank);
    if (received < epoch()) return true;
    return fail(call_, epoch(), Failure::kMismatch, Phase::kAnnounce, call_.rank, epoch(), received);
  }

  // Until the word is at least `least`: what it then is. kNever: this rank fails, because of a time-out or because `peer` left.
  __device__ __noinline__ static uint64_t wait_for(const CallParams &call, uint64_t epoch, uint64_t &word, Phase phase, int peer,
                                                   uint64_t least) {
    Session session(call, epoch);
    SystemWord<uint64_t> flag(word);
    uint64_t value = 0, left = 0;
    unsigned polls = 0;
    if (!session.wait(
            [&](uint64_t *seen) {
              if ((value = *seen = flag.load(cuda::memory_order_acquire)) >= least) return true;
              if (++polls % 64) return false; // a second word, looked at less often
              left = session.finish_from(peer).load(cuda::memory_order_acquire);
              if (flag_state(left) != kFailed) return false;
              value = flag.load(cuda::memory_order_acquire); // complete after all, before its source left?
              return true;
            },
            phase, peer, least))
      return kNever;
    if (value >= least) return value;
    session.fail_revoked(phase, peer, least, left);
    return kNever;
  }

  // Until `peer` has published this word of the call; acquires what it stored into this rank's slot before.
  __device__ bool is_here(uint64_t &word, int peer) {
    const uint64_t seen = wait_for(call_, epoch(), word, Phase::kRound, peer, sent_word(epoch(), 0));
    if (seen == expected_) return true;
    // Of this call with another tag: another program. Of a later one: this one was received before.
    return seen != kNever && fail(call_, epoch(), Failure::kMismatch, Phase::kAnnounce, peer, expected_, seen);
  }

  const CallParams &call_;
  char *const *arenas_;
  Session session_;
  uint64_t expected_;
  int64_t slot_at_, part_at_; // in an arena: the slot, and this rank's part of it
  int slot_;
  bool is_done_, is_alone_; // alone: a fused call in an arena where no other kind is
};

} // namespace jax_ep
