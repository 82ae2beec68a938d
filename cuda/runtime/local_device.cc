#include "cuda/runtime/local_device.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>

#include "cuda/kernels/warmup.h"
#include "cuda/runtime/driver.h"
#include "cuda/runtime/setup_time.h"

namespace jax_ep {
namespace {

constexpr int64_t kZeroBytes = int64_t(256) << 10;

std::string format_uuid(const cudaUUID_t &uuid) {
  std::string text = "GPU-";
  char byte[3];
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    std::snprintf(byte, sizeof(byte), "%02x", unsigned(static_cast<unsigned char>(uuid.bytes[i])));
    text += byte;
  }
  return text;
}

DeviceInfo read_device_info(int device) {
  cudaDeviceProp prop{};
  check(cudaGetDeviceProperties(&prop, device), "cudaGetDeviceProperties");
  return {format_uuid(prop.uuid), prop.name, prop.multiProcessorCount, prop.major, prop.minor};
}

} // namespace

int num_devices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  (void)cudaGetLastError();
  return 0;
}

const DeviceInfo &device_info(int device) {
  static std::mutex mutex;
  static auto &known = *new std::map<int, DeviceInfo>; // leaked: used until the process ends
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(device);
  if (found != known.end()) return found->second;
  return known.emplace(device, read_device_info(device)).first->second;
}

bool can_access_peer(int device, int peer) {
  if (device == peer) return true;
  int can = 0;
  check(cudaDeviceCanAccessPeer(&can, device, peer), "cudaDeviceCanAccessPeer");
  return can != 0;
}

void enable_peer_access(const std::vector<int> &devices) {
  for (int device : devices) {
    DeviceGuard guard(device);
    for (int peer : devices) {
      if (peer == device) continue;
      if (!can_access_peer(device, peer)) {
        fail("device " + std::to_string(device) + " has no peer access to device " + std::to_string(peer));
      }
      const cudaError_t status = cudaDeviceEnablePeerAccess(peer, 0);
      if (status == cudaErrorPeerAccessAlreadyEnabled) (void)cudaGetLastError(); // XLA was first
      else check(status, "cudaDeviceEnablePeerAccess");
    }
  }
}

LocalDevice &LocalDevice::get(int device) {
  static std::mutex mutex;
  static auto &made = *new std::map<int, std::unique_ptr<LocalDevice>>;
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<LocalDevice> &slot = made[device];
  if (!slot) slot.reset(new LocalDevice(device));
  return *slot;
}

LocalDevice::LocalDevice(int device) : device_(device) {
  const int count = num_devices();
  if (device < 0 || device >= count) {
    fail("this process has no CUDA device " + std::to_string(device) + " (it sees " + std::to_string(count) + ")");
  }
  DeviceGuard guard(device);
  int least = 0, greatest = 0; // a priority of its own keeps the stream off the hardware queues of XLA's streams
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
  check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest), "cudaStreamCreateWithPriority");
  void *zeros = nullptr;
  check(cudaHostAlloc(&zeros, kZeroBytes, cudaHostAllocPortable), "cudaHostAlloc");
  std::memset(zeros, 0, kZeroBytes);
  zeros_ = zeros;
}

void LocalDevice::warm() {
  std::lock_guard<std::mutex> lock(warm_mutex_);
  if (is_warm_) return;
  SetupTimer timer(SetupPhase::kKernels);
  DeviceGuard guard(device_);
  const std::string error = warm_kernels(device_);
  if (!error.empty()) fail("warm-up of device " + std::to_string(device_) + ": " + error);
  is_warm_ = true;
}

void LocalDevice::zero(void *p, int64_t bytes) {
  DeviceGuard guard(device_);
  // By the copy engine: a memset is a kernel, which would wait for SMs while a call with all SMs waits for us.
  for (int64_t at = 0; at < bytes; at += kZeroBytes) {
    check(cudaMemcpyAsync(static_cast<char *>(p) + at, zeros_, size_t(std::min(kZeroBytes, bytes - at)),
                          cudaMemcpyHostToDevice, stream_),
          "cudaMemcpyAsync");
  }
  check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
}

void LocalDevice::store(void *p, const void *host, int64_t bytes) {
  DeviceGuard guard(device_);
  check(cudaMemcpyAsync(p, host, size_t(bytes), cudaMemcpyHostToDevice, stream_), "cudaMemcpyAsync");
  check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
}

} // namespace jax_ep
