#include "cuda/runtime/service.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <vector>

#include "cuda/layout.h"

namespace jax_ep {
namespace {

constexpr size_t kMaxConnections = 1024;

std::string reason() { return std::strerror(errno); }

socklen_t abstract_address(const std::string &name, sockaddr_un *out) {
  *out = {};
  out->sun_family = AF_UNIX; // sun_path[0] stays zero: abstract namespace
  const size_t n = std::min(name.size(), sizeof(out->sun_path) - 1);
  std::memcpy(out->sun_path + 1, name.data(), n);
  return socklen_t(offsetof(sockaddr_un, sun_path) + 1 + n);
}

bool is_same_user(int socket) {
  ucred peer{};
  socklen_t size = sizeof(peer);
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == ::geteuid();
}

bool is_equal(const Nonce &a, const Nonce &b) { // in constant time
  uint8_t difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= uint8_t(a[i] ^ b[i]);
  return difference == 0;
}

std::string random_name() {
  uint8_t bytes[12];
  if (::getrandom(bytes, sizeof(bytes), 0) != ssize_t(sizeof(bytes))) fail("getrandom: " + reason());
  std::string name = "jax_ep-" + std::to_string(::getpid()) + "-";
  for (uint8_t b : bytes) {
    name += "0123456789abcdef"[b >> 4];
    name += "0123456789abcdef"[b & 15];
  }
  return name;
}

void set_text(Reply *reply, const std::string &text) {
  std::memcpy(reply->text, text.data(), std::min(text.size(), sizeof(reply->text) - 1));
}

// Sends `reply` and, when it is valid, a descriptor. False when the peer is gone or does not read.
bool send_reply(int connection, Reply reply, int fd) {
  iovec part{&reply, sizeof(reply)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &fd, sizeof(int));
  }
  return ::sendmsg(connection, &message, MSG_NOSIGNAL | MSG_DONTWAIT) == ssize_t(sizeof(reply));
}

} // namespace

Service::Service(const Nonce &nonce, Handler handler)
    : nonce_(nonce), handler_(std::move(handler)), address_(random_name()) {
  listener_ = Fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener_) fail("service socket: " + reason());
  sockaddr_un address;
  const socklen_t size = abstract_address(address_, &address);
  if (::bind(listener_.get(), reinterpret_cast<sockaddr *>(&address), size) != 0) fail("bind: " + reason());
  if (::listen(listener_.get(), 128) != 0) fail("listen: " + reason());
  stop_ = Fd(::eventfd(0, EFD_CLOEXEC));
  if (!stop_) fail("eventfd: " + reason());

  // Signals belong to Python's threads: block them while the thread is made, so that it inherits the mask.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { serve(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Service::~Service() {
  const uint64_t one = 1;
  if (::write(stop_.get(), &one, sizeof(one)) == ssize_t(sizeof(one))) thread_.join();
  else thread_.detach();
}

