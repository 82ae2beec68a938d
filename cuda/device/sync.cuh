// One call's agreement between ranks: announce, claim, finish, and how a rank leaves when that fails.
//
// Who stores what, with which order, who reads, why an old value cannot pass for a new one: docs/memory_order.md.
// In short: data first, then one release at system scope on a word that carries the call's epoch; the reader
// acquires that word at system scope and passes it on inside the grid with acquire/release at device scope.
// Every wait watches the abort word and a deadline; nobody traps.
#pragma once

#include <cuda/atomic>

#include "cuda/device/copy.cuh"
#include "cuda/device/stamps.cuh"
#include "cuda/kernels/params.h"
#include "cuda/layout.h"

namespace jax_ep {

template <class T> using SystemWord = cuda::atomic_ref<T, cuda::thread_scope_system>;
template <class T> using DeviceWord = cuda::atomic_ref<T, cuda::thread_scope_device>;
template <class T> using BlockWord = cuda::atomic_ref<T, cuda::thread_scope_block>;

__device__ __forceinline__ uint64_t now_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// A tag of what all ranks must pass alike, with one number more that only the device knows.
JAX_EP_HD uint64_t tag_with(uint64_t tag, int32_t number) {
  return tag ^ (uint64_t(uint32_t(number)) + 1) * 0x9e3779b97f4a7c15u;
}

// A block's view of the call under way. Lives in registers; every thread of the grid holds the same values.
class Session {
 public:
  __device__ explicit Session(const CallParams &call)
      : call_(call), control_(reinterpret_cast<Control *>(call.arena + call.shape.control())),
        // Plain read: the leader of the previous call wrote it, and a kernel boundary lies between.
        epoch_(control_->epoch + 1), tag_(call.tag) {}
  // Of a call that began in an earlier kernel.
  __device__ Session(const CallParams &call, uint64_t epoch) : Session(call) { epoch_ = epoch; }
  // Of the call under way, for a function that is not inlined.
  __device__ Session(const CallParams &call, uint64_t epoch, uint64_t tag) : Session(call, epoch) { tag_ = tag; }

  // A number that all ranks must pass alike; before announce().
  __device__ void agree_on(int32_t number) { tag_ = tag_with(tag_, number); }

  __device__ bool is_broken() const { return control_->broken != 0; }
  __device__ uint64_t epoch() const { return epoch_; }
  __device__ uint64_t tag() const { return tag_; }
  __device__ Control &control() const { return *control_; }
  __device__ bool is_leader() const { return blockIdx.x == 0; }
  __device__ bool is_aborted() const {
    return DeviceWord<uint32_t>(control_->abort).load(cuda::memory_order_relaxed) != 0;
  }

  __device__ int32_t *workspace(int block) const {
    return reinterpret_cast<int32_t *>(call_.arena + call_.shape.workspace()) + int64_t(block) * call_.shape.count_words;
  }
  // What `source` announced to this rank; valid after agree() and a grid barrier.
  __device__ const Announce *announce_of(int source) const {
    return reinterpret_cast<const Announce *>(call_.arena + call_.shape.announce(epoch_, source));
  }
  __device__ const int32_t *counts_of(int source) const {
    return reinterpret_cast<const int32_t *>(announce_of(source) + 1);
  }

  // First failure wins: it writes the record, the rest of the rank leaves.
  __device__ void fail(Failure code, Phase phase, int peer, uint64_t expected, uint64_t seen, int culprit = -1) {
    if (DeviceWord<uint32_t>(control_->abort).exchange(1, cuda::memory_order_relaxed) != 0) return;
    FailureRecord *r = call_.failure;
    r->op = uint32_t(call_.op), r->phase = uint32_t(phase), r->rank = call_.rank, r->peer = peer;
    r->epoch = epoch_, r->expected = expected, r->seen = seen, r->culprit = culprit < 0 ? peer : culprit;
    // Publishes the fields above to host readers of `code`.
    SystemWord<uint32_t>(r->code).store(uint32_t(code), cuda::memory_order_release);
  }

  // Whether a handle is that of a complete dispatch. One that failed, maybe in another arena, which this one knows nothing
  // of, left -1 in all that it says: nothing would be sent, and peers would take for this rank's rows what lay there before.
  __device__ bool has_handle(const int32_t *recv_offsets) {
    const int32_t num_slots = recv_offsets[call_.num_ranks];
    if (num_slots >= 0) return true;
    fail(Failure::kPeerFailed, Phase::kAnnounce, call_.rank, 0, uint32_t(num_slots));
    return false;
  }

