// Where each byte lives: every struct and offset that two ranks, or host and device, must agree on.
//
// This is the only file with offset arithmetic. It is plain C++17 so that host code, device code and the
// unit tests read the same numbers. Anything that changes here changes kProtocol.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define JAX_EP_HD __host__ __device__ __forceinline__
#else
#define JAX_EP_HD inline
#endif

namespace jax_ep {

constexpr int kProtocol = 7;    // both ends of every mapping compare it before they talk
constexpr int kMaxTopk = 32;    // one lane of a warp per routed expert of a token
constexpr int kMaxBlocks = 256; // blocks (= SMs) one call may use; sizes the routing workspace
constexpr int kFusedSlots = 2;   // of latency mode's arenas without halves: FUSED_SLOTS in jax_ep/layout.py
constexpr int kSlotPuts = 4;        // latency mode over nodes: puts into which the rows for one rank are cut
constexpr int kMaxNodes = 32;       // one lane of a warp per node
constexpr int kMaxNodeBlocks = 64;  // blocks that a call over several nodes may use; sizes the flags of their chunks
constexpr int kMaxNodeTokens = 512; // tokens of a chunk: one thread of a block each
constexpr int kMaxCountWords = 1 << 24; // far beyond max_experts(): only keeps a wrong number from looping

enum class Op : uint32_t { kDispatch = 1, kRedispatch = 2, kCombine = 3 };
enum class Layout : int32_t { kExpert = 0, kToken = 1, kBatched = 2 };
enum class DType : int32_t { kBF16 = 0, kF16 = 1, kF32 = 2, kOpaque = 3 }; // opaque: moved, never added or cast
enum class Quantize : int32_t { kNone = 0, kFp8 = 1, kFp8Ue8m0 = 2, kFp8Wire = 3 };

JAX_EP_HD int64_t dtype_bytes(DType t) { return t == DType::kF32 ? 4 : t == DType::kOpaque ? 1 : 2; }
JAX_EP_HD int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// ---------------------------------------------------------------------------------------------------------
// Flag words. Every flag is a 64-bit number that only grows, so nothing is ever reset between calls and an
// old value can never be taken for a new one: it carries the epoch (the number of the call in this arena).
//
//   announce   epoch << 18 | cause << 16 | culprit << 2 | state   in the *receiver's* mailbox, one per source
//   finish     epoch << 18 | cause << 16 | culprit << 2 | state   in the receiver's arena, one per source
//   ready/free epoch << 24 | rounds done                          in the receiver's arena, one per partner (staged)
//   routed     epoch << 20 | tag                                  latency mode: in the receiver's arena, one per slot, source
//   sent       epoch << 20 | tag                                  ... and block of the source
//   credit     epoch                                              latency mode: in the source's arena, one per slot, receiver
//   arrived, returned, asked   epoch << 24 | rounds done          several nodes: one per parity of the round, node and block
//
// `culprit` is the rank that a leaver was waiting for (or that ran another program: `cause` 1), passed on from leaver
// to leaver, so that whoever meets a revoked word can name it.
enum State : uint64_t {
  kAnnounced = 0, // announce: the source's buffers may be claimed; finish: complete
  kClaimed = 1,   // announce: the owner of the mailbox will touch the source's buffers (CAS announced -> claimed)
  kRevoked = 2,   // announce: the source left; its buffers are out of bounds (remote CAS announced -> revoked)
  kFailed = 3,    // finish: the source touches nothing of ours any more, but its part is incomplete
};
constexpr int kMaxRanks = 1 << 14; // fits the culprit field

JAX_EP_HD uint64_t flag_word(uint64_t epoch, State state, uint64_t culprit = 0, bool is_mismatch = false) {
  return epoch << 18 | uint64_t(is_mismatch) << 16 | culprit << 2 | state;
}
JAX_EP_HD uint64_t flag_epoch(uint64_t word) { return word >> 18; }
JAX_EP_HD bool flag_is_mismatch(uint64_t word) { return word >> 16 & 1; }
JAX_EP_HD State flag_state(uint64_t word) { return State(word & 3); }
JAX_EP_HD int flag_culprit(uint64_t word) { return int(word >> 2 & (kMaxRanks - 1)); }
JAX_EP_HD uint64_t round_word(uint64_t epoch, uint64_t rounds) { return epoch << 24 | rounds; }
JAX_EP_HD uint64_t sent_word(uint64_t epoch, uint64_t tag) { return epoch << 20 | (tag & 0xfffff); }
JAX_EP_HD uint64_t sent_epoch(uint64_t word) { return word >> 20; }

// ---------------------------------------------------------------------------------------------------------
// Announce: what a source tells one receiver at the start of a call. `counts` (per expert, then per rank)
// follow it in the mailbox when the call routes; other calls leave them untouched.
enum Buffer {
  kRows = 0,    // dispatch: recv_x; combine: y (token layout) or partial sums
  kScalars = 1, // dispatch: recv_weights; combine: scalars
  kMeta = 2,    // dispatch: slot_meta
  kTokens = 3,  // dispatch: slot_token
  kSide = 4,    // dispatch: recv_side
  kSingles = kMeta,         // combine: y, where a token's only row on a rank is read without a partial sum
  kSingleWeights = kTokens, // combine: the factors of these rows
  kNumBuffers = 5,
};

struct Announce {
  uint64_t flag;                // announce word, stored last with release.sys
  uint64_t tag;                 // hash of op, shapes, dtype: ranks that run different programs are found here
  uint64_t buffer[kNumBuffers]; // address (same process) or offset in the source's XLA pool (other process)
  uint64_t is_staged;           // 1: this receiver cannot reach the source's buffers, rows go through staging
  uint64_t reserved[8];
};
static_assert(sizeof(Announce) == 128, "announce is one pair of cache sectors");

// Control words of a rank, touched by its own blocks only.
struct Control {
  uint64_t epoch;        // calls completed in this arena; the call under way is epoch + 1
  uint32_t arrived;      // grid barrier: blocks that arrived in this generation (the last one resets it)
  uint32_t generation;   // grid barrier: advanced by the last arriver
  uint32_t exited;       // blocks that touch nothing remote any more; the leader waits for all and resets it
  uint32_t abort;        // set by the first thread whose wait failed; every wait of this rank watches it
  uint32_t broken;       // a call failed: later calls poison their outputs and leave at once, until reset()
  uint32_t filled;       // latency mode over nodes: blocks that have filled the outbox; the last one resets it
  uint64_t warm;         // peers store here once at set-up, so that the first call finds the mapping warm
  uint64_t calls_ended;  // several nodes: kernels that have ended in this arena, failed ones too; carriers wait for it
  uint64_t rows_put;     // several nodes: rows and sums that this rank has put to other nodes
  uint64_t reserved[9];
};
static_assert(sizeof(Control) == 128, "control block");

// Several nodes. Words in the receiver's arena that the partner's block of the same number raises, by round.
enum NodeFlag {
  kArrived = 0,  // dispatch: records, combine: sums of nodes lie in the cell
  kReturned = 1, // dispatch: a cell may be filled again
  kAsked = 2,    // combine: which sums of which tokens are wanted
  kNumNodeFlags = 3,
};

// What a rank's kernel wants to be stored on another node, and what a carrier does (kernels/carrier.cuh): bytes, then a
// word that tells of them. One entry for every word that the rank raises elsewhere, in its own arena.
struct Put {
  uint64_t posted;      // grows with every put; stored last with release
  uint64_t done;        // ... up to here a carrier has carried; written by it alone
  int64_t src, dst;     // offsets in the own arena and in the peer's
  int64_t bytes;        // a multiple of 8, or 0: the word alone
  int64_t signal;       // offset of the word in the peer's arena
  uint64_t value;       // ... and what it becomes, after the bytes are there
  int64_t peer;
};
static_assert(sizeof(Put) == 64, "put");
// Latency mode: the words of a slot for one rank, those of the parts of the rows first.
constexpr int kPutRouted = kSlotPuts, kPutCredit = kSlotPuts + 1, kPutsPerSlot = kSlotPuts + 2;

// ---------------------------------------------------------------------------------------------------------
// Arena: the symmetric memory of one rank in one group. Its shape is a size class, never one call's sizes,
// so that calls of different shapes share an arena and find their mailboxes in the same place.
struct ArenaShape {
  int32_t num_ranks;
  int32_t count_words;   // power of two >= num_experts + num_ranks + 1
  int64_t staging_bytes; // both windows, all partners; latency mode: all slots
  int32_t num_slots = 0; // latency mode: calls whose rows may wait in the arena at a time; else 0
  int32_t num_nodes = 1; // more: nothing is staged; without slots, staging_bytes are those of the cells (NodeCell)

