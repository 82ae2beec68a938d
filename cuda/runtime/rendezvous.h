// Local devices of one process meet on the host before the first executions of a program.
//
// A kernel that waits for its peers must not keep a device of the same process from getting as far as its own
// launch (first launches load and allocate). XLA makes such a rendezvous only when the program holds a collective
// of its own. All local devices run the same call sites in the same order, so the n-th arrival of each device
// under (key, run) meets the n-th arrivals of the others.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace jax_ep {

constexpr int kRendezvousRuns = 3; // runs of each key that meet; later ones pass at once

// "" or "SetupTimeout: ...". Does nothing when the process has one device under `key`.
std::string rendezvous(std::string_view key, int64_t run_id, int device, int64_t timeout_ns);

// The same for a known number of devices (what rendezvous looks up in the registry).
std::string rendezvous_of(int num_devices, std::string_view key, int64_t run_id, int device, int64_t timeout_ns);

} // namespace jax_ep
