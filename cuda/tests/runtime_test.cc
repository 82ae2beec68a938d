// The parts of cuda/runtime that need no GPU: the service between processes and the rendezvous of local devices.
// Built and run by tests/test_bootstrap.py with the host compiler. Prints each failed check; exit status 1 then.
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "cuda/layout.h"
#include "cuda/runtime/rendezvous.h"
#include "cuda/runtime/service.h"

namespace {

using namespace jax_ep;
using std::chrono::milliseconds;
using std::chrono::seconds;

int num_failed = 0;
#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::printf("%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);  \
      ++num_failed;                                                        \
    }                                                                      \
  } while (0)

const Nonce kNonce = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
Deadline soon() { return Clock::now() + seconds(10); }
bool has(const std::string &text, const char *part) { return text.find(part) != std::string::npos; }

template <class Fn>
std::string thrown(Fn fn) {
  try {
    fn();
  } catch (const SetupFailure &e) {
    return e.what();
  }
  return "";
}

// A memory file that says which arena was asked for.
Answer memory_file(const Request &request) {
  Answer answer;
  if (Ask(request.ask) == Ask::kPool) return answer;
  if (request.device == 9) throw SetupFailure("SetupError: no device 9");
  answer.fd = Fd(::memfd_create("arena", MFD_CLOEXEC));
  std::string text = request.key;
  for (int64_t part : {int64_t(request.device), int64_t(request.num_ranks), int64_t(request.count_words),
                       request.staging_bytes, int64_t(request.num_slots)})
    text += ":" + std::to_string(part);
  if (::write(answer.fd.get(), text.data(), text.size()) != ssize_t(text.size())) fail("write");
  answer.bytes = int64_t(text.size());
  answer.status = Status::kOk;
  return answer;
}

Request request_of(Ask ask, int device) {
  Request r;
  r.ask = uint32_t(ask);
  r.device = device, r.num_ranks = 2, r.count_words = 8, r.staging_bytes = int64_t(1) << 33, r.num_slots = 4;
  std::memcpy(r.key, "key", 4);
  return r;
}

