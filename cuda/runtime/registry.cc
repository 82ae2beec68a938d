#include "cuda/runtime/registry.h"

#include <algorithm>
#include <cstddef>
#include <set>

#include "cuda/kernels/bulk.h"
#include "cuda/runtime/local_device.h"
#include "cuda/runtime/setup_time.h"

namespace jax_ep {

constexpr int kMaxArenaSlots = 1 << 10; // far beyond Config.max_pending: only refuses a wrong number
constexpr int kDefaultNumSms = 24; // of calls that were lowered for another machine; else lowering chooses (tuning.py)

struct RankContext::Counters {
  std::atomic<int64_t> calls{0};
  std::atomic<int64_t> received{0};   // calls that waited for rows: all but starts
  std::atomic<int64_t> staged{0};
  std::atomic<int64_t> vector{0};
  std::atomic<int64_t> recorded{0};   // into command buffers; none of the others but `received`
  std::atomic<int64_t> entered_ns{0}; // steady clock, when the last routing dispatch was launched
};

int64_t RankContext::count_call(const CountedCall &call) const {
  if (call.is_recorded) {
    counters->recorded.fetch_add(call.sends, std::memory_order_relaxed);
  } else if (call.sends) {
    if (call.is_routing) {
      const auto now = std::chrono::steady_clock::now().time_since_epoch();
      counters->entered_ns.store(std::chrono::nanoseconds(now).count(), std::memory_order_relaxed);
    }
    if (call.is_staged) counters->staged.fetch_add(1, std::memory_order_relaxed);
    if (call.is_vector) counters->vector.fetch_add(1, std::memory_order_relaxed);
    counters->calls.fetch_add(1, std::memory_order_relaxed);
  }
  return counters->received.fetch_add(call.receives, std::memory_order_relaxed);
}

Registry &Registry::get() {
  static Registry &registry = *new Registry;
  return registry;
}

const RankContext *Registry::find(std::string_view key, int device) {
  std::shared_lock<std::shared_mutex> lock(bound_mutex_);
  const auto bound = bound_.find(key);
  if (bound == bound_.end()) return nullptr;
  const auto context = bound->second.contexts.find(device);
  return context == bound->second.contexts.end() ? nullptr : context->second.get();
}

int Registry::num_local(std::string_view key) {
  std::shared_lock<std::shared_mutex> lock(bound_mutex_);
  const auto bound = bound_.find(key);
  return bound == bound_.end() ? 0 : int(bound->second.contexts.size());
}

namespace {

std::vector<int> local_devices(const std::vector<Member> &group, int process) {
  std::set<int> devices;
  for (const Member &m : group) {
    if (m.process == process) devices.insert(m.device);
  }
  return {devices.begin(), devices.end()};
}

} // namespace

bool Registry::serves(std::string_view key, int num_sms) {
  std::shared_lock<std::shared_mutex> lock(bound_mutex_);
  const auto bound = bound_.find(key);
  return bound != bound_.end() && num_sms <= bound->second.max_num_sms;
}

void Registry::set_heap(SymmetricHeap heap) {
  std::lock_guard<std::mutex> lock(arenas_mutex_);
  if (heap_.base) fail("this process has a symmetric heap already");
  heap_ = std::move(heap);
}

Registry::Arena &Registry::arena(const std::string &key, int device, const ArenaShape &shape, int64_t heap_offset) {
  std::lock_guard<std::mutex> lock(arenas_mutex_);
  const auto id = std::make_pair(key, device);
  const auto found = arenas_.find(id);
  if (found != arenas_.end()) {
    const ArenaShape &have = found->second.shape;
    if (have.num_ranks != shape.num_ranks || have.count_words != shape.count_words ||
        have.staging_bytes != shape.staging_bytes || have.num_slots != shape.num_slots || have.num_nodes != shape.num_nodes) {
      fail("one key for two arena shapes");
    }
    return found->second;
  }
  SetupTimer timer(SetupPhase::kMemory);
  LocalDevice &local = LocalDevice::get(device);
  Arena made;
  made.shape = shape;
  made.device = device;
  if (heap_offset >= 0) { // nothing is zeroed: peers may have put there already
    if (heap_offset + heap_arena_bytes(shape) > heap_.bytes) fail("an arena past the end of the symmetric heap");
    made.in_heap = heap_.base + heap_offset;
    return arenas_.emplace(id, std::move(made)).first->second;
  }
  made.memory = Mapping::create(device, round_up(shape.bytes(), 128) + made.table_bytes());
  // Flags, mailboxes and workspace; staging is read only where a flag says that it was written.
  local.zero(made.memory.base(), shape.staging());
  return arenas_.emplace(id, std::move(made)).first->second;
}

Pool Registry::register_pool(int device, uint64_t small_ptr, uint64_t large_ptr) {
  std::lock_guard<std::mutex> lock(pools_mutex_);
  RegisteredPool &entry = pools_[device];
  if (entry.pool.base == nullptr && small_ptr != 0 && large_ptr != 0) {
    SetupTimer timer(SetupPhase::kMemory);
    entry.range = find_pool(device, small_ptr, large_ptr);
    entry.pool = {entry.range.base, entry.range.bytes, entry.range.base != nullptr};
  }
  return entry.pool;
}

const Pool *Registry::pool(int device) {
  std::lock_guard<std::mutex> lock(pools_mutex_);
  return &pools_[device].pool; // a map's nodes stay where they are
}

Answer Registry::answer(const Request &request) {
  const int device = request.device;
  Answer answer;
  switch (Ask(request.ask)) {
    case Ask::kPool: {
      std::lock_guard<std::mutex> lock(pools_mutex_);
      const auto found = pools_.find(device);
      if (found == pools_.end() || !found->second.pool.is_exportable) return answer; // kNone
      answer.fd = export_pool(found->second.range);
      answer.bytes = found->second.range.bytes;
      break;
    }
    case Ask::kArena: {
      const ArenaShape shape{request.num_ranks, request.count_words, request.staging_bytes, request.num_slots, request.num_nodes};
      if (shape.num_ranks < 1 || shape.num_ranks > kMaxRanks || shape.count_words < 1 ||
          shape.count_words > kMaxCountWords || shape.staging_bytes < 0 ||
          shape.staging_bytes > (int64_t(1) << 36) || shape.num_slots < 0 || shape.num_slots > kMaxArenaSlots || shape.num_nodes < 1 ||
          shape.num_nodes > kMaxNodes || shape.num_ranks % shape.num_nodes) {
        fail("an arena of impossible shape was asked for");
      }
      const Arena &own = arena(request.key, device, shape);
      if (own.in_heap) fail("an arena in the symmetric heap was asked for");
      answer.fd = own.memory.export_fd();
      answer.bytes = own.memory.bytes();
      break;
    }
    default: fail("unknown request");
  }
  answer.status = Status::kOk;
  return answer;
}

std::unique_ptr<RankContext> Registry::make_context(const BindSpec &spec, size_t group_index, int rank,
                                                    const std::vector<int> &local, Peers::Clients *clients) {
  const std::vector<Member> &group = spec.groups[group_index];
  const std::vector<int> &gpus = spec.gpus[group_index];
  auto context = std::make_unique<RankContext>();
  context->device = group[size_t(rank)].device;
  context->rank = rank;
  context->has_bulk = has_bulk_copies(context->device);
  context->shape = spec.shape;
  context->pool = pool(context->device);
  context->counters = std::make_shared<RankContext::Counters>();

  const bool is_in_heap = spec.heap_offset >= 0;
  const int per_node = spec.shape.ranks_per_node();
  std::vector<Peer> table;
  std::vector<int32_t> pes;
  for (const Member &m : group) {
    Peer peer{};
    const int number = int(table.size());
    pes.push_back(m.process);
    if (m.process == spec.process) {
      peer.arena = arena(spec.key, m.device, spec.shape, spec.heap_offset).base();
      peer.same_process = 1;
    } else if (is_in_heap && number / per_node != rank / per_node) {
      // Puts alone go there, even where it could be reached: no address.
    } else if (is_in_heap) {
      char *heap = size_t(m.process) < heap_.at.size() ? heap_.at[size_t(m.process)] : nullptr;
      if (!heap) {
        fail("rank " + std::to_string(number) + " is to be on the node of rank " + std::to_string(rank) +
             ", but NVSHMEM does not reach its memory from there; is NVSHMEM_DISABLE_P2P set?");
      }
      peer.arena = heap + spec.heap_offset;
      peer.pool = peers_.map_pool(clients, m.process, m.device, local, spec.deadline);
    } else {
      const Peers::Mapped mapped =
          peers_.map(clients, m.process, m.device, spec.key, spec.shape, local, spec.deadline);
      peer.arena = mapped.arena;
      peer.pool = mapped.pool;
    }
    peer.is_other_gpu = gpus[table.size()] != gpus[size_t(rank)];
    table.push_back(peer);
    context->same_process.push_back(uint8_t(peer.same_process));
  }
  const Arena &own = arena(spec.key, context->device, spec.shape, spec.heap_offset);
  LocalDevice &device = LocalDevice::get(context->device);
  device.store(own.table(), table.data(), int64_t(table.size() * sizeof(Peer)));
  context->arena = own.base();
  context->peers = reinterpret_cast<const Peer *>(own.table());
  context->failure = records_.take(context->device);
  if (spec.shape.has_nodes()) {
    DeviceGuard guard(context->device);
    check(make_carrier(&context->carrier), "the stream of a carrier");
    context->launch_carrier = is_in_heap ? heap_.launch : launch_test_carrier;
  }
  if (is_in_heap) {
    device.store(own.pes(), pes.data(), int64_t(pes.size() * sizeof(int32_t)));
    context->pes = reinterpret_cast<const int32_t *>(own.pes());
  }

  // One word to each peer: a mapping that does not carry a store fails here, at compile time.
  const uint64_t one = 1;
  for (size_t p = 0; p < table.size(); ++p) {
    if (int(p) != rank && table[p].arena) device.store(table[p].arena + offsetof(Control, warm), &one, sizeof(one));
  }
  return context;
}

void Registry::bind(const BindSpec &spec) {
  if (serves(spec.key, 0)) return;
  if (spec.max_num_sms < 1) fail("max_num_sms must be at least 1");
  std::unique_lock<std::timed_mutex> one_at_a_time(bind_mutex_, spec.deadline);
  if (!one_at_a_time) fail_timeout("another program's set-up did not end in time");
  if (serves(spec.key, 0)) return;

  Bound bound;
  bound.max_num_sms = std::min(spec.max_num_sms, kMaxBlocks);

  // Own side first: peers may ask for these arenas from now on.
  if (spec.heap_offset >= 0 && !heap_.base) fail("there is no symmetric heap");
  if (spec.gpus.size() != spec.groups.size()) fail("the GPU numbers do not fit the groups");
  for (const auto &one : spec.gpus)
    if (int(one.size()) != spec.shape.num_ranks) fail("the GPU numbers do not fit the groups");
  for (const auto &group : spec.groups) {
    if (int(group.size()) != spec.shape.num_ranks) fail("a group's size is not num_ranks");
    const std::vector<int> local = local_devices(group, spec.process);
    for (int device : local) {
      LocalDevice::get(device).warm();
      records_.reserve(device);
      Arena &own = arena(spec.key, device, spec.shape, spec.heap_offset);
      SetupTimer timer(SetupPhase::kPeers);
      for (int peer : local) {
        if (!can_access_peer(peer, device)) {
          fail("device " + std::to_string(peer) + " has no peer access to device " + std::to_string(device));
        }
      }
      if (!own.in_heap) own.memory.grant(local);
    }
    SetupTimer timer(SetupPhase::kPeers);
    enable_peer_access(local);
  }

  SetupTimer timer(SetupPhase::kPeers);
  Peers::Clients clients;
  for (size_t g = 0; g < spec.groups.size(); ++g) {
    const std::vector<Member> &group = spec.groups[g];
    const std::vector<int> local = local_devices(group, spec.process);
    bound.num_groups += local.empty() ? 0 : 1;
    for (size_t rank = 0; rank < group.size(); ++rank) {
      if (group[rank].process != spec.process) continue;
      auto context = make_context(spec, g, int(rank), local, &clients);
      context->max_num_sms = bound.max_num_sms;
      context->num_sms = std::min(kDefaultNumSms, bound.max_num_sms);
      const int device = context->device;
      if (!bound.contexts.emplace(device, std::move(context)).second) {
        fail("device " + std::to_string(device) + " of one process is in the mesh twice");
      }
    }
  }
  std::unique_lock<std::shared_mutex> lock(bound_mutex_);
  bound_.emplace(spec.key, std::move(bound));
}

void Registry::synchronize() {
  std::set<int> devices;
  {
    std::lock_guard<std::mutex> lock(arenas_mutex_);
    for (const auto &[id, arena] : arenas_) devices.insert(arena.device);
  }
  for (int device : devices) {
    DeviceGuard guard(device);
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
}

// Peers may have put into places that are bound here only later, when epochs have begun at 1 again: an old word would pass for
// a new one there.
void Registry::zero_free_heap() {
  if (!heap_.base) return;
  std::map<char *, int64_t> used; // bytes of an arena, by where it begins
  for (const auto &[id, arena] : arenas_) {
    if (arena.in_heap) used[arena.in_heap] = heap_arena_bytes(arena.shape);
  }
  used[heap_.base + heap_.bytes] = 0;
  char *at = heap_.base;
  for (const auto &[begin, bytes] : used) {
    LocalDevice::get(heap_.device).zero(at, begin - at);
    at = begin + bytes;
  }
}

void Registry::reset() {
  {
    std::lock_guard<std::mutex> lock(arenas_mutex_);
    for (const auto &[id, arena] : arenas_) {
      LocalDevice::get(arena.device).zero(arena.base(), arena.shape.staging());
    }
    zero_free_heap();
  }
  std::unique_lock<std::shared_mutex> lock(bound_mutex_);
  for (auto &[key, bound] : bound_) {
    for (auto &[device, context] : bound.contexts) *context->failure = FailureRecord{};
  }
}

Stats Registry::stats() {
  Stats s;
  {
    std::shared_lock<std::shared_mutex> lock(bound_mutex_);
    for (const auto &[key, bound] : bound_) {
      s.groups += bound.num_groups;
      for (const auto &[device, context] : bound.contexts) {
        s.calls += context->counters->calls.load(std::memory_order_relaxed);
        s.staged_calls += context->counters->staged.load(std::memory_order_relaxed);
        s.recorded_calls += context->counters->recorded.load(std::memory_order_relaxed);
        s.vector_calls += context->counters->vector.load(std::memory_order_relaxed);
        s.rows_put += int64_t(static_cast<volatile FailureRecord *>(context->failure)->rows_put);
        s.dispatch_entered_ns = std::max(s.dispatch_entered_ns, context->counters->entered_ns.load());
      }
    }
  }
  {
    std::lock_guard<std::mutex> lock(arenas_mutex_);
    s.arenas = int64_t(arenas_.size());
    for (const auto &[id, arena] : arenas_) s.symmetric_bytes += arena.memory.bytes();
    s.symmetric_bytes += heap_.bytes;
  }
  {
    std::lock_guard<std::mutex> lock(pools_mutex_);
    for (const auto &[device, entry] : pools_) s.pools_registered += entry.pool.base != nullptr;
  }
  s.peers_mapped = peers_.num_arenas();
  s.pools_mapped = peers_.num_pools();
  return s;
}

std::vector<FailureReport> Registry::failures() {
  std::vector<FailureReport> found;
  std::shared_lock<std::shared_mutex> lock(bound_mutex_);
  for (const auto &[key, bound] : bound_) {
    for (const auto &[device, context] : bound.contexts) {
      const FailureRecord record = read_record(context->failure);
      if (record.code != uint32_t(Failure::kNone)) found.push_back({key, device, record});
    }
  }
  return found;
}

} // namespace jax_ep
