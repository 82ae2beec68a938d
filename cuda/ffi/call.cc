#include "cuda/ffi/call.h"

#include <algorithm>

#include <cuda_runtime_api.h>

#include "cuda/runtime/bind.h"
#include "cuda/runtime/rendezvous.h"

namespace jax_ep {
namespace {

ffi::Error internal(std::string text) { return ffi::Error(ffi::ErrorCode::kInternal, std::move(text)); }

uint64_t hash(std::initializer_list<int64_t> words) { // FNV-1a over bytes: equal programs, equal tag
  uint64_t h = 0xcbf29ce484222325u;
  for (int64_t w : words)
    for (int i = 0; i < 8; ++i) h = (h ^ uint8_t(w >> 8 * i)) * 0x100000001b3u;
  return h;
}

bool is_recording(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) == cudaSuccess && status == cudaStreamCaptureStatusActive;
}

} // namespace

ffi::ErrorOr<CallAttributes> CallAttributes::read(const ffi::Dictionary &attrs) {
  CallAttributes a{};
  auto key = attrs.get<std::string_view>("key");
  if (!key) return ffi::Unexpected(key.error());
  a.key = *key;
  const struct { const char *name; int64_t *to; } fields[] = {
      {"num_ranks", &a.num_ranks},         {"num_experts", &a.num_experts},
      {"num_topk", &a.num_topk},           {"row_bytes", &a.row_bytes},
      {"num_tokens", &a.num_tokens},       {"num_rows", &a.num_rows},
      {"side_bytes", &a.side_bytes},       {"quantize", &a.quantize},
      {"dtype", &a.dtype},                 {"layout", &a.layout},
      {"expert_alignment", &a.expert_alignment}, {"zero_tail", &a.zero_tail},
      {"num_sms", &a.num_sms},             {"staging_bytes", &a.staging_bytes},
      {"num_slots", &a.num_slots},
      {"num_nodes", &a.num_nodes},         {"num_carriers", &a.num_carriers},
      {"chunk_tokens", &a.chunk_tokens},   {"put_delay_ns", &a.put_delay_ns},
      {"force_staged", &a.force_staged},   {"force_vector", &a.force_vector},
      {"setup_timeout_ns", &a.setup_timeout_ns},
      {"first_timeout_ns", &a.first_timeout_ns}, {"timeout_ns", &a.timeout_ns}};
  for (const auto &f : fields) {
    auto value = attrs.get<int64_t>(f.name);
    if (!value) return ffi::Unexpected(value.error());
    *f.to = *value;
  }
  return a;
}

int32_t CallAttributes::num_blocks(const RankContext &rank) const {
  if (num_sms) return int32_t(num_sms);
  if (num_nodes == 1) return rank.num_sms;
  // Beside its carrier, and the same on all ranks, since the limit is.
  const int most = std::min(rank.max_num_sms - int(num_carriers), kMaxNodeBlocks);
  return std::max(1, std::min(rank.num_sms, most));
}

std::string start_carrier(const RankContext &rank, const CallAttributes &a, const CallParams &call, int num_blocks,
                          bool is_latency, cudaStream_t stream) {
  for (int r = 0; r < call.num_ranks && !is_latency; ++r)
    if (!call.is_direct && !rank.same_process[size_t(r)] && !call.is_remote(r))
      return "a buffer of this call lies outside XLA's preallocated pool, where rank " + std::to_string(r) +
             " of the same node cannot reach it; over several nodes no row goes through staging: leave "
             "XLA_PYTHON_CLIENT_PREALLOCATE and XLA_PYTHON_CLIENT_ALLOCATOR alone, and copy imported arrays first";
  const CarrierParams p{call.shape, call.arena, call.peers, call.limit_ns, call.num_ranks, num_blocks, int32_t(a.num_carriers),
                        uint32_t(a.put_delay_ns), a.use_bulk(rank), rank.pes};
  if (cudaError_t e = launch_carrier(rank.carrier, rank.launch_carrier, p, stream))
    return std::string("launch of the carrier failed: ") + cudaGetErrorString(e);
  return "";
}

bool Buffers::has_rows(size_t i) const {
  auto b = args_.get<ffi::AnyBuffer>(i + (part_ == Part::kDone));
  return b && b->dimensions().size() > 0 && b->dimensions()[0] > 0;
}

void *Buffers::result(size_t i, int64_t bytes) {
  auto b = rets_.get<ffi::AnyBuffer>(i);
  if (!b) return get(ffi::Unexpected(b.error()), "result", i, bytes);
  return get(**b, "result", i, bytes);
}

LatencyCall Buffers::latency() {
  LatencyCall call{};
  call.sends = part_ != Part::kDone, call.receives = part_ != Part::kStart;
  if (part_ == Part::kDone) call.ticket = static_cast<const int32_t *>(operand(0, 8));
  if (part_ == Part::kStart) call.ticket_result = static_cast<int32_t *>(result(0, 8));
  return call;
}

void *Buffers::get(ffi::ErrorOr<ffi::AnyBuffer> buffer, const char *kind, size_t i, int64_t bytes) {
  const char *const parts[] = {"", "", "_start", "_done"};
  const std::string name = std::string(op_) + parts[int(part_)] + " " + kind + " " + std::to_string(i);
  if (!buffer) {
    if (problem_.empty()) problem_ = name + ": missing";
    return nullptr;
  }
  const int64_t got = int64_t(buffer->size_bytes());
  if (got < bytes && problem_.empty())
    problem_ = name + ": got " + std::to_string(got) + " bytes, expected at least " + std::to_string(bytes);
  void *at = got ? buffer->untyped_data() : nullptr;
  if (bytes % 16 == 0 && reinterpret_cast<uintptr_t>(at) % 16 && problem_.empty())
    problem_ = name + ": not aligned to 16 bytes, as XLA's own buffers are; copy the array first";
  return at;
}