  // Spins until ready() or until this rank aborts; `limits` deadlines long. False: leave.
  template <class Ready> __device__ bool wait(Ready ready, Phase phase, int peer, uint64_t expected, int limits = 1) {
    uint64_t start = 0, seen = 0;
    for (unsigned spin = 0; !ready(&seen); ++spin) {
      if (spin % 64 != 63) continue; // the clock and the abort word are slower than the flag
      if (is_aborted()) return false;
      if (!start) start = now_ns(); // not before: what is there at once needs no clock
      if (is_over(start, limits)) {
        fail(Failure::kPeerTimeout, phase, peer, expected, seen);
        return false;
      }
    }
    return true;
  }

  // Until `peer` has raised the word to `least`, which acquires what it published before; ends as well when the peer leaves
  // the call, so that no deadline is spent on it. False: leave.
  __device__ bool wait_or_left(uint64_t &word, Phase phase, int peer, uint64_t least) {
    SystemWord<uint64_t> flag(word);
    uint64_t left = 0;
    bool has_gone = false;
    unsigned polls = 0;
    if (!wait(
            [&](uint64_t *seen) {
              if ((*seen = flag.load(cuda::memory_order_acquire)) >= least) return true;
              if (++polls % 64) return false; // a second word, looked at less often
              left = finish_from(peer).load(cuda::memory_order_acquire);
              // Of a later call: the peer completed this one.
              return has_gone = flag_state(left) == kFailed && flag_epoch(left) <= epoch_;
            },
            phase, peer, least))
      return false;
    if (!has_gone || flag.load(cuda::memory_order_acquire) >= least) return true; // complete before its source left?
    fail_revoked(phase, peer, least, left);
    return false;
  }

  // Several nodes: what a carrier is to store in the arena of `put.peer`. The thread's own entry; whatever it reads was
  // stored before, by this thread or behind a barrier. The word of the put before has arrived: who waits for it says so.
  __device__ void post(int64_t index, const Put &put) {
    Put &entry = reinterpret_cast<Put *>(call_.arena + call_.shape.puts())[index];
    const uint64_t number = entry.posted + 1; // this rank's kernels alone write it
    entry.src = put.src, entry.dst = put.dst, entry.bytes = put.bytes;
    entry.signal = put.signal, entry.value = put.value, entry.peer = put.peer;
    // Publishes the entry and the bytes at `src` to this rank's carrier.
    DeviceWord<uint64_t>(entry.posted).store(number, cuda::memory_order_release);
  }
  // Leader, at the very end of a kernel, however it ends: its carrier may go once all puts are carried.
  __device__ void dismiss_carrier() {
    if (call_.shape.has_nodes() && threadIdx.x == 0)
      DeviceWord<uint64_t>(control_->calls_ended).fetch_add(1, cuda::memory_order_release);
  }

  // All blocks of this rank; false in every thread once this rank aborts. Orders everything before it in any
  // block before everything after it in any block (release on arrival, acquire on departure, device scope).
  __device__ bool grid_barrier() {
    __syncthreads();
    int ok = 1;
    if (threadIdx.x == 0) {
      DeviceWord<uint32_t> arrived(control_->arrived), generation(control_->generation);
      const uint32_t mine = generation.load(cuda::memory_order_relaxed); // cannot move before this block arrives
      if (arrived.fetch_add(1, cuda::memory_order_acq_rel) == gridDim.x - 1) {
        arrived.store(0, cuda::memory_order_relaxed); // ordered before the next arrivals by the release below
        generation.store(mine + 1, cuda::memory_order_release);
      } else {
        // Others may be inside a wait for a peer: three deadlines are longer than any of those.
        ok = wait([&](uint64_t *seen) { return (*seen = generation.load(cuda::memory_order_acquire)) != mine; },
                  Phase::kGrid, call_.rank, mine + 1, 3);
      }
      if (is_aborted()) ok = 0;
    }
    return __syncthreads_and(threadIdx.x != 0 || ok);
  }