Fd connect_raw(const std::string &name) {
  Fd s(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un a{};
  a.sun_family = AF_UNIX;
  std::memcpy(a.sun_path + 1, name.data(), name.size());
  const socklen_t size = socklen_t(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  CHECK(::connect(s.get(), reinterpret_cast<sockaddr *>(&a), size) == 0);
  return s;
}

// Sends `bytes` of `request`; the size of the answer, 0 when the service hung up, -1 when it said nothing.
ssize_t answer_to_raw(const std::string &name, const void *request, size_t bytes, Reply *reply) {
  Fd s = connect_raw(name);
  CHECK(::send(s.get(), request, bytes, MSG_NOSIGNAL) == ssize_t(bytes));
  pollfd one{s.get(), POLLIN, 0};
  if (::poll(&one, 1, 5000) <= 0) return -1;
  const ssize_t n = ::recv(s.get(), reply, sizeof(*reply), 0);
  return n < 0 ? 0 : n;
}

void test_descriptor_travels() {
  Service service(kNonce, memory_file);
  Client client(service.address(), kNonce, soon());
  for (int device : {0, 5}) { // one connection serves several requests
    const Answer answer = client.call(request_of(Ask::kArena, device), soon());
    const std::string expected = "key:" + std::to_string(device) + ":2:8:8589934592:4";
    CHECK(answer.status == Status::kOk && answer.bytes == int64_t(expected.size()));
    char text[32] = {};
    CHECK(::pread(answer.fd.get(), text, sizeof(text) - 1, 0) == ssize_t(expected.size()));
    CHECK(text == expected);
    CHECK((::fcntl(answer.fd.get(), F_GETFD) & FD_CLOEXEC) != 0);
  }
  const Answer none = client.call(request_of(Ask::kPool, 0), soon());
  CHECK(none.status == Status::kNone && !none.fd);
}

void test_handler_error_is_told() {
  Service service(kNonce, memory_file);
  Client client(service.address(), kNonce, soon());
  const std::string text = thrown([&] { client.call(request_of(Ask::kArena, 9), soon()); });
  CHECK(has(text, "the peer says: SetupError: no device 9"));
  CHECK(client.call(request_of(Ask::kArena, 1), soon()).status == Status::kOk); // and it goes on
}

void test_wrong_nonce_is_refused() {
  std::atomic<int> calls{0};
  Service service(kNonce, [&](const Request &r) { return ++calls, memory_file(r); });
  Nonce wrong = kNonce;
  wrong[15] ^= 1;
  Client client(service.address(), wrong, soon());
  CHECK(has(thrown([&] { client.call(request_of(Ask::kArena, 0), soon()); }), "refused"));
  CHECK(calls == 0);
}

void test_malformed_messages_are_refused() {
  std::atomic<int> calls{0};
  Service service(kNonce, [&](const Request &r) { return ++calls, memory_file(r); });
  Request good = request_of(Ask::kArena, 0);
  good.nonce = kNonce;
  good.magic = kMagic;
  good.protocol = kProtocol;
  Reply reply;
  CHECK(answer_to_raw(service.address(), &good, sizeof(good) - 1, &reply) == 0); // truncated
  std::vector<char> longer(sizeof(good) + 1);
  std::memcpy(longer.data(), &good, sizeof(good));
  CHECK(answer_to_raw(service.address(), longer.data(), longer.size(), &reply) == 0);
  Request foreign = good;
  foreign.magic ^= 1;
  CHECK(answer_to_raw(service.address(), &foreign, sizeof(foreign), &reply) == 0);
  Request endless = good;
  std::memset(endless.key, 'k', sizeof(endless.key)); // no terminating zero
  CHECK(answer_to_raw(service.address(), &endless, sizeof(endless), &reply) == 0);
  CHECK(calls == 0);
  CHECK(answer_to_raw(service.address(), &good, sizeof(good), &reply) == ssize_t(sizeof(reply)));
  CHECK(calls == 1);
}

void test_other_protocol_is_told() {
  std::atomic<int> calls{0};
  Service service(kNonce, [&](const Request &r) { return ++calls, memory_file(r); });
  Request other = request_of(Ask::kArena, 0);
  other.nonce = kNonce;
  other.magic = kMagic;
  other.protocol = kProtocol + 1;
  Reply reply;
  CHECK(answer_to_raw(service.address(), &other, sizeof(other), &reply) == ssize_t(sizeof(reply)));
  CHECK(Status(reply.status) == Status::kError && has(reply.text, "protocol"));
  CHECK(calls == 0);
}

void test_waits_are_bounded() {
  CHECK(has(thrown([] { Client("jax_ep-nobody", kNonce, soon()); }), "no connection"));
  std::atomic<bool> release{false};
  Service service(kNonce, [&](const Request &r) {
    while (!release) std::this_thread::sleep_for(milliseconds(1));
    return memory_file(r);
  });
  Client client(service.address(), kNonce, soon());
  const std::string text =
      thrown([&] { client.call(request_of(Ask::kArena, 0), Clock::now() + milliseconds(50)); });
  CHECK(has(text, "SetupTimeout: no answer"));
  release = true;
}

void test_rendezvous() {
  constexpr int64_t kLong = 10'000'000'000, kShort = 50'000'000;
  CHECK(rendezvous_of(1, "one", 1, 0, 0).empty()); // one device: nobody to wait for

  std::atomic<int> before{0}, too_early{0};
  std::vector<std::thread> threads;
  for (int device = 0; device < 3; ++device) {
    threads.emplace_back([&, device] {
      for (int64_t run = 1; run <= kRendezvousRuns; ++run) {
        for (int site = 0; site < 2; ++site) { // two call sites of one program
          std::this_thread::sleep_for(milliseconds(3 * device));
          ++before;
          if (!rendezvous_of(3, "three", run, device, kLong).empty()) ++too_early;
          if (before < int(3 * (2 * (run - 1) + site + 1))) ++too_early; // somebody had not arrived
        }
      }
    });
  }
  for (std::thread &t : threads) t.join();
  CHECK(too_early == 0);
  CHECK(rendezvous_of(3, "three", 99, 0, 0).empty()); // later runs pass at once
  CHECK(has(rendezvous_of(3, "alone", 1, 0, kShort), "SetupTimeout: device 0 waited"));
}

} // namespace

int main() {
  test_descriptor_travels();
  test_handler_error_is_told();
  test_wrong_nonce_is_refused();
  test_malformed_messages_are_refused();
  test_other_protocol_is_told();
  test_waits_are_bounded();
  test_rendezvous();
  if (num_failed == 0) std::printf("all passed\n");
  return num_failed == 0 ? 0 : 1;
}
