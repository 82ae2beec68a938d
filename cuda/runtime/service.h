// How processes of one host hand each other file descriptors of device memory.
//
// Each process runs one Service: a thread, without Python's lock, on an abstract Unix socket (no file to clean
// up, gone with the process). A peer connects, and each message asks for one descriptor: XLA's pool of a device,
// or the arena of a key, which is created on demand. So nobody waits for another process to compile or to launch.
//
// Who may ask: a process of the same user (SO_PEERCRED) that shows the 16-byte nonce of the published record.
// A wrong nonce or a message of another size closes the connection without a word; another protocol is told so.
// Messages are fixed-size packets (SOCK_SEQPACKET), descriptors are close-on-exec on both sides.
//
// Plain POSIX: no CUDA here, so that a test can drive it with any descriptor.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>

#include "cuda/runtime/fd.h"
#include "cuda/runtime/setup_failure.h"

namespace jax_ep {

using Nonce = std::array<uint8_t, 16>;

enum class Ask : uint32_t { kPool = 1, kArena = 2 };
enum class Status : uint32_t { kOk = 0, kNone = 1, kError = 2 }; // kNone: this device's pool is not registered

struct Request {
  Nonce nonce{};
  uint32_t magic = 0;
  uint32_t protocol = 0;
  uint32_t ask = 0;
  int32_t device = 0;        // local hardware id in the asked process
  int32_t num_ranks = 0;     // arena only, as are the rest
  int32_t count_words = 0;
  int64_t staging_bytes = 0;
  int32_t num_slots = 0;
  int32_t num_nodes = 1;
  char key[64] = {};         // zero-terminated
};
static_assert(sizeof(Request) == 120, "one layout on both ends");

struct Reply {
  uint32_t magic = 0;
  uint32_t protocol = 0;
  uint32_t status = 0;
  uint32_t reserved = 0;
  int64_t bytes = 0;      // size of the allocation behind the descriptor that comes along
  char text[488] = {};    // zero-terminated reason when status is kError
};
static_assert(sizeof(Reply) == 512, "one layout on both ends");

constexpr uint32_t kMagic = 0x7065786a; // "jxep"

struct Answer {
  Status status = Status::kNone;
  int64_t bytes = 0;
  Fd fd;
  std::string text;
};

class Service {
 public:
  using Handler = std::function<Answer(const Request &)>; // called on the service thread; what it throws is told
  Service(const Nonce &nonce, Handler handler);           // throws SetupFailure
  ~Service();
  const std::string &address() const { return address_; } // abstract name, without the leading zero byte

 private:
  void serve();
  bool answer_one(int connection); // false: close it

  Nonce nonce_;
  Handler handler_;
  std::string address_;
  Fd listener_, stop_;
  std::thread thread_;
};

// One connection to a peer's service.
class Client {
 public:
  Client(const std::string &address, const Nonce &nonce, Deadline deadline); // throws SetupFailure
  // Fills nonce, magic and protocol, sends, waits. Throws on refusal, truncation, another protocol, time-out.
  Answer call(Request request, Deadline deadline);

 private:
  std::string address_;
  Nonce nonce_;
  Fd socket_;
};

} // namespace jax_ep