  // Leader block. Pushes this rank's announce to every peer, then the flag. `counts` (shared memory,
  // num_counts words) may be null: the mailbox' counts are then left alone.
  __device__ void announce(const int32_t *counts, int num_counts) {
    const int n = call_.num_ranks;
    for (int p = threadIdx.x; p < n; p += blockDim.x) {
      if (call_.is_remote(p)) continue;
      Announce *a = mailbox_at(p, epoch_);
      const Peer &peer = call_.peers[p];
      a->tag = tag_;
      a->is_staged = call_.is_staged_for(p, peer);
      for (int i = 0; i < kNumBuffers; ++i)
        a->buffer[i] = call_.buffer[i] - (peer.same_process ? 0 : call_.pool_base);
    }
    for (int i = threadIdx.x; i < num_counts; i += blockDim.x) { // no division of an index into both, which takes longer
      const int32_t count = counts[i];
      for (int p = 0; p < n; ++p)
        if (!call_.is_remote(p)) reinterpret_cast<int32_t *>(mailbox_at(p, epoch_) + 1)[i] = count;
    }
    // To other nodes the same goes out of an own copy, as that of a rank whose buffers nobody there touches.
    const int64_t outbox = call_.shape.outbox() + int64_t(epoch_ & 1) * call_.shape.announce_stride();
    if (call_.shape.has_nodes()) {
      Announce *own = reinterpret_cast<Announce *>(call_.arena + outbox);
      if (threadIdx.x == 0) own->tag = tag_, own->is_staged = 1;
      for (int i = threadIdx.x; i < num_counts; i += blockDim.x) reinterpret_cast<int32_t *>(own + 1)[i] = counts[i];
    }
    __syncthreads(); // every thread's stores above, before the flag of any thread below, whose release covers them
    for (int p = threadIdx.x; p < n; p += blockDim.x) {
      if (call_.is_remote(p)) {
        const int64_t at = call_.shape.announce(epoch_, call_.rank), word = sizeof(uint64_t); // all but the flag
        const int64_t bytes = int64_t(sizeof(Announce)) - word + round_up(int64_t(num_counts) * 4, 8);
        post(p, Put{0, 0, outbox + word, at + word, bytes, at, flag_word(epoch_, kAnnounced), p});
        continue;
      }
      // Publishes the announce and counts just pushed, and (combine) the rows this rank prepared before.
      SystemWord<uint64_t>(mailbox_at(p, epoch_)->flag).store(flag_word(epoch_, kAnnounced), cuda::memory_order_release);
    }
  }

  // Leader block. Waits for every announce, compares tags, then claims all. False: leave.
  __device__ bool agree() {
    bool ok = true; // of this thread: a look at the abort word would cost a trip to memory
    for (int p = threadIdx.x; p < call_.num_ranks && ok; p += blockDim.x) {
      Announce *a = const_cast<Announce *>(announce_of(p));
      SystemWord<uint64_t> flag(a->flag);
      const uint64_t expected = flag_word(epoch_, kAnnounced);
      uint64_t word = 0;
      if (call_.is_remote(p)) { // nobody revokes its word here
        ok = wait_or_left(a->flag, Phase::kAnnounce, p, expected);
        if (ok && a->tag != tag_) {
          fail(Failure::kMismatch, Phase::kAnnounce, p, tag_, a->tag);
          ok = false;
        }
        continue;
      }
      // Acquires the peer's announce, its counts, and whatever it released before announcing.
      if (!wait([&](uint64_t *seen) { return flag_epoch(word = *seen = flag.load(cuda::memory_order_acquire)) >= epoch_; },
                Phase::kAnnounce, p, expected)) {
        ok = false;
      } else if (word != expected) {
        fail_revoked(Phase::kAnnounce, p, expected, word);
        ok = false;
      } else if (a->tag != tag_) {
        fail(Failure::kMismatch, Phase::kAnnounce, p, tag_, a->tag);
        ok = false;
      }
    }
    if (!__syncthreads_and(ok)) return false;
    // A peer's buffers may be touched only while it is inside the call. Claiming makes its departure wait for
    // our finish; a peer that left first has revoked the word and we leave too.
    for (int p = threadIdx.x; p < call_.num_ranks; p += blockDim.x) {
      if (call_.is_remote(p)) continue;
      uint64_t word = flag_word(epoch_, kAnnounced);
      SystemWord<uint64_t> flag(const_cast<Announce *>(announce_of(p))->flag);
      if (flag.compare_exchange_strong(word, flag_word(epoch_, kClaimed), cuda::memory_order_acq_rel)) continue;
      fail_revoked(Phase::kClaim, p, flag_word(epoch_, kAnnounced), word);
      ok = false;
    }
    return __syncthreads_and(ok);
  }

