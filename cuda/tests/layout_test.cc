// Arena sizes of cuda/layout.h for tests/test_memory.py: reads calls "num_ranks num_experts row_bytes num_topk
// staging_bytes" from standard input, one a line, and prints "count_words staging_bytes bytes" for each.
#include <cinttypes>
#include <cstdio>

#include "cuda/layout.h"

int main() {
  int num_ranks, num_experts, num_topk;
  int64_t row_bytes, staging_bytes;
  while (std::scanf("%d %d %" SCNd64 " %d %" SCNd64, &num_ranks, &num_experts, &row_bytes, &num_topk,
                    &staging_bytes) == 5) {
    const jax_ep::ArenaShape s = jax_ep::arena_shape(num_ranks, num_experts, row_bytes, num_topk, staging_bytes);
    std::printf("%d %" PRId64 " %" PRId64 "\n", s.count_words, s.staging_bytes, s.bytes());
  }
}
