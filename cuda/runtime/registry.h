// Registry: which arenas exist, who the peers are, and what a handler needs to launch. No kernels, no Python.
//
// Life cycle of an arena: `bind` (while a call is lowered, at XLA's instantiate, or at the latest before the first execution)
// creates it, or a peer's request does;
// executions only look it up. Arenas live until process exit; `reset` clears their flags in place after all
// ranks are quiet.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda/kernels/carrier.h"
#include "cuda/layout.h"
#include "cuda/runtime/memory.h"
#include "cuda/runtime/peers.h"
#include "cuda/runtime/service.h"

namespace jax_ep {

// XLA's preallocated memory pool of one local device, as registered at set-up.
struct Pool {
  char *base = nullptr;
  int64_t bytes = 0;
  bool is_exportable = false; // one POSIX-fd exportable region
  bool contains(const void *p, int64_t n) const {
    const char *c = static_cast<const char *>(p);
    return n == 0 || (c >= base && c + n <= base + bytes);
  }
};

// What of a call is counted: an exchange once, by the call that sends.
struct CountedCall {
  bool sends, receives; // both, or one half of an exchange that was split
  bool is_staged, is_vector, is_routing;
  bool is_recorded; // into a command buffer: nothing runs yet, and nobody counts how often it will
};

// One local device's place in one group: all that a launch needs. Immutable after bind, except the counters.
// Lives until the process ends.
struct RankContext {
  int device = 0;                   // CUDA ordinal in this process
  int rank = 0;
  int num_sms = 0;                  // blocks per call: default for this group (Config may lower it)
  int max_num_sms = 0;              // ... and the most that keeps all ranks' blocks resident together
  bool has_bulk = false;            // sm_90 bulk copies available on this device
  ArenaShape shape{};
  char *arena = nullptr;            // own arena, device address
  const Peer *peers = nullptr;      // device memory, [num_ranks]
  std::vector<uint8_t> same_process; // host copy, [num_ranks]
  const Pool *pool = nullptr;       // own XLA pool; pool->base null when not registered
  FailureRecord *failure = nullptr; // pinned host memory, also readable/writable by the device at this address
  Carrier carrier{};                // several nodes
  LaunchCarrier launch_carrier = nullptr;
  const int32_t *pes = nullptr;     // device memory, [num_ranks]: their numbers in NVSHMEM; null: another transport
  struct Counters;                  // calls of several kinds (atomics, defined in registry.cc)
  int64_t count_call(const CountedCall &call) const; // returns how many calls before this one received
  std::shared_ptr<Counters> counters;
};

struct Member {
  int process = 0; // process_index
  int device = 0;  // local_hardware_id: the CUDA ordinal in that process
};
using Groups = std::vector<std::vector<Member>>; // [group][rank]

struct BindSpec {
  std::string key;
  Groups groups;
  std::vector<std::vector<int>> gpus; // [group][rank] equal numbers: the same physical GPU
  int process = 0; // this process's index
  ArenaShape shape{};
  int max_num_sms = 0; // the most blocks per rank that keep all ranks' blocks resident together
  int64_t heap_offset = -1; // where the arenas lie in the symmetric heap of every process; -1: in memory of their own
  Deadline deadline{};
};

// Symmetric memory of a transport between hosts, of one device: the same bytes from the same offset on in all processes.
// Zeroed on all of them.
struct SymmetricHeap {
  char *base = nullptr; // null: none
  int64_t bytes = 0;
  int device = 0;
  LaunchCarrier launch = nullptr;
  std::vector<char *> at; // by process: its base as this process sees it, null where it does not
};

struct Stats {
  int64_t groups = 0, arenas = 0, symmetric_bytes = 0, calls = 0, staged_calls = 0, vector_calls = 0;
  int64_t recorded_calls = 0; // into command buffers, beside `calls`
  int64_t peers_mapped = 0, pools_mapped = 0, pools_registered = 0;
  int64_t rows_put = 0; // rows and sums that left for other nodes
  int64_t dispatch_entered_ns = 0; // steady clock: the last launch of a dispatch that routes
};

struct FailureReport {
  std::string key;
  int device = 0;
  FailureRecord record{};
};

class Registry {
 public:
  static Registry &get(); // never destroyed

  // Execute path: the context of `device` under `key`, or null when bind did not run for it. Lock held < 1 us.
  const RankContext *find(std::string_view key, int device);

  // Set-up path; these throw SetupFailure.
  bool serves(std::string_view key, int num_sms);     // bound, and with room for as many blocks
  void bind(const BindSpec &spec);                    // idempotent
  int num_local(std::string_view key);                // local devices under `key`; 0: not bound
  Pool register_pool(int device, uint64_t small_ptr, uint64_t large_ptr); // idempotent
  Answer answer(const Request &request);              // the service's handler
  Peers &peers() { return peers_; }
  void set_heap(SymmetricHeap heap);                  // once

  void synchronize();                                 // waits until the devices of all groups are idle
  void reset();                                       // clears flags, what peers left in the heap, and every record
  Stats stats();
  std::vector<FailureReport> failures();

 private:
  struct Arena {
    Mapping memory;
    char *in_heap = nullptr; // instead of memory
    ArenaShape shape{};
    int device = 0;
    char *base() const { return in_heap ? in_heap : memory.base(); }
    // After the arena's own bytes, and therefore outside reset: the table of peers.
    char *table() const { return base() + round_up(shape.bytes(), 128); }
    int64_t table_bytes() const { return int64_t(shape.num_ranks) * sizeof(Peer); }
    char *pes() const { return table() + table_bytes(); } // in the heap alone
  };
  struct Bound {
    int max_num_sms = 0;
    std::map<int, std::unique_ptr<RankContext>> contexts; // by device
    int num_groups = 0;                                   // with a member here
  };
  struct RegisteredPool {
    Pool pool;
    PoolRange range;
  };

  Arena &arena(const std::string &key, int device, const ArenaShape &shape, int64_t heap_offset = -1);
  const Pool *pool(int device);
  void zero_free_heap(); // with arenas_mutex_ held
  std::unique_ptr<RankContext> make_context(const BindSpec &spec, size_t group_index, int rank,
                                            const std::vector<int> &local, Peers::Clients *clients);

  std::shared_mutex bound_mutex_;
  std::map<std::string, Bound, std::less<>> bound_;
  std::timed_mutex bind_mutex_; // one bind at a time; never held while a peer's request is answered
  std::mutex arenas_mutex_;
  std::map<std::pair<std::string, int>, Arena> arenas_; // key, device
  std::mutex pools_mutex_;
  std::map<int, RegisteredPool> pools_; // by device; entries never change once made
  SymmetricHeap heap_; // set before the first bind that names an offset in it
  RecordSlab records_;
  Peers peers_;
};

// "PeerTimeout: dispatch call 17: rank 2 waited for rank 5 ..." from a record; empty when healthy.
std::string describe(const FailureRecord &record);
const char *failure_name(uint32_t code); // "PeerTimeout"
const char *op_name(uint32_t op);        // "dispatch"
const char *phase_name(uint32_t phase);  // "announce"
FailureRecord read_record(const FailureRecord *record); // a copy, taken after `code` was seen

} // namespace jax_ep