  // Whether `peer` has left this very call: its rows, credits and buffers are gone. Rounds ask before they go on.
  __device__ bool has_left(int peer) const {
    const uint64_t word = finish_from(peer).load(cuda::memory_order_acquire);
    return flag_epoch(word) == epoch_ && flag_state(word) == kFailed;
  }
  __device__ void fail_left(int peer, uint64_t expected) {
    fail_revoked(Phase::kRound, peer, expected, finish_from(peer).load(cuda::memory_order_acquire));
  }

  // Every block, after its last access to anything shared. Non-leaders return true at once and may exit; the
  // leader returns when all that concerns this rank's buffers is over: true with complete data, false after a
  // failure (then no peer writes this rank's buffers any more, unless the record says PeerLost).
  __device__ bool leave() {
    __syncthreads(); // every thread's stores to peers, before the fence or the flag of the thread that goes on
    JAX_EP_STAMP(kDone);
    DeviceWord<uint32_t> exited(control_->exited);
    int have_exited = 1;
    if (!is_leader()) {
      if (threadIdx.x == 0) {
        __threadfence_system(); // the block's stores to peers, before the finish flag that the leader stores
        exited.fetch_add(1, cuda::memory_order_release);
      }
      return true;
    }
    if (threadIdx.x == 0) {
      // Acquires all blocks' stores. Abort does not cut this short: a block that still moves rows must not be left
      // behind. Blocks wait for bounded things only, each at most three deadlines.
      const uint64_t start = now_ns();
      while (exited.load(cuda::memory_order_acquire) != gridDim.x - 1) {
        if (!is_over(start, 4)) continue;
        fail(Failure::kPeerLost, Phase::kGrid, call_.rank, gridDim.x - 1, exited.load(cuda::memory_order_relaxed));
        have_exited = 0;
        break;
      }
      exited.store(0, cuda::memory_order_relaxed);
      __threadfence_system(); // carries what was acquired to system scope for the flags below
    }
    JAX_EP_STAMP(kBlocksOut);
    // A block that may still move rows: promise nothing. The peers then find this rank lost by themselves.
    bool is_sent = !__syncthreads_and(have_exited);
    bool ok = __syncthreads_and(!is_aborted());
    if (ok) {
      send_finish(flag_word(epoch_, kAnnounced));
      is_sent = true;
      JAX_EP_STAMP(kFinishSent);
      ok = __syncthreads_and(wait_finish()); // no other block is left that could fail: no second look at the abort word
    }
    if (!ok) leave_broken(is_sent);
    if (threadIdx.x == 0) {
      if (ok) control_->epoch = epoch_;
      else control_->broken = 1;
    }
    return ok;
  }

  // The word of a peer that completed this call, or left it.
  __device__ SystemWord<uint64_t> finish_from(int peer) const {
    return SystemWord<uint64_t>(reinterpret_cast<uint64_t *>(call_.arena + call_.shape.finish())[peer]);
  }

  // `peer` left with this word. Names the rank that it waited for, or that runs another program; if that is this
  // rank, it came too late, or is the one that differs.
  __device__ void fail_revoked(Phase phase, int peer, uint64_t expected, uint64_t word) {
    const int culprit = flag_culprit(word);
    const bool is_own = culprit == call_.rank || culprit == peer;
    if (flag_is_mismatch(word))
      fail(Failure::kMismatch, phase, is_own ? peer : culprit, tag_, announce_of(peer)->tag, culprit);
    else if (is_own) fail(Failure::kPeerFailed, phase, peer, expected, word, culprit);
    else fail(Failure::kPeerTimeout, phase, culprit, expected, word);
  }

  // Tells every peer: this rank touches nothing of yours any more (and, without kFailed, all its rows are there).
  __device__ void send_finish(uint64_t word) {
    for (int p = threadIdx.x; p < call_.num_ranks; p += blockDim.x) {
      if (call_.is_remote(p)) {
        post(call_.num_ranks + p, finish_put(p, word));
        continue;
      }
      SystemWord<uint64_t>(reinterpret_cast<uint64_t *>(call_.peers[p].arena + call_.shape.finish())[call_.rank])
          .store(word, cuda::memory_order_release);
    }
  }

 private:
  __device__ Put finish_put(int peer, uint64_t word) const {
    return Put{0, 0, 0, 0, 0, call_.shape.finish() + int64_t(call_.rank) * 8, word, peer};
  }
  __device__ Announce *mailbox_at(int peer, uint64_t epoch) const {
    return reinterpret_cast<Announce *>(call_.peers[peer].arena + call_.shape.announce(epoch, call_.rank));
  }
  __device__ bool is_over(uint64_t start, int limits) const { // signed: the clock may be read a little back
    return int64_t(now_ns() - start) > int64_t(call_.limit_ns) * limits;
  }