void Service::serve() {
  std::vector<Fd> connections;
  for (;;) {
    std::vector<pollfd> polls{{stop_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
    for (const Fd &c : connections) polls.push_back({c.get(), POLLIN, 0});
    if (::poll(polls.data(), polls.size(), -1) < 0) {
      if (errno == EINTR) continue;
      return;
    }
    if (polls[0].revents != 0) return;
    std::vector<Fd> kept;
    for (size_t i = 0; i < connections.size(); ++i) {
      if (polls[i + 2].revents == 0 || answer_one(connections[i].get())) kept.push_back(std::move(connections[i]));
    }
    connections = std::move(kept);
    if (polls[1].revents != 0) {
      Fd c(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (c && is_same_user(c.get()) && connections.size() < kMaxConnections) connections.push_back(std::move(c));
    }
  }
}

bool Service::answer_one(int connection) {
  Request request;
  iovec part{&request, sizeof(request)};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1; // no room for descriptors: the kernel drops any that come
  const ssize_t n = ::recvmsg(connection, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (n < 0) return errno == EAGAIN || errno == EINTR;
  if (n != ssize_t(sizeof(request)) || (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) return false;
  if (!is_equal(request.nonce, nonce_) || request.magic != kMagic) return false;

  Reply reply;
  reply.magic = kMagic;
  reply.protocol = kProtocol;
  Answer answer;
  if (request.protocol != uint32_t(kProtocol)) {
    answer.status = Status::kError;
    answer.text = "protocol " + std::to_string(request.protocol) + " asked, this process speaks " +
                  std::to_string(kProtocol) + "; install one jax_ep everywhere";
  } else if (::memchr(request.key, 0, sizeof(request.key)) == nullptr) {
    return false;
  } else {
    try {
      answer = handler_(request);
    } catch (const std::exception &e) {
      answer.status = Status::kError;
      answer.text = e.what();
    }
  }
  reply.status = uint32_t(answer.status);
  reply.bytes = answer.bytes;
  set_text(&reply, answer.text);
  return send_reply(connection, reply, answer.status == Status::kOk ? answer.fd.get() : -1);
}

Client::Client(const std::string &address, const Nonce &nonce, Deadline deadline) : address_(address), nonce_(nonce) {
  sockaddr_un target;
  const socklen_t size = abstract_address(address, &target);
  for (;;) {
    socket_ = Fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket_) fail("client socket: " + reason());
    if (::connect(socket_.get(), reinterpret_cast<sockaddr *>(&target), size) == 0) break;
    if (errno != EAGAIN && errno != EINTR) { // EAGAIN: the listener's queue is full
      fail("no connection to the peer's service " + address + ": " + reason() +
           " (the process ended, or runs in another network namespace)");
    }
    if (Clock::now() > deadline) fail_timeout("no connection to the peer's service " + address);
    ::poll(nullptr, 0, 2);
  }
  if (!is_same_user(socket_.get())) fail("the service " + address + " belongs to another user");
}

Answer Client::call(Request request, Deadline deadline) {
  request.nonce = nonce_;
  request.magic = kMagic;
  request.protocol = kProtocol;
  if (::send(socket_.get(), &request, sizeof(request), MSG_NOSIGNAL) != ssize_t(sizeof(request))) {
    fail("no request to the peer's service " + address_ + ": " + reason());
  }
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd one{socket_.get(), POLLIN, 0};
    const int ready = ::poll(&one, 1, int(std::clamp<long long>(left, 0, 60000)));
    if (ready > 0) break;
    if (ready < 0 && errno != EINTR) fail("poll: " + reason());
    if (Clock::now() > deadline) fail_timeout("no answer from the peer's service " + address_);
  }
  Reply reply;
  iovec part{&reply, sizeof(reply)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t n = ::recvmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  Answer answer;
  for (cmsghdr *h = CMSG_FIRSTHDR(&message); n > 0 && h != nullptr; h = CMSG_NXTHDR(&message, h)) {
    if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS || h->cmsg_len != CMSG_LEN(sizeof(int))) continue;
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(h), sizeof(int));
    answer.fd = Fd(fd); // taken first: whatever fails below, it is closed
  }
  if (n <= 0) fail("the peer's service " + address_ + " refused the request (is it of the same job?)");
  if (n != ssize_t(sizeof(reply)) || (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0 || reply.magic != kMagic) {
    fail("truncated or foreign reply from the peer's service " + address_);
  }
  reply.text[sizeof(reply.text) - 1] = 0;
  if (Status(reply.status) == Status::kError) fail(std::string("the peer says: ") + reply.text);
  if (reply.protocol != uint32_t(kProtocol)) fail("the peer speaks protocol " + std::to_string(reply.protocol));
  answer.status = Status(reply.status);
  answer.bytes = reply.bytes;
  if (answer.status == Status::kOk && (!answer.fd || answer.bytes <= 0)) fail("the peer sent no descriptor");
  return answer;
}

} // namespace jax_ep