  JAX_EP_HD int64_t control() const { return 0; }
  JAX_EP_HD int64_t finish() const { return sizeof(Control); }                        // u64 [num_ranks]
  JAX_EP_HD int64_t ready() const { return finish() + flags(); }                      // u64 [num_ranks]
  JAX_EP_HD int64_t free_() const { return ready() + flags(); }                       // u64 [num_ranks]
  JAX_EP_HD int64_t routed() const { return free_() + flags(); }                      // u64 [num_slots][num_ranks]
  JAX_EP_HD int64_t credit() const { return routed() + slot_flags(); }                // u64 [num_slots][num_ranks]
  JAX_EP_HD int64_t sent() const { return credit() + slot_flags(); }                  // u64 [num_slots][num_ranks][kMaxBlocks]
  JAX_EP_HD int64_t node_flags() const { return sent() + int64_t(num_slots) * num_ranks * kMaxBlocks * 8; } // u64 [num_node_flags()]
  JAX_EP_HD int64_t carried() const { return node_flags() + num_node_flags() * 8; }   // u64 [kMaxNodeBlocks] calls that each
                                                                                      // block of the carrier began
  JAX_EP_HD int64_t puts() const { return carried() + (has_nodes() ? kMaxNodeBlocks * 8 : 0); } // Put [num_puts()]
  JAX_EP_HD int64_t outbox() const { return puts() + num_puts() * int64_t(sizeof(Put)); } // [2] own announce + counts, to be put
  JAX_EP_HD int64_t mailbox() const { return outbox() + (has_cells() ? 2 * announce_stride() : 0); } // [2][num_ranks]
                                                                                      // announce + counts
  JAX_EP_HD int64_t announce_stride() const { return sizeof(Announce) + int64_t(count_words) * 4; }
  JAX_EP_HD int64_t announce(uint64_t epoch, int source) const {                      // alternates by epoch parity
    return mailbox() + (int64_t(epoch & 1) * num_ranks + source) * announce_stride();
  }
  JAX_EP_HD int64_t workspace() const { return announce(1, num_ranks); }              // i32 [kMaxBlocks][count_words], local:
                                                                                      // experts, ranks, invalid ids
  JAX_EP_HD int64_t staging() const { return round_up(workspace() + int64_t(kMaxBlocks) * count_words * 4, 1024); }
  JAX_EP_HD int64_t bytes() const { return staging() + staging_bytes; }

