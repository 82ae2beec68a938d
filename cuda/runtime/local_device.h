// The CUDA devices of this process: what they are, and the stream on which set-up works.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace jax_ep {

int num_devices(); // 0 when there is no driver or no device

struct DeviceInfo {
  std::string uuid; // "GPU-...": the same in every process that sees the device
  std::string name;
  int num_sms = 0;
  int cc_major = 0, cc_minor = 0;
};
const DeviceInfo &device_info(int device); // throws SetupFailure

bool can_access_peer(int device, int peer);
void enable_peer_access(const std::vector<int> &devices); // each to each; throws SetupFailure

// One device that takes part in a group. Made at first use, never destroyed.
class LocalDevice {
 public:
  static LocalDevice &get(int device);

  // Loads and runs every kernel on private memory, once; throws when the results are wrong.
  void warm();
  // On an own non-blocking stream, and waited for: no other stream is held up, whatever peers do.
  void zero(void *p, int64_t bytes);
  void store(void *p, const void *host, int64_t bytes);

 private:
  explicit LocalDevice(int device);
  const int device_;
  cudaStream_t stream_ = nullptr;
  const void *zeros_ = nullptr; // page-locked
  std::mutex warm_mutex_;
  bool is_warm_ = false;
};

} // namespace jax_ep
