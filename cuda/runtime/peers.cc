#include "cuda/runtime/peers.h"

#include <cstring>

namespace jax_ep {

void Peers::add(int process, PeerProcess record) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto [at, is_new] = processes_.emplace(process, record);
  if (!is_new && at->second.address != record.address) {
    fail("process " + std::to_string(process) + " was restarted; restart this process too");
  }
}

Answer Peers::ask(Clients *clients, int process, Request request, Deadline deadline) {
  const auto record = processes_.find(process);
  if (record == processes_.end()) fail("no record of process " + std::to_string(process));
  auto client = clients->find(process);
  if (client == clients->end()) {
    client = clients->emplace(process, Client(record->second.address, record->second.nonce, deadline)).first;
  }
  return client->second.call(request, deadline);
}

Peers::Mapped Peers::map(Clients *clients, int process, int device, const std::string &key, const ArenaShape &shape,
                         const std::vector<int> &for_devices, Deadline deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  Mapped mapped;
  const auto arena_id = std::make_tuple(key, process, device);
  auto arena = arenas_.find(arena_id);
  if (arena == arenas_.end()) {
    Request request;
    request.ask = uint32_t(Ask::kArena);
    request.device = device;
    request.num_ranks = shape.num_ranks;
    request.count_words = shape.count_words;
    request.staging_bytes = shape.staging_bytes;
    request.num_slots = shape.num_slots;
    request.num_nodes = shape.num_nodes;
    if (key.size() >= sizeof(request.key)) fail("key too long");
    std::memcpy(request.key, key.data(), key.size());
    const Answer answer = ask(clients, process, request, deadline);
    if (answer.status != Status::kOk || answer.bytes < shape.bytes()) fail("the peer's arena is too small");
    arena = arenas_.emplace(arena_id, Mapping::import(answer.fd, answer.bytes)).first;
    ++num_arenas_;
  }
  arena->second.grant(for_devices);
  mapped.arena = arena->second.base();
  lock.unlock();
  mapped.pool = map_pool(clients, process, device, for_devices, deadline);
  return mapped;
}

char *Peers::map_pool(Clients *clients, int process, int device, const std::vector<int> &for_devices, Deadline deadline) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto pool_id = std::make_pair(process, device);
  auto pool = pools_.find(pool_id);
  if (pool == pools_.end()) {
    Request request;
    request.ask = uint32_t(Ask::kPool);
    request.device = device;
    const Answer answer = ask(clients, process, request, deadline);
    if (answer.status == Status::kNone) return nullptr;
    pool = pools_.emplace(pool_id, Mapping::import(answer.fd, answer.bytes)).first;
    ++num_pools_;
  }
  pool->second.grant(for_devices);
  return pool->second.base();
}

} // namespace jax_ep
