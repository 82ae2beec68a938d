// Where a kernel's time goes: the clock at the boundaries of its phases, per block. A developer's tool (docs/performance.md):
// built with -DJAX_EP_STAMPS=ON, else the macros below are nothing, and kernels have not an instruction of it.
//
// One thread of a block stamps: thread 0, in the loops of a carrier's workers lane 0 of whichever warp. Where no barrier
// precedes a stamp it says when that thread's warp was done, not the block. Buffers are read when nothing runs
// (Loopback::stamps); a stamp publishes nothing and nobody waits for one.
#pragma once

#include <cstdint>

namespace jax_ep {

// What has just ended. Names, as they are printed: stamp_name.
enum class Stamp : uint16_t {
  kBegin, // of the block
  // Throughput mode. Of the leader: announce to blocks-out and finish.
  kCounted, kReduced, kBarrier, kAnnounced, kAgreed, kShared, kPlaced, kMoved, kZeroed, kCopied, kStaged, kPulled,
  kDone, kBlocksOut, kFinishSent,
  // Several nodes, by round: in dispatch, in combine.
  kReturned, kPlacesFound, kFilled, kPosted, kChunkHere, kHandedOn,
  kAsked, kQuestionHere, kAnswerPosted, kListSummed, kSumsWanted, kSumsHere, kNodesSummed, kRoundDone,
  // Latency mode.
  kEntered, kOwnCounted, kRouted, kSent, kFlagged, kArrivalsHere, kArrivalsPlaced, kRowsHere, kReceived,
  // Carrier: a look that found something; a put, by its KiB.
  kLooked, kPutDone,
  kEnd, // of the block
};

// A name that is missing here is a warning, and so an error where those are.
inline const char *stamp_name(Stamp stamp) {
  switch (stamp) {
    case Stamp::kBegin: return "begin";
    case Stamp::kCounted: return "tokens counted";
    case Stamp::kReduced: return "partials written";
    case Stamp::kBarrier: return "all blocks there";
    case Stamp::kAnnounced: return "announced";
    case Stamp::kAgreed: return "agreed";
    case Stamp::kShared: return "all blocks told";
    case Stamp::kPlaced: return "rows placed";
    case Stamp::kMoved: return "rows stored";
    case Stamp::kZeroed: return "rest zeroed";
    case Stamp::kCopied: return "copies made";
    case Stamp::kStaged: return "rows staged";
    case Stamp::kPulled: return "sums written";
    case Stamp::kDone: return "block done";
    case Stamp::kBlocksOut: return "all blocks out";
    case Stamp::kFinishSent: return "finish sent";
    case Stamp::kReturned: return "cells free";
    case Stamp::kPlacesFound: return "places found";
    case Stamp::kFilled: return "chunks filled";
    case Stamp::kPosted: return "chunks posted";
    case Stamp::kChunkHere: return "chunks here";
    case Stamp::kHandedOn: return "handed on";
    case Stamp::kAsked: return "asked";
    case Stamp::kQuestionHere: return "questions here";
    case Stamp::kAnswerPosted: return "answer posted";
    case Stamp::kListSummed: return "list summed";
    case Stamp::kSumsWanted: return "sums wanted";
    case Stamp::kSumsHere: return "sums here";
    case Stamp::kNodesSummed: return "nodes summed";
    case Stamp::kRoundDone: return "round done";
    case Stamp::kEntered: return "entered";
    case Stamp::kOwnCounted: return "own counted";
    case Stamp::kRouted: return "arrivals told";
    case Stamp::kSent: return "rows sent";
    case Stamp::kFlagged: return "flags sent";
    case Stamp::kArrivalsHere: return "arrivals here";
    case Stamp::kArrivalsPlaced: return "arrivals placed";
    case Stamp::kRowsHere: return "rows here";
    case Stamp::kReceived: return "rows received";
    case Stamp::kLooked: return "look with finds";
    case Stamp::kPutDone: return "put done";
    case Stamp::kEnd: return "end";
  }
  return "?";
}

#ifdef JAX_EP_STAMPS

struct StampEntry {
  uint64_t ns;     // globaltimer: the same for all blocks of a GPU, in steps that may be as coarse as 1 us
  uint32_t clock;  // of the SM, low word: for times within a block
  Stamp stamp;
  uint16_t number; // of the round; kPutDone: KiB. 0 where there is neither
};

constexpr int kStampRanks = 16;         // those beyond are not stamped, nor are blocks
constexpr int kStampCallBlocks = 160;   // of the call's own kernel; behind them those of its carrier
constexpr int kStampBlocks = kStampCallBlocks + 16;
constexpr int kStampsPerBlock = 1023;

// Of a block, in device memory.
struct BlockStamps {
  uint32_t count, unused[3]; // stamps of the last kernel, with those that found no room
  StampEntry entries[kStampsPerBlock];
};

// [kStampRanks][kStampBlocks]. Each source file has a pointer of its own, since kernels are not linked to each other; null:
// nothing is stamped. Set before a kernel is launched, by set_stamps.
[[maybe_unused]] static __device__ BlockStamps *stamps_of_all;
// The block's place there, or null, and how many it has taken.
struct StampsShared {
  BlockStamps *to;
  uint32_t count;
};
static __shared__ StampsShared stamps_of_block;

// The source files with kernels, in a list: where to set their pointers.
struct StampUser {
  cudaError_t (*set)(BlockStamps *);
  StampUser *next;
};
inline StampUser *&first_stamp_user() {
  static StampUser *first = nullptr;
  return first;
}
[[maybe_unused]] static StampUser stamp_user = {
    [](BlockStamps *all) { return cudaMemcpyToSymbol(stamps_of_all, &all, sizeof(all)); }, nullptr};
[[maybe_unused]] static const bool is_stamp_user =
    (stamp_user.next = first_stamp_user(), first_stamp_user() = &stamp_user, true);
inline cudaError_t set_stamps(BlockStamps *all) { // on the current device
  cudaError_t e = cudaSuccess;
  for (const StampUser *user = first_stamp_user(); user && !e; user = user->next) e = user->set(all);
  return e;
}

// One thread. Never beyond the block's entries: what finds no room is counted and dropped.
__device__ __forceinline__ void add_stamp(Stamp stamp, int number) {
  BlockStamps *to = stamps_of_block.to;
  if (!to) return;
  const uint32_t at = atomicAdd(&stamps_of_block.count, 1u); // of shared memory: warps of a carrier stamp side by side
  StampEntry entry{0, 0, stamp, uint16_t(number < 0xffff ? number : 0xffff)};
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(entry.ns)::"memory"); // "memory": no access moves across
  asm volatile("mov.u32 %0, %%clock;" : "=r"(entry.clock)::"memory");
  if (at < kStampsPerBlock) to->entries[at] = entry;
  atomicMax(&to->count, at + 1); // nothing waits for it
}
// All threads, first of all; others than thread 0 stamp behind a barrier. The first stamp comes after what this takes.
__device__ __forceinline__ void begin_stamps(int rank, int block) {
  if (threadIdx.x != 0) return;
  BlockStamps *all = stamps_of_all;
  const bool has_place = all && rank >= 0 && rank < kStampRanks && block < kStampBlocks;
  stamps_of_block.to = has_place ? all + int64_t(rank) * kStampBlocks + block : nullptr;
  stamps_of_block.count = 0;
  if (has_place) stamps_of_block.to->count = 0;
  add_stamp(Stamp::kBegin, 0);
}
// Of a call's kernel: blocks that have no place do not take one of the carrier's.
__device__ __forceinline__ int stamped_block() { return int(blockIdx.x) < kStampCallBlocks ? int(blockIdx.x) : kStampBlocks; }

#define JAX_EP_STAMP_BEGIN(rank) begin_stamps(rank, stamped_block())
#define JAX_EP_STAMP_BEGIN_CARRIER(p) \
  do { \
    int rank_ = 0; /* which nobody tells a carrier */ \
    while (rank_ < (p).num_ranks && (p).peers[rank_].arena != (p).arena) ++rank_; \
    begin_stamps(rank_, kStampCallBlocks + int(blockIdx.x)); \
  } while (false)
#define JAX_EP_STAMP(stamp) JAX_EP_STAMP_ROUND(stamp, 0)
#define JAX_EP_STAMP_ROUND(stamp, number) \
  do { \
    if (threadIdx.x == 0) add_stamp(Stamp::stamp, number); \
  } while (false)
#define JAX_EP_STAMP_LANE(stamp, number) add_stamp(Stamp::stamp, number) // in one lane of any warp

#else

#define JAX_EP_STAMP_BEGIN(rank)
#define JAX_EP_STAMP_BEGIN_CARRIER(p)
#define JAX_EP_STAMP(stamp)
#define JAX_EP_STAMP_ROUND(stamp, number)
#define JAX_EP_STAMP_LANE(stamp, number)

#endif

} // namespace jax_ep
