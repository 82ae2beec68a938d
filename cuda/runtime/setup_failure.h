// The error type of the runtime layer.
#pragma once

#include <chrono>
#include <stdexcept>
#include <string>

namespace jax_ep {

// Set-up failures travel as this exception inside cuda/runtime and become text at its border. The text begins
// with the name of the Python type that it becomes: "SetupError: ...", "SetupTimeout: ...", "ValueError: ...".
struct SetupFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};
[[noreturn]] inline void fail(const std::string &text) { throw SetupFailure("SetupError: " + text); }
[[noreturn]] inline void fail_timeout(const std::string &text) { throw SetupFailure("SetupTimeout: " + text); }

// Every wait of set-up is bounded by one of these.
using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

} // namespace jax_ep