  // Latency mode: the slot of a call.
  JAX_EP_HD int slot_of(uint64_t epoch) const { // a GPU divides 32 bits in a quarter of the time of 64
    return int(epoch >> 32 ? epoch % uint64_t(num_slots) : uint32_t(epoch) % uint32_t(num_slots));
  }
  JAX_EP_HD int64_t slot_bytes() const { return staging_bytes / num_slots / 1024 * 1024; }
  JAX_EP_HD int64_t slot(int index) const { return staging() + index * slot_bytes(); }
  // Parts of a slot: one of each source, then one for each rank of another node, to be put there.
  JAX_EP_HD int num_slot_parts() const { return num_ranks + (has_nodes() ? num_ranks - ranks_per_node() : 0); }

  // Several nodes, all of as many ranks. Puts: announce, finish and failure to each rank, then one per flag, or in latency
  // mode one per slot, rank and word.
  JAX_EP_HD bool has_nodes() const { return num_nodes > 1; }
  JAX_EP_HD bool has_cells() const { return has_nodes() && num_slots == 0; }
  JAX_EP_HD int ranks_per_node() const { return num_ranks / num_nodes; }
  JAX_EP_HD int64_t num_node_flags() const { return has_cells() ? int64_t(kNumNodeFlags) * 2 * num_nodes * kMaxNodeBlocks : 0; }
  JAX_EP_HD int64_t node_flag(NodeFlag flag, int parity, int node, int block) const {
    return ((int64_t(flag) * 2 + parity) * num_nodes + node) * kMaxNodeBlocks + block;
  }
  JAX_EP_HD int64_t slot_put(int slot, int peer, int word) const {
    return 3 * int64_t(num_ranks) + (int64_t(slot) * num_ranks + peer) * kPutsPerSlot + word;
  }
  JAX_EP_HD int64_t num_puts() const { return has_nodes() ? slot_put(num_slots, 0, 0) + num_node_flags() : 0; }

