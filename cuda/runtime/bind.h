// What an instantiate handler asks for: that the arena of its call site exists before the program first runs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace jax_ep {

// From the attributes of a call site.
struct BindRequest {
  std::string key;
  std::vector<int64_t> groups; // [num_groups * num_ranks * 2] of (process_index, position in it)
  int64_t num_ranks = 0, num_experts = 0, num_topk = 0, row_bytes = 0;
  int64_t staging_bytes = 0;            // throughput mode
  int64_t num_tokens = 0, num_slots = 0; // latency mode; no slots: throughput mode
  int64_t num_nodes = 1;                // more: staging_bytes are those of the cells
  int64_t num_sms = 0; // 0: the group's default
  int64_t node_sms = 0; // ... and those of the carrier beside them
  int64_t setup_timeout_ns = 0;
};

// "" when the arena is bound, or when this process has no CUDA device (the program is compiled ahead of time for
// another machine); else an error text that begins with the name of its Python type. Takes Python's lock, except
// when the arena exists already.
std::string bind_from_instantiate(const BindRequest &request) noexcept;

} // namespace jax_ep
