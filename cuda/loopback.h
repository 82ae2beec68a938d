// R ranks on R streams of one device, without XLA: the kernels as they are, in one process. Used by the warm-up
// (one rank), by tests/gpu/test_loopback.py and under compute-sanitizer.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cuda/kernels/carrier.h"
#include "cuda/kernels/combine_peer.h"
#include "cuda/kernels/dispatch_peer.h"
#include "cuda/kernels/latency.h"
#include "cuda/kernels/nodes.h"

namespace jax_ep {

struct LoopbackShape {
  int num_ranks, num_tokens, num_topk, num_experts, row_bytes, capacity, alignment; // row_bytes: of x and y
  int side_bytes = 0;                      // of a row that travels beside x; ignored when dispatch quantises
  int window = -1;
  bool crosses_once = false;               // as if each rank had a GPU of its own (Peer::is_other_gpu)
  Quantize quantize = Quantize::kNone;     // of dispatch
  Quantize wire = Quantize::kNone;         // of combine
  Layout layout;
  DType dtype;
  bool zero_tail, has_weights, has_bias, use_bulk, force_staged;
  int num_sms;
  int64_t staging_bytes, timeout_ns;
  int num_slots = 0; // > 0: latency mode
  int num_nodes = 1; // more: over the test transport; staging_bytes are then those of the cells (latency mode has none)
  int num_carriers = 1;
  int chunk_tokens = 0;
  int64_t max_delay_ns = 0; // of puts, which are then done in any order
};

// What a block noted in its last kernel (device/stamps.cuh).
struct StampsOfBlock {
  struct One {
    const char *phase;
    int number;      // of the round, or KiB
    uint64_t ns;     // of a clock that all blocks share
    uint32_t clock;  // of the block's own one, low word
  };
  int block;
  bool is_carrier;   // of the rank's carrier, not of its call
  int64_t dropped;   // that found no room
  std::vector<One> stamps;
};

class Loopback {
 public:
  Loopback(int device, const LoopbackShape &shape); // throws std::runtime_error
  ~Loopback();
  Loopback(const Loopback &) = delete;

  // Buffers by name (see buffer_sizes in the source), one per rank.
  int64_t bytes(const std::string &name) const { return sizes_.at(name); }
  void write(const std::string &name, int rank, const void *data, int64_t bytes);
  void read(const std::string &name, int rank, void *data) const;
  void fill(const std::string &name, int byte);

  // op: "dispatch", "redispatch", "combine"; in latency mode also one of them with "_start" or "_done", which share the buffer
  // "ticket", or with "_start2" or "_done2": "ticket2". Every rank but those in `absent` launches, after its delay.
  void launch(const std::string &op, const std::vector<int64_t> &delay_ns, const std::vector<int> &absent);
  void synchronize();
  // Microseconds per call of the slowest rank over `calls` back-to-back calls.
  double time(const std::string &op, int calls);
  FailureRecord failure(int rank) const { return failures_[rank]; }
  int64_t rows_put(int rank) const { return int64_t(failures_[rank].rows_put); } // to other nodes, since the last reset
  // Per rank, of its first 160 blocks and those of its carrier; none of ranks past the 16th. Nothing may be running. Of two
  // objects on a device the one that was called last is told. Throws where has_stamps() is false: built without them.
  static bool has_stamps();
  std::vector<std::vector<StampsOfBlock>> stamps() const;
  void reset(); // clears flags and records; nothing may be running

 private:
  template <class T> T *at(const std::string &name, int rank) const;
  CallParams call(int rank, Op op, int64_t row_bytes, int64_t side_bytes, std::initializer_list<const char *> shared) const;
  DispatchParams dispatch_params(int rank, bool is_route) const;
  CombineParams combine_params(int rank) const;
  void launch_rank(const std::string &op, int rank);
  void launch_latency(const std::string &op, int rank);

  int device_;
  LoopbackShape shape_;
  ArenaShape arena_shape_;
  std::map<std::string, int64_t> sizes_;
  std::map<std::string, std::vector<char *>> buffers_;
  std::vector<void *> owned_;
  std::vector<char *> arenas_;
  Peer *peers_ = nullptr;
  FailureRecord *failures_ = nullptr;
  std::vector<cudaStream_t> streams_;
  std::vector<Carrier> carriers_;
};

} // namespace jax_ep
