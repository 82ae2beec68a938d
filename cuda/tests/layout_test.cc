// Arena sizes of cuda/layout.h for tests/test_memory.py: reads calls "num_ranks num_experts row_bytes num_topk
// staging_bytes num_tokens num_slots num_nodes" from standard input, one a line (num_slots 0: throughput mode), and prints
// "count_words staging_bytes num_slots num_nodes bytes" for each.
#include <cinttypes>
#include <cstdio>

#include "cuda/layout.h"

int main() {
  int num_ranks, num_experts, num_topk, num_slots, num_nodes;
  int64_t row_bytes, staging_bytes, num_tokens;
  while (std::scanf("%d %d %" SCNd64 " %d %" SCNd64 " %" SCNd64 " %d %d", &num_ranks, &num_experts, &row_bytes, &num_topk,
                    &staging_bytes, &num_tokens, &num_slots, &num_nodes) == 8) {
    const jax_ep::ArenaShape s =
        num_slots ? jax_ep::latency_arena_shape(num_ranks, num_nodes, num_experts, row_bytes, num_topk, num_tokens, num_slots)
        : num_nodes > 1
            ? jax_ep::node_arena_shape(num_ranks, num_nodes, num_experts, row_bytes, num_topk, staging_bytes)
            : jax_ep::arena_shape(num_ranks, num_experts, row_bytes, num_topk, staging_bytes);
    std::printf("%d %" PRId64 " %d %d %" PRId64 "\n", s.count_words, s.staging_bytes, s.num_slots, s.num_nodes, s.bytes());
  }
}