 private:
  JAX_EP_HD int64_t flags() const { return round_up(int64_t(num_ranks) * 8, 128); }
  JAX_EP_HD int64_t slot_flags() const { return round_up(int64_t(num_slots) * num_ranks * 8, 128); }
};

// The size classes that serve a call. `row_bytes`: of a row as it crosses, with its side array.
JAX_EP_HD ArenaShape arena_shape(int num_ranks, int num_experts, int64_t row_bytes, int num_topk,
                                 int64_t staging_bytes);
JAX_EP_HD ArenaShape latency_arena_shape(int num_ranks, int num_nodes, int num_experts, int64_t row_bytes, int num_topk,
                                         int64_t num_tokens, int num_slots);

// ---------------------------------------------------------------------------------------------------------
// Staged path: one record per token of a round, in a window of the receiver: [parity][partner][token in round].
//   dispatch: row, i32 meta[K], f32 scalars[K], i32 slot (-1: the token does not come here), side
//   combine:  row, f32 scalars[K]
struct StagingShape {
  int64_t row_bytes;
  int32_t num_topk;
  int64_t side_bytes = 0;
  JAX_EP_HD int64_t meta() const { return row_bytes; }
  JAX_EP_HD int64_t scalars() const { return row_bytes + int64_t(num_topk) * 4; }
  JAX_EP_HD int64_t slot() const { return row_bytes + int64_t(num_topk) * 8; }
  JAX_EP_HD int64_t side() const { return round_up(slot() + 4, 16); }
  JAX_EP_HD int64_t record_bytes() const { return side() + round_up(side_bytes, 16); }
  JAX_EP_HD int64_t tokens_per_round(const ArenaShape &arena) const {
    return arena.staging_bytes / (2 * arena.num_ranks * record_bytes());
  }
};

JAX_EP_HD ArenaShape arena_shape(int num_ranks, int num_experts, int64_t row_bytes, int num_topk,
                                 int64_t staging_bytes) {
  ArenaShape s{num_ranks, 1, staging_bytes > 0 ? staging_bytes : 1};
  while (s.count_words < kMaxCountWords && s.count_words < int64_t(num_experts) + num_ranks + 1) s.count_words *= 2;
  // At least one token per round and partner, both parities; doubling keeps it a size class.
  while (StagingShape{row_bytes, num_topk}.tokens_per_round(s) < 1) s.staging_bytes *= 2;
  return s;
}

// ---------------------------------------------------------------------------------------------------------
// Latency mode: what one source leaves in a slot of a receiver. Rows lie by token, so that a source needs no count before it
// sends them; a token that does not go to the receiver leaves its place untouched. To a rank of another node they are put
// one after the other, so that no more is put than goes there: `packed` says where. "Arrivals": the source's tokens that go
// there, in order; only as many as there are are written.
//   dispatch: the source's counts, its arrivals, all weights by token, and the rows (with their sides) of the arrivals
//   combine:  the partial sums of the tokens of the *receiver*, and their scalars
struct SlotShape {
  int64_t row_bytes, side_bytes; // of a row as it crosses, and of what lies beside it
  int64_t num_tokens;
  int32_t num_topk, num_columns; // num_experts + num_ranks
  JAX_EP_HD int64_t counts() const { return 0; }                                         // i32 [E + R]
  JAX_EP_HD int64_t tokens() const { return round_up(int64_t(num_columns) * 4, 128); }   // i32 [arrivals] token
  JAX_EP_HD int64_t experts() const { return tokens() + round_up(num_tokens * 4, 128); } // i32 [arrivals, K] local, -1: elsewhere
  JAX_EP_HD int64_t places() const { return experts() + table_bytes(); }                 // i32 [arrivals, K] number of the source's
                                                                                         // earlier entries for the expert
  JAX_EP_HD int64_t scalars() const { return places() + table_bytes(); }                 // f32 [T, K]
  JAX_EP_HD int64_t packed() const { return scalars() + table_bytes(); }                 // i32 [T] row of a token (other node)
  JAX_EP_HD int64_t sides() const { return packed() + round_up(num_tokens * 4, 128); }   // [T, side_stride], by token
  JAX_EP_HD int64_t rows() const { return sides() + round_up(num_tokens * side_stride(), 128); } // [T, row_bytes]
  JAX_EP_HD int64_t side_stride() const { return round_up(side_bytes, 16); }
  JAX_EP_HD int64_t bytes() const { return rows() + round_up(num_tokens * row_bytes, 128); } // of one source

