// Failure records as words.
#include <cstdio>

#include "cuda/runtime/registry.h"

namespace jax_ep {

const char *failure_name(uint32_t code) {
  switch (Failure(code)) {
    case Failure::kNone: return "";
    case Failure::kPeerTimeout: return "PeerTimeout";
    case Failure::kPeerLost: return "PeerLost";
    case Failure::kMismatch: return "MismatchError";
    case Failure::kPeerFailed: return "PeerFailed";
  }
  return "EpError";
}

const char *op_name(uint32_t op) {
  switch (Op(op)) {
    case Op::kDispatch: return "dispatch";
    case Op::kRedispatch: return "redispatch";
    case Op::kCombine: return "combine";
  }
  return "call";
}

const char *phase_name(uint32_t phase) {
  switch (Phase(phase)) {
    case Phase::kAnnounce: return "announce";
    case Phase::kClaim: return "claim";
    case Phase::kRound: return "round";
    case Phase::kFinish: return "finish";
    case Phase::kGrid: return "grid";
  }
  return "unknown";
}

FailureRecord read_record(const FailureRecord *record) {
  FailureRecord copy{};
  // The device writes `code` last, after a system-wide fence: whoever sees it sees the rest.
  copy.code = __atomic_load_n(&record->code, __ATOMIC_ACQUIRE);
  if (copy.code == uint32_t(Failure::kNone)) return copy;
  const uint32_t code = copy.code;
  copy = *record;
  copy.code = code;
  return copy;
}

std::string describe(const FailureRecord &record) {
  const FailureRecord r = read_record(&record);
  if (r.code == uint32_t(Failure::kNone)) return "";
  const std::string rank = "rank " + std::to_string(r.rank), peer = "rank " + std::to_string(r.peer);
  std::string what;
  switch (Failure(r.code)) {
    case Failure::kPeerTimeout:
      what = r.peer == r.rank && Phase(r.phase) == Phase::kClaim
                 ? rank + " started an exchange in the place of one whose done had not run: too many starts lie between "
                          "a start and its done for Config.max_pending"
                 : rank + " waited for " + peer + " in phase " + phase_name(r.phase) + " and left";
      break;
    case Failure::kPeerLost:
      what = peer + " holds buffers of " + rank + " and did not finish; it may still write into memory that is "
             "in use again: only a restart of the process is safe";
      break;
    case Failure::kMismatch:
      what = r.peer == r.rank ? rank + " ran a done whose start was another call's, or whose rows were received before"
                              : rank + " and " + peer + " run different operations, shapes, dtypes or windows";
      break;
    case Failure::kPeerFailed:
      what = r.peer == r.rank ? rank + " was given the handle of a dispatch that had failed"
                              : peer + " left the call, which " + rank + " saw in phase " + phase_name(r.phase);
      break;
    default:
      what = rank + " failed at " + peer;
  }
  char numbers[96];
  std::snprintf(numbers, sizeof(numbers), " (expected 0x%llx, seen 0x%llx)",
                static_cast<unsigned long long>(r.expected), static_cast<unsigned long long>(r.seen));
  std::string text = std::string(failure_name(r.code)) + ": " + op_name(r.op) + " call " + std::to_string(r.epoch) +
                     ": " + what + numbers;
  if (Failure(r.code) != Failure::kPeerLost) {
    text += "; the group stays unusable until jax_ep.reset() is called in every process";
  }
  return text;
}

} // namespace jax_ep
