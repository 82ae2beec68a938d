// Time spent in set-up, by phase, summed over the process.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "cuda/runtime/setup_failure.h"

namespace jax_ep {

// kAttach: call sites that found their arena bound (instantiate from entry to return).
enum class SetupPhase { kMemory = 0, kKernels = 1, kPeers = 2, kAttach = 3 };
constexpr int kNumSetupPhases = 4;

inline std::atomic<int64_t> &num_attached() {
  static std::atomic<int64_t> count{0};
  return count;
}

inline std::array<std::atomic<int64_t>, kNumSetupPhases> &setup_ns() {
  static std::array<std::atomic<int64_t>, kNumSetupPhases> ns{};
  return ns;
}

class SetupTimer {
 public:
  explicit SetupTimer(SetupPhase phase) : phase_(phase), start_(Clock::now()) {}
  ~SetupTimer() {
    setup_ns()[size_t(phase_)] += std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start_).count();
  }
  SetupTimer(const SetupTimer &) = delete;
  SetupTimer &operator=(const SetupTimer &) = delete;

 private:
  const SetupPhase phase_;
  const Deadline start_;
};

} // namespace jax_ep