 private:
  JAX_EP_HD int64_t table_bytes() const { return round_up(num_tokens * num_topk * 4, 128); }
};

JAX_EP_HD ArenaShape latency_arena_shape(int num_ranks, int num_nodes, int num_experts, int64_t row_bytes, int num_topk,
                                         int64_t num_tokens, int num_slots) {
  ArenaShape s = arena_shape(num_ranks, num_experts, 16, 1, 1);
  const SlotShape whole{row_bytes, 0, num_tokens, num_topk, num_experts + num_ranks};
  const int64_t source = whole.bytes() + 256; // wherever a side cuts the row
  s.num_slots = num_slots, s.num_nodes = num_nodes, s.staging_bytes = int64_t(num_slots) << 20;
  while (s.slot_bytes() < s.num_slot_parts() * source) s.staging_bytes *= 2;
  return s;
}

// ---------------------------------------------------------------------------------------------------------
// Several nodes: rank (node A, local index l) and its partners (B, l) exchange tokens in chunks. A block works through its
// share of the tokens in rounds of at most `tokens` and has a cell per parity of the round and node:
//   places  i32 [tokens]            where in the chunk each token of the round is, -1: nowhere
//   out, in                         i32 count in a header, then records: as they leave, and as they came
//   sums_out, sums_in               combine: header, f32 scalars [tokens, K], rows [tokens, row_bytes] by record
// A record is a row and its side (dispatch alone) and a line that says where the token goes on the node:
//   i32 expert[K], i32 row[K], f32 weight[K] (dispatch), i32 slot[ranks_per_node], i32 token; -1: not on the node
struct NodeCell {
  int64_t row_bytes, side_bytes; // as they cross; row_bytes of combine: of a sum
  int32_t num_topk, ranks_per_node, is_combine;
  int32_t num_cells; // of a block and parity: one for each other node; combine with "fp8_wire" has one for its own sums, too

  static constexpr int64_t kHeader = 128;
  JAX_EP_HD int64_t line_rows() const { return int64_t(num_topk) * 4; }
  JAX_EP_HD int64_t line_weights() const { return int64_t(num_topk) * 8; }
  JAX_EP_HD int64_t line_slots() const { return int64_t(num_topk) * 12; }
  JAX_EP_HD int64_t line_token() const { return line_slots() + int64_t(ranks_per_node) * 4; }
  JAX_EP_HD int64_t side() const { return is_combine ? 0 : round_up(row_bytes, 16); }          // in a record
  JAX_EP_HD int64_t line() const { return is_combine ? 0 : side() + round_up(side_bytes, 16); } // in a record
  JAX_EP_HD int64_t record_bytes() const { return line() + round_up(line_token() + 4, 16); }
  JAX_EP_HD int64_t records_bytes(int64_t tokens) const { return kHeader + round_up(tokens * record_bytes(), 128); }
  JAX_EP_HD int64_t sum_rows(int64_t tokens) const { return kHeader + round_up(tokens * num_topk * 4, 128); } // in sums
  JAX_EP_HD int64_t sums_bytes(int64_t tokens) const {
    return is_combine ? sum_rows(tokens) + round_up(tokens * row_bytes, 128) : 0;
  }
  JAX_EP_HD int64_t out(int64_t tokens) const { return round_up(tokens * 4, 128); }
  JAX_EP_HD int64_t in(int64_t tokens) const { return out(tokens) + records_bytes(tokens); }
  JAX_EP_HD int64_t sums_out(int64_t tokens) const { return in(tokens) + records_bytes(tokens); }
  JAX_EP_HD int64_t sums_in(int64_t tokens) const { return sums_out(tokens) + sums_bytes(tokens); }
  JAX_EP_HD int64_t bytes(int64_t tokens) const { return sums_in(tokens) + sums_bytes(tokens); }