CallParams make_call(const RankContext &rank, const CallAttributes &a, Op op, Part part, cudaStream_t stream,
                     std::initializer_list<int64_t> what, const Shared (&shared)[kNumBuffers]) {
  CallParams c{};
  c.shape = rank.shape;
  c.arena = rank.arena, c.peers = rank.peers, c.failure = rank.failure;
  c.pool_base = reinterpret_cast<uint64_t>(rank.pool ? rank.pool->base : nullptr);
  c.op = op, c.rank = rank.rank, c.num_ranks = int32_t(a.num_ranks), c.num_topk = int32_t(a.num_topk);
  c.row_bytes = a.row_bytes, c.side_bytes = a.side_bytes;
  const bool is_latency = part != Part::kThroughput;
  // In latency mode receivers wait for flags of every block of a source.
  const int64_t blocks = is_latency ? a.num_blocks(rank) : 0;
  c.tag = hash({int64_t(op), int64_t(hash(what)), a.num_ranks, a.num_experts, a.num_topk, a.num_tokens, a.num_rows,
                a.row_bytes, a.dtype, a.layout, a.expert_alignment, a.side_bytes, a.quantize, blocks});
  c.force_staged = a.force_staged != 0, c.chunk_tokens = int32_t(a.chunk_tokens);
  c.is_direct = rank.pool && rank.pool->base && rank.pool->is_exportable;
  bool reaches_all = !c.force_staged || a.num_ranks == 1;
  for (int i = 0; i < kNumBuffers; ++i) {
    c.buffer[i] = reinterpret_cast<uint64_t>(shared[i].at);
    // A buffer outside the exported pool (growing pool, other allocator, imported array) is not reachable for
    // other processes: this call's rows go through staging.
    if (!rank.pool || !rank.pool->contains(shared[i].at, shared[i].bytes)) c.is_direct = 0;
  }
  for (uint8_t same : rank.same_process) reaches_all = reaches_all && (same || c.is_direct);
  reaches_all = reaches_all || a.num_nodes > 1; // nothing is staged
  const int64_t before = rank.count_call({/*sends=*/part != Part::kDone, /*receives=*/part != Part::kStart,
                                          /*is_staged=*/!reaches_all && !is_latency, !a.use_bulk(rank),
                                          /*is_routing=*/op == Op::kDispatch, is_recording(stream)});
  c.limit_ns = uint64_t(std::min<int64_t>(before == 0 ? a.first_timeout_ns : a.timeout_ns, kMaxLimitNs));
  return c;
}

int current_device() {
  int device = -1;
  cudaGetDevice(&device); // XLA makes the device current around every stage that runs on one
  return device;
}

ffi::ErrorOr<const RankContext *> find_rank(std::string_view key) {
  const int device = current_device();
  const RankContext *rank = Registry::get().find(key, device);
  if (!rank)
    return ffi::Unexpected(internal("SetupError: device " + std::to_string(device) +
                                    " was not bound to its expert-parallel group when the program was compiled or "
                                    "loaded; run it on the mesh that it was compiled for"));
  const std::string failure = describe(*rank->failure);
  if (!failure.empty()) return ffi::Unexpected(internal(failure));
  return rank;
}

namespace {

// Binds the arena of a call site from its attributes; does nothing where it is bound.
ffi::Error bind_call_site(const ffi::Dictionary &attrs) {
  auto a = CallAttributes::read(attrs);
  if (!a) return a.error();
  auto groups = attrs.get<ffi::Span<const int64_t>>("groups");
  if (!groups) return groups.error();
  BindRequest request;
  request.key = std::string(a->key);
  request.groups.assign(groups->begin(), groups->end());
  request.num_ranks = a->num_ranks, request.num_experts = a->num_experts, request.num_topk = a->num_topk;
  request.row_bytes = a->crossing_bytes(), request.staging_bytes = a->staging_bytes, request.num_sms = a->num_sms;
  request.num_tokens = a->num_tokens, request.num_slots = a->num_slots, request.num_nodes = a->num_nodes;
  // A carrier is resident beside at least one block (num_blocks).
  if (a->num_nodes > 1) request.node_sms = a->num_carriers + (a->num_sms == 0);
  request.setup_timeout_ns = a->setup_timeout_ns;
  const std::string problem = bind_from_instantiate(request);
  return problem.empty() ? ffi::Error::Success() : internal(problem);
}

} // namespace

ffi::Error instantiate(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary attrs) { return bind_call_site(attrs); }

ffi::Error initialize(ffi::RunId run, ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary attrs) {
  auto key = attrs.get<std::string_view>("key");
  auto timeout = attrs.get<int64_t>("first_timeout_ns");
  if (!key) return key.error();
  if (!timeout) return timeout.error();
  const int device = current_device();
  // An executable that was neither lowered nor instantiated in this process (deserialised) is bound late but rightly.
  if (!Registry::get().find(*key, device)) {
    if (ffi::Error e = bind_call_site(attrs); e.failure()) return e;
  }
  const std::string problem = rendezvous(*key, run.run_id, device, *timeout);
  return problem.empty() ? ffi::Error::Success() : internal(problem);
}

ffi::Error initialize_recordable(ffi::RunId run, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs) {
  if (ffi::Error e = initialize(run, args, rets, attrs); e.failure()) return e; // other devices wait there for this one
  auto rank = find_rank(*attrs.get<std::string_view>("key"));
  return rank ? ffi::Error::Success() : rank.error();
}

} // namespace jax_ep