  __device__ bool wait_finish() { // of this thread's peers
    for (int p = threadIdx.x; p < call_.num_ranks; p += blockDim.x) {
      uint64_t word = 0;
      // Acquires the rows that the peer stored into this rank's buffers.
      if (!wait([&](uint64_t *seen) { return flag_epoch(word = *seen = finish_from(p).load(cuda::memory_order_acquire)) >= epoch_; },
                Phase::kFinish, p, flag_word(epoch_, kAnnounced)))
        return false;
      // A later epoch: the peer completed this call and failed in the next one.
      if (flag_epoch(word) != epoch_ || flag_state(word) != kFailed) continue;
      fail_revoked(Phase::kFinish, p, flag_word(epoch_, kAnnounced), word);
      return false;
    }
    return true;
  }

  // Leader block, nothing of ours is being moved any more: revoke, tell, wait for those who claimed.
  __device__ void leave_broken(bool is_sent) {
    __shared__ int s_lost;
    if (threadIdx.x == 0) s_lost = -1;
    __syncthreads();
    const uint64_t culprit = uint64_t(call_.failure->culprit) & (kMaxRanks - 1);
    const bool is_mismatch = call_.failure->code == uint32_t(Failure::kMismatch);
    const uint64_t revoked = flag_word(epoch_, kRevoked, culprit, is_mismatch);
    if (!is_sent) send_finish(flag_word(epoch_, kFailed, culprit, is_mismatch));
    for (int p = threadIdx.x; p < call_.num_ranks; p += blockDim.x) {
      if (p == call_.rank) continue;
      if (call_.is_remote(p)) { // it touches no buffer of ours; if it completes this call, it learns in the next one
        if (is_sent) post(2 * call_.num_ranks + p, finish_put(p, flag_word(epoch_ + 1, kFailed, culprit, is_mismatch)));
        continue;
      }
      // A peer that completed this call will wait for us in the next one, where we shall not be: tell it now. Its
      // other half holds epoch - 1, which it has read (we have its finish of that call).
      SystemWord<uint64_t>(mailbox_at(p, epoch_ + 1)->flag)
          .store(flag_word(epoch_ + 1, kRevoked, culprit, is_mismatch), cuda::memory_order_release);
      SystemWord<uint64_t> flag(mailbox_at(p, epoch_)->flag);
      uint64_t word = flag.load(cuda::memory_order_relaxed);
      bool is_claimed = false;
      do is_claimed = word == flag_word(epoch_, kClaimed);
      while (!is_claimed && !flag.compare_exchange_weak(word, revoked, cuda::memory_order_acq_rel));
      if (!is_claimed) continue;
      // The peer may be writing our buffers: its finish ends that. It may itself wait three deadlines before it
      // leaves, so the second limit is four; beyond it nothing is safe.
      const uint64_t start = now_ns();
      while (flag_epoch(finish_from(p).load(cuda::memory_order_acquire)) < epoch_) {
        if (!is_over(start, 4)) continue;
        s_lost = p;
        break;
      }
    }
    __syncthreads();
    if (threadIdx.x == 0 && s_lost >= 0) {
      call_.failure->peer = s_lost;
      SystemWord<uint32_t>(call_.failure->code).store(uint32_t(Failure::kPeerLost), cuda::memory_order_release);
    }
    __syncthreads();
  }

  const CallParams &call_;
  Control *control_;
  uint64_t epoch_, tag_;
};

// Fills outputs of a call that failed: floats NaN and indices -1 (both are bytes of 0xff), sizes 0. The calling
// threads (`first` .. step `count`) share the work.
__device__ __forceinline__ void poison(const Outputs &outputs, int64_t first, int64_t count) {
  for (int i = 0; i < outputs.size; ++i) {
    const uint32_t word = outputs.is_size[i] ? 0u : 0xffffffffu;
    uint32_t *at = static_cast<uint32_t *>(outputs.at[i]);
    for (int64_t j = first; j < outputs.bytes[i] / 4; j += count) at[j] = word;
    if (first < outputs.bytes[i] % 4) static_cast<uint8_t *>(outputs.at[i])[outputs.bytes[i] / 4 * 4 + first] = uint8_t(word);
  }
}

} // namespace jax_ep