  // Of the cells that `num_blocks` blocks share, and the tokens that fit.
  JAX_EP_HD int64_t cell_bytes(const ArenaShape &arena, int num_blocks) const {
    return arena.staging_bytes / (int64_t(num_blocks) * 2 * num_cells) / 128 * 128;
  }
  JAX_EP_HD int64_t tokens(int64_t cell_bytes) const {
    const int64_t each = 2 * record_bytes() + (is_combine ? 2 * (int64_t(num_topk) * 4 + row_bytes) : 0) + 4;
    const int64_t fit = (cell_bytes - 10 * 128) / each; // headers and what is rounded up
    return fit < kMaxNodeTokens ? fit : kMaxNodeTokens;
  }
};

JAX_EP_HD ArenaShape node_arena_shape(int num_ranks, int num_nodes, int num_experts, int64_t row_bytes, int num_topk,
                                      int64_t node_bytes) {
  ArenaShape s = arena_shape(num_ranks, num_experts, 16, 1, 1);
  s.num_nodes = num_nodes, s.staging_bytes = node_bytes > 0 ? node_bytes : 1;
  // A token for each block, in either direction; wherever a side cuts the row.
  const NodeCell dispatch{row_bytes + 16, 0, num_topk, s.ranks_per_node(), 0, num_nodes};
  const NodeCell combine{row_bytes, 0, num_topk, s.ranks_per_node(), 1, num_nodes};
  while (dispatch.tokens(dispatch.cell_bytes(s, kMaxNodeBlocks)) < 1 || combine.tokens(combine.cell_bytes(s, kMaxNodeBlocks)) < 1)
    s.staging_bytes *= 2;
  return s;
}

// ---------------------------------------------------------------------------------------------------------
// A row of partial sums in FP8 ("fp8_wire"): groups of 512 channels, each e4m3[512] then f32 scale[4] of 128 channels.
// Scratch of one call, never seen by users; the last group is whole even if hidden ends inside it.
struct WireRow {
  static constexpr int kBlock = 128, kGroup = 512, kGroupBytes = kGroup + kGroup / kBlock * 4;
  JAX_EP_HD static int64_t bytes(int64_t hidden) { return (hidden + kGroup - 1) / kGroup * kGroupBytes; }
};

// Does combine keep a sum per slot, and how many bytes does it have as it crosses? Without sums peers read y itself.
JAX_EP_HD bool has_partials(Layout layout, Quantize quantize) {
  return layout != Layout::kToken || quantize == Quantize::kFp8Wire;
}
JAX_EP_HD int64_t partial_row_bytes(int64_t y_bytes, DType dtype, Quantize quantize) {
  return quantize == Quantize::kFp8Wire ? WireRow::bytes(y_bytes / dtype_bytes(dtype)) : y_bytes;
}

// ---------------------------------------------------------------------------------------------------------
// What a rank knows of each peer: device table [num_ranks], filled at set-up, constant afterwards.
struct Peer {
  char *arena;           // the peer's arena as this device sees it
  char *pool;            // base of the peer's XLA pool as this device sees it; null: not mapped
  uint64_t same_process; // 1: announced buffers are addresses, not pool offsets
  uint64_t is_other_gpu; // 1: rows for it cross a link
};

// An arena in a symmetric heap (nvshmem_bytes of jax_ep/nvshmem.py): followed by the table of peers and their PEs.
constexpr int64_t kHeapUnit = 1024;
JAX_EP_HD int64_t heap_arena_bytes(const ArenaShape &s) {
  return round_up(round_up(s.bytes(), 128) + int64_t(s.num_ranks) * int64_t(sizeof(Peer) + sizeof(int32_t)), kHeapUnit);
}

// Failure record of one rank in one arena: pinned host memory, written once by the device (code last, after a
// system fence), read by handlers, watcher and check(). code 0: healthy.
enum class Failure : uint32_t { kNone = 0, kPeerTimeout = 1, kPeerLost = 2, kMismatch = 3, kPeerFailed = 4 };
enum class Phase : uint32_t { kAnnounce = 0, kClaim = 1, kRound = 2, kFinish = 3, kGrid = 4 };

struct FailureRecord {
  uint32_t code;     // Failure
  uint32_t op;       // Op
  uint32_t phase;    // Phase
  int32_t rank;      // the rank that reports
  int32_t peer;      // the rank that did not come (or differs), as this rank reports it
  int32_t culprit;   // ... and as it tells others: not the same when this rank itself is the one that came late
  uint64_t epoch;    // number of the call in this arena, from 1
  uint64_t expected; // flag value or tag expected
  uint64_t seen;     // ... and seen
  uint64_t rows_put; // no failure: Control.rows_put as of the latest call
};

} // namespace jax_ep
