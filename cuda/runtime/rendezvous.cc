#include "cuda/runtime/rendezvous.h"

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <vector>

#include "cuda/runtime/setup_failure.h"

namespace jax_ep {
namespace {

struct Run {
  int64_t id = 0;
  std::map<int, int64_t> arrivals; // by device
  int64_t complete(int num_devices) const { // arrivals that every device has made
    if (int(arrivals.size()) < num_devices) return 0;
    int64_t least = INT64_MAX;
    for (const auto &[device, count] : arrivals) least = std::min(least, count);
    return least;
  }
};

struct Meetings {
  std::mutex mutex;
  std::condition_variable changed;
  // The first kRendezvousRuns runs of each key, in order of appearance. All devices agree on whether a run is
  // among them, because the list only grows and is shared.
  std::map<std::string, std::vector<Run>, std::less<>> runs;
};

Meetings &meetings() {
  static Meetings &all = *new Meetings;
  return all;
}

} // namespace

std::string rendezvous_of(int num_devices, std::string_view key, int64_t run_id, int device, int64_t timeout_ns) {
  if (num_devices <= 1) return "";
  const Deadline deadline = Clock::now() + std::chrono::nanoseconds(timeout_ns);
  Meetings &all = meetings();
  std::unique_lock<std::mutex> lock(all.mutex);
  auto at = all.runs.find(key);
  if (at == all.runs.end()) {
    at = all.runs.emplace(std::string(key), std::vector<Run>()).first;
    at->second.reserve(kRendezvousRuns); // references below stay valid
  }
  std::vector<Run> &runs = at->second;
  auto run = std::find_if(runs.begin(), runs.end(), [&](const Run &r) { return r.id == run_id; });
  if (run == runs.end()) {
    if (int(runs.size()) >= kRendezvousRuns) return "";
    run = runs.insert(runs.end(), Run{run_id, {}});
  }
  const int64_t mine = ++run->arrivals[device];
  all.changed.notify_all();
  if (all.changed.wait_until(lock, deadline, [&] { return run->complete(num_devices) >= mine; })) return "";
  return "SetupTimeout: device " + std::to_string(device) + " waited for the other " +
         std::to_string(num_devices - 1) + " device(s) of this process; " +
         std::to_string(run->arrivals.size()) + " of " + std::to_string(num_devices) +
         " started this execution of the program";
}

} // namespace jax_ep
