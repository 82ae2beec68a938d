#include "cuda/loopback.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <stdexcept>

#include "cuda/device/stamps.cuh"

namespace jax_ep {
namespace {

void check(cudaError_t e, const char *what) {
  if (e != cudaSuccess) throw std::runtime_error(std::string("loopback: ") + what + ": " + cudaGetErrorString(e));
}

__global__ void delay_kernel(int64_t ns) {
  uint64_t start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  while (now - start < uint64_t(ns));
}

#ifdef JAX_EP_STAMPS
// A device's stamps, for all objects of the process; never freed, since kernels that run have its address.
BlockStamps *stamps_on(int device) {
  static std::mutex mutex;
  static std::map<int, BlockStamps *> of_device;
  const std::lock_guard<std::mutex> lock(mutex);
  BlockStamps *&all = of_device[device];
  if (!all) {
    BlockStamps *made = nullptr;
    check(cudaMalloc(&made, sizeof(BlockStamps) * kStampRanks * kStampBlocks), "cudaMalloc of stamps");
    check(set_stamps(made), "set_stamps");
    all = made;
  }
  return all;
}
#endif

int64_t recv_row_bytes(const LoopbackShape &s) {
  return s.quantize == Quantize::kNone ? s.row_bytes : s.row_bytes / dtype_bytes(s.dtype);
}
int64_t side_bytes(const LoopbackShape &s) {
  if (s.quantize == Quantize::kNone) return s.side_bytes;
  return recv_row_bytes(s) / 128 * (s.quantize == Quantize::kFp8 ? 4 : 1);
}
int64_t num_rows(const LoopbackShape &s) {
  return s.layout == Layout::kBatched ? int64_t(s.num_experts / s.num_ranks) * s.capacity : s.capacity;
}

// Name -> bytes of one rank's buffer.
std::map<std::string, int64_t> buffer_sizes(const LoopbackShape &s) {
  const int64_t T = s.num_tokens, K = s.num_topk, R = s.num_ranks, L = s.num_experts / R, N = num_rows(s);
  const bool is_token = s.layout == Layout::kToken;
  const int64_t S = is_token ? s.capacity : R * T, scalars = s.has_weights ? N * 4 * (is_token ? K : 1) : 0;
  return {{"x", T * s.row_bytes}, {"side", s.quantize == Quantize::kNone ? T * side_bytes(s) : 0},
          {"topk_idx", T * K * 4}, {"weights", s.has_weights ? T * K * 4 : 0}, {"window", 4},
          {"recv_x", N * recv_row_bytes(s)}, {"recv_side", N * side_bytes(s)}, {"recv_weights", scalars},
          {"slot_meta", S * K * 4}, {"slot_token", S * 4},
          {"group_sizes", L * 4}, {"counts", L * 4}, {"stats", 32}, {"topk_clean", T * K * 4}, {"slot", T * R * 4},
          {"dst_row", T * K * 4}, {"recv_offsets", (R + 1) * 4}, {"ticket", 8}, {"ticket2", 8},
          {"y", N * s.row_bytes}, {"y_weights", s.has_weights && !is_token ? N * 4 : 0}, {"scalars", scalars},
          {"bias", s.has_bias ? T * s.row_bytes : 0}, {"out", T * s.row_bytes},
          {"out_scalars", s.has_weights ? T * K * 4 : 0},
          {"partial", has_partials(s.layout, s.wire) ? S * partial_row_bytes(s.row_bytes, s.dtype, s.wire) : 0}};
}

} // namespace

Loopback::Loopback(int device, const LoopbackShape &shape) : device_(device), shape_(shape), sizes_(buffer_sizes(shape)) {
  check(cudaSetDevice(device_), "cudaSetDevice");
  check(load_dispatch_kernels(), "loading dispatch kernels");
  check(load_combine_kernels(), "loading combine kernels");
  if (shape.num_slots) {
    check(load_dispatch_latency_kernels(), "loading dispatch kernels of latency mode");
    check(load_combine_latency_kernels(), "loading combine kernels of latency mode");
  }
  if (shape.num_nodes > 1) {
    check(load_dispatch_nodes_kernels(), "loading dispatch kernels over nodes");
    check(load_combine_nodes_kernels(), "loading combine kernels over nodes");
    check(load_test_carrier(), "loading the test transport");
  }
#ifdef JAX_EP_STAMPS
  // Blocks that this object does not have may have stamped for another one.
  check(cudaMemset(stamps_on(device_), 0, sizeof(BlockStamps) * kStampRanks * kStampBlocks), "cudaMemset of stamps");
#endif
  const int64_t dispatched = recv_row_bytes(shape) + round_up(side_bytes(shape), 16);
  const int64_t combined = partial_row_bytes(shape.row_bytes, shape.dtype, shape.wire);
  const int64_t crossing = std::max(dispatched, combined);
  arena_shape_ = shape.num_slots ? latency_arena_shape(shape.num_ranks, shape.num_nodes, shape.num_experts, crossing,
                                                       shape.num_topk, shape.num_tokens, shape.num_slots)
                 : shape.num_nodes > 1
                     ? node_arena_shape(shape.num_ranks, shape.num_nodes, shape.num_experts,
                                        std::max<int64_t>(dispatched, shape.row_bytes), shape.num_topk, shape.staging_bytes)
                                 : arena_shape(shape.num_ranks, shape.num_experts, crossing, shape.num_topk,
                                               shape.staging_bytes);
  auto allocate = [&](int64_t bytes) {
    void *p = nullptr;
    check(cudaMalloc(&p, std::max<int64_t>(bytes, 16)), "cudaMalloc");
    owned_.push_back(p);
    return static_cast<char *>(p);
  };
  std::vector<Peer> peers;
  for (int r = 0; r < shape.num_ranks; ++r) {
    arenas_.push_back(allocate(arena_shape_.bytes()));
    check(cudaMemset(arenas_[r], 0, arena_shape_.bytes()), "cudaMemset");
    peers.push_back({arenas_[r], nullptr, 1, shape.crosses_once});
    for (const auto &[name, bytes] : sizes_) buffers_[name].push_back(allocate(bytes));
    cudaStream_t stream;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    streams_.push_back(stream);
    if (shape.num_nodes > 1) {
      carriers_.emplace_back();
      check(make_carrier(&carriers_.back()), "carrier");
    }
    check(cudaMemcpy(buffers_["window"][r], &shape.window, 4, cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  peers_ = reinterpret_cast<Peer *>(allocate(sizeof(Peer) * peers.size()));
  check(cudaMemcpy(peers_, peers.data(), sizeof(Peer) * peers.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
  check(cudaHostAlloc(&failures_, sizeof(FailureRecord) * shape.num_ranks, cudaHostAllocMapped | cudaHostAllocPortable),
        "cudaHostAlloc");
  std::memset(failures_, 0, sizeof(FailureRecord) * shape.num_ranks);
}

Loopback::~Loopback() {
  for (cudaStream_t s : streams_) cudaStreamSynchronize(s), cudaStreamDestroy(s);
  for (Carrier &c : carriers_) cudaStreamSynchronize(c.stream), cudaStreamDestroy(c.stream), cudaEventDestroy(c.before);
  for (void *p : owned_) cudaFree(p);
  if (failures_) cudaFreeHost(failures_);
}

template <class T> T *Loopback::at(const std::string &name, int rank) const {
  return sizes_.at(name) ? reinterpret_cast<T *>(buffers_.at(name)[rank]) : nullptr;
}

void Loopback::write(const std::string &name, int rank, const void *data, int64_t bytes) {
  if (bytes != sizes_.at(name)) throw std::runtime_error("loopback: " + name + " takes " + std::to_string(sizes_.at(name)) + " bytes");
  check(cudaMemcpy(buffers_.at(name).at(rank), data, bytes, cudaMemcpyHostToDevice), "write");
}

void Loopback::read(const std::string &name, int rank, void *data) const {
  check(cudaMemcpy(data, buffers_.at(name).at(rank), sizes_.at(name), cudaMemcpyDeviceToHost), "read");
}

void Loopback::fill(const std::string &name, int byte) {
  for (char *p : buffers_.at(name)) check(cudaMemset(p, byte, sizes_.at(name)), "fill");
  check(cudaDeviceSynchronize(), "fill");
}

CallParams Loopback::call(int rank, Op op, int64_t row_bytes, int64_t side_bytes,
                          std::initializer_list<const char *> shared) const {
  CallParams c{};
  c.shape = arena_shape_;
  c.arena = arenas_[rank], c.peers = peers_, c.failure = failures_ + rank;
  c.op = op, c.rank = rank, c.num_ranks = shape_.num_ranks, c.num_topk = shape_.num_topk;
  c.row_bytes = row_bytes, c.side_bytes = side_bytes, c.tag = uint64_t(op),
  c.limit_ns = uint64_t(std::min(shape_.timeout_ns, kMaxLimitNs));
  c.force_staged = shape_.force_staged, c.is_direct = 1, c.chunk_tokens = shape_.chunk_tokens;
  int i = 0;
  for (const char *name : shared) c.buffer[i++] = *name ? reinterpret_cast<uint64_t>(at<char>(name, rank)) : 0;
  return c;
}

DispatchParams Loopback::dispatch_params(int rank, bool is_route) const {
  DispatchParams p{};
  p.call = call(rank, is_route ? Op::kDispatch : Op::kRedispatch, recv_row_bytes(shape_), side_bytes(shape_),
                {"recv_x", "recv_weights", "slot_meta", "slot_token", "recv_side"});
  p.x = at<char>("x", rank), p.x_bytes = shape_.row_bytes, p.side = at<char>("side", rank);
  p.topk_idx = is_route ? at<int32_t>("topk_idx", rank) : nullptr, p.window = is_route ? at<int32_t>("window", rank) : nullptr;
  p.weights = at<float>("weights", rank), p.topk_clean = at<int32_t>("topk_clean", rank);
  p.slot = at<int32_t>("slot", rank), p.dst_row = at<int32_t>("dst_row", rank);
  p.slot_meta = at<int32_t>("slot_meta", rank), p.slot_token = at<int32_t>("slot_token", rank);
  p.recv_offsets = at<int32_t>("recv_offsets", rank), p.group_sizes = at<int32_t>("group_sizes", rank);
  p.counts = at<int32_t>("counts", rank), p.recv_x = at<char>("recv_x", rank), p.recv_side = at<char>("recv_side", rank);
  p.recv_weights = at<float>("recv_weights", rank), p.stats = is_route ? at<int32_t>("stats", rank) : nullptr;
  p.num_tokens = shape_.num_tokens, p.num_experts = shape_.num_experts;
  p.num_local_experts = shape_.num_experts / shape_.num_ranks, p.capacity = shape_.capacity;
  p.num_slots = shape_.layout == Layout::kToken ? shape_.capacity : shape_.num_ranks * shape_.num_tokens;
  p.alignment = shape_.alignment, p.layout = shape_.layout, p.zero_tail = shape_.zero_tail;
  p.dtype = shape_.dtype, p.quantize = shape_.quantize;
  p.num_blocks = shape_.num_sms, p.use_bulk = shape_.use_bulk;
  p.outputs.add(p.recv_x, sizes_.at("recv_x"));
  if (is_route) { // the handle as FFI handlers poison it
    p.outputs.add(p.topk_clean, sizes_.at("topk_clean")), p.outputs.add(p.slot, sizes_.at("slot"));
    p.outputs.add(p.dst_row, sizes_.at("dst_row")), p.outputs.add(p.slot_meta, sizes_.at("slot_meta"));
    p.outputs.add(p.slot_token, sizes_.at("slot_token")), p.outputs.add(p.recv_offsets, sizes_.at("recv_offsets"));
    for (const char *name : {"group_sizes", "counts", "stats"}) p.outputs.add(at<char>(name, rank), sizes_.at(name), true);
  }
  return p;
}

CombineParams Loopback::combine_params(int rank) const {
  CombineParams p{};
  p.call = call(rank, Op::kCombine, partial_row_bytes(shape_.row_bytes, shape_.dtype, shape_.wire), 0,
                {has_partials(shape_.layout, shape_.wire) ? "partial" : "y", "scalars", "y", "y_weights", ""});
  p.y = at<char>("y", rank), p.y_bytes = shape_.row_bytes;
  p.weights = at<float>("y_weights", rank), p.scalars = at<float>("scalars", rank);
  p.bias = at<char>("bias", rank), p.topk_clean = at<int32_t>("topk_clean", rank);
  p.slot = at<int32_t>("slot", rank), p.dst_row = at<int32_t>("dst_row", rank);
  p.slot_meta = at<int32_t>("slot_meta", rank), p.slot_token = at<int32_t>("slot_token", rank);
  p.recv_offsets = at<int32_t>("recv_offsets", rank), p.out = at<char>("out", rank);
  p.out_scalars = at<float>("out_scalars", rank), p.partial = at<char>("partial", rank);
  p.num_tokens = shape_.num_tokens, p.num_local_experts = shape_.num_experts / shape_.num_ranks;
  p.layout = shape_.layout, p.dtype = shape_.dtype, p.quantize = shape_.wire;
  p.num_blocks = shape_.num_sms, p.use_bulk = shape_.use_bulk;
  p.outputs.add(p.out, sizes_.at("out"));
  return p;
}

void Loopback::launch_latency(const std::string &op, int rank) {
  const std::string what = op.substr(0, op.find('_'));
  LatencyCall half{1, 1, nullptr, nullptr};
  for (const char *ticket : {"ticket", "ticket2"}) {
    const std::string number = ticket + 6;
    if (op == what + "_start" + number) half = {1, 0, nullptr, at<int32_t>(ticket, rank)};
    if (op == what + "_done" + number) half = {0, 1, at<int32_t>(ticket, rank), nullptr};
  }
  if (op != what && half.sends && half.receives) throw std::runtime_error("loopback: no operation " + op);
  if (what == "combine") {
    CombineParams p = combine_params(rank);
    p.partial = nullptr;
    check(launch_combine_latency(p, half, streams_[rank]), op.c_str());
  } else {
    check(launch_dispatch_latency(dispatch_params(rank, what == "dispatch"), half, streams_[rank]), op.c_str());
  }
}

void Loopback::launch_rank(const std::string &op, int rank) {
  const bool has_nodes = shape_.num_nodes > 1;
  if (has_nodes) {
    const CarrierParams p{arena_shape_, arenas_[rank], peers_, uint64_t(std::min(shape_.timeout_ns, kMaxLimitNs)),
                          shape_.num_ranks, shape_.num_sms, shape_.num_carriers, uint32_t(shape_.max_delay_ns), shape_.use_bulk};
    check(launch_carrier(carriers_[rank], launch_test_carrier, p, streams_[rank]), "carrier");
  }
  if (shape_.num_slots) return launch_latency(op, rank);
  if (op == "combine") {
    check((has_nodes ? launch_combine_nodes : launch_combine)(combine_params(rank), streams_[rank]), "combine");
  } else if (op == "dispatch" || op == "redispatch") {
    check((has_nodes ? launch_dispatch_nodes : launch_dispatch)(dispatch_params(rank, op == "dispatch"), streams_[rank]),
          op.c_str());
  } else throw std::runtime_error("loopback: no operation " + op);
}

void Loopback::launch(const std::string &op, const std::vector<int64_t> &delay_ns, const std::vector<int> &absent) {
  check(cudaSetDevice(device_), "cudaSetDevice");
  for (int r = 0; r < shape_.num_ranks; ++r) {
    if (std::find(absent.begin(), absent.end(), r) != absent.end()) continue;
    if (r < int(delay_ns.size()) && delay_ns[r] > 0) delay_kernel<<<1, 1, 0, streams_[r]>>>(delay_ns[r]);
    launch_rank(op, r);
  }
}

void Loopback::synchronize() {
  for (cudaStream_t s : streams_) check(cudaStreamSynchronize(s), "synchronize");
  for (const Carrier &c : carriers_) check(cudaStreamSynchronize(c.stream), "synchronize");
}

double Loopback::time(const std::string &op, int calls) {
  check(cudaSetDevice(device_), "cudaSetDevice");
  const int n = shape_.num_ranks;
  std::vector<cudaEvent_t> begin(n), end(n);
  for (int r = 0; r < n; ++r) check(cudaEventCreate(&begin[r]), "event"), check(cudaEventCreate(&end[r]), "event");
  synchronize();
  // All ranks wait behind one delay, so that launching is not timed.
  for (int r = 0; r < n; ++r) {
    delay_kernel<<<1, 1, 0, streams_[r]>>>(2000000);
    check(cudaEventRecord(begin[r], streams_[r]), "event");
  }
  for (int i = 0; i < calls; ++i)
    for (int r = 0; r < n; ++r) launch_rank(op, r);
  float worst = 0;
  for (int r = 0; r < n; ++r) check(cudaEventRecord(end[r], streams_[r]), "event");
  for (int r = 0; r < n; ++r) {
    float ms = 0;
    check(cudaEventSynchronize(end[r]), "event");
    check(cudaEventElapsedTime(&ms, begin[r], end[r]), "event");
    worst = std::max(worst, ms);
    cudaEventDestroy(begin[r]), cudaEventDestroy(end[r]);
  }
  return worst * 1e3 / calls;
}

#ifdef JAX_EP_STAMPS
bool Loopback::has_stamps() { return true; }

std::vector<std::vector<StampsOfBlock>> Loopback::stamps() const {
  check(cudaSetDevice(device_), "cudaSetDevice");
  const BlockStamps *all = stamps_on(device_);
  std::vector<std::vector<StampsOfBlock>> of_ranks(size_t(shape_.num_ranks));
  for (int r = 0; r < std::min(shape_.num_ranks, kStampRanks); ++r) {
    for (int b = 0; b < kStampBlocks; ++b) {
      BlockStamps block;
      check(cudaMemcpy(&block, all + int64_t(r) * kStampBlocks + b, sizeof(BlockStamps), cudaMemcpyDeviceToHost), "stamps");
      if (!block.count) continue;
      const bool is_carrier = b >= kStampCallBlocks;
      const int kept = int(std::min<uint32_t>(block.count, kStampsPerBlock));
      StampsOfBlock &of = of_ranks[r].emplace_back();
      of.block = is_carrier ? b - kStampCallBlocks : b, of.is_carrier = is_carrier, of.dropped = int64_t(block.count) - kept;
      for (const StampEntry *e = block.entries; e != block.entries + kept; ++e)
        of.stamps.push_back({stamp_name(e->stamp), e->number, e->ns, e->clock});
    }
  }
  return of_ranks;
}
#else
bool Loopback::has_stamps() { return false; }

std::vector<std::vector<StampsOfBlock>> Loopback::stamps() const {
  throw std::runtime_error("loopback: this build's kernels have no stamps; build with cmake -DJAX_EP_STAMPS=ON");
}
#endif

void Loopback::reset() {
  synchronize();
  for (char *a : arenas_) check(cudaMemset(a, 0, arena_shape_.bytes()), "reset");
  check(cudaDeviceSynchronize(), "reset");
  std::memset(failures_, 0, sizeof(FailureRecord) * shape_.num_ranks);
}

} // namespace jax_ep
