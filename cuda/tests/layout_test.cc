// Arena sizes of cuda/layout.h for tests/test_memory.py: reads calls "num_ranks num_experts row_bytes num_topk
// staging_bytes num_tokens num_slots" from standard input, one a line (num_slots 0: throughput mode), and prints
// "count_words staging_bytes num_slots bytes" for each.
#include <cinttypes>
#include <cstdio>

#include "cuda/layout.h"

int main() {
  int num_ranks, num_experts, num_topk, num_slots;
  int64_t row_bytes, staging_bytes, num_tokens;
  while (std::scanf("%d %d %" SCNd64 " %d %" SCNd64 " %" SCNd64 " %d", &num_ranks, &num_experts, &row_bytes, &num_topk,
                    &staging_bytes, &num_tokens, &num_slots) == 7) {
    const jax_ep::ArenaShape s =
        num_slots ? jax_ep::latency_arena_shape(num_ranks, num_experts, row_bytes, num_topk, num_tokens, num_slots)
                  : jax_ep::arena_shape(num_ranks, num_experts, row_bytes, num_topk, staging_bytes);
    std::printf("%d %" PRId64 " %d %" PRId64 "\n", s.count_words, s.staging_bytes, s.num_slots, s.bytes());
  }
}
