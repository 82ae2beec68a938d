// The other processes: where their services are, and what of them is mapped here.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "cuda/runtime/memory.h"
#include "cuda/runtime/service.h"

namespace jax_ep {

// From the record that a process published: how to reach its service.
struct PeerProcess {
  std::string address;
  Nonce nonce{};
};

class Peers {
 public:
  void add(int process, PeerProcess record); // idempotent; throws when the process had another service before

  struct Mapped {
    char *arena = nullptr;
    char *pool = nullptr; // null: the peer's pool is not registered, it stages
  };
  // Imports the arena of `key` and the pool of one device of another process, accessible by `for_devices`.
  // `clients` keeps connections for the length of one bind.
  using Clients = std::map<int, Client>;
  Mapped map(Clients *clients, int process, int device, const std::string &key, const ArenaShape &shape,
             const std::vector<int> &for_devices, Deadline deadline);
  // The pool alone.
  char *map_pool(Clients *clients, int process, int device, const std::vector<int> &for_devices, Deadline deadline);

  int num_arenas() const { return num_arenas_; }
  int num_pools() const { return num_pools_; }

 private:
  Answer ask(Clients *clients, int process, Request request, Deadline deadline);

  std::mutex mutex_; // guards the maps; imports run under the bind lock of the registry, one at a time
  std::map<int, PeerProcess> processes_;
  std::map<std::tuple<std::string, int, int>, Mapping> arenas_; // key, process, device
  std::map<std::pair<int, int>, Mapping> pools_;                // process, device
  std::atomic<int> num_arenas_{0}, num_pools_{0};
};

} // namespace jax_ep
