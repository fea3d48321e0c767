#include "distributed/socket.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/error.h"

namespace sherd::dist {
namespace {

using Clock = std::chrono::steady_clock;

const sockaddr* raw(const SocketAddress& a) {
  return reinterpret_cast<const sockaddr*>(&a.storage);
}

// False when the deadline has passed.
bool wait_for(int fd, short events, Clock::time_point deadline) {
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    if (left.count() <= 0) return false;
    pollfd p{fd, events, 0};
    const int n = poll(&p, 1, int(std::min<int64_t>(left.count(), 1 << 30)));
    if (n > 0) return true;
    if (n < 0 && errno != EINTR) return false;
  }
}

// The address's bytes; those of IPv4 also where they come in an IPv6 socket's clothes.
std::string address_bytes(const sockaddr* a) {
  if (a->sa_family == AF_INET)
    return std::string(
        reinterpret_cast<const char*>(&reinterpret_cast<const sockaddr_in*>(a)->sin_addr), 4);
  if (a->sa_family != AF_INET6) return "";
  const in6_addr& v6 = reinterpret_cast<const sockaddr_in6*>(a)->sin6_addr;
  const std::string bytes(reinterpret_cast<const char*>(&v6), 16);
  return IN6_IS_ADDR_V4MAPPED(&v6) ? bytes.substr(12) : bytes;
}

// Does it agree with an interface's address, whole or where the netmask has ones?
bool matches_interface(const SocketAddress& address, bool whole) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return false;
  const std::string peer = address_bytes(raw(address));
  bool found = false;
  for (ifaddrs* i = list; i && !found; i = i->ifa_next) {
    if (!i->ifa_addr || !i->ifa_netmask) continue;
    const std::string own = address_bytes(i->ifa_addr);
    const std::string mask =
        whole ? std::string(own.size(), '\xff') : address_bytes(i->ifa_netmask);
    if (own.empty() || own.size() != peer.size() || mask.size() != own.size()) continue;
    found = true;
    for (size_t b = 0; b < own.size(); ++b) found &= ((own[b] ^ peer[b]) & mask[b]) == 0;
  }
  freeifaddrs(list);
  return found;
}

}  // namespace

bool is_neighbour(const SocketAddress& peer) {
  return peer.is_loopback() || matches_interface(peer, false);
}
bool is_own(const SocketAddress& address) {
  return address.is_loopback() || matches_interface(address, true);
}

bool SocketAddress::is_loopback() const {
  if (storage.ss_family == AF_INET)
    return ntohl(reinterpret_cast<const sockaddr_in&>(storage).sin_addr.s_addr) >> 24 == 127;
  const auto& v6 = reinterpret_cast<const sockaddr_in6&>(storage).sin6_addr;
  return IN6_IS_ADDR_LOOPBACK(&v6) || (IN6_IS_ADDR_V4MAPPED(&v6) && v6.s6_addr[12] == 127);
}

std::string SocketAddress::host() const {
  char text[NI_MAXHOST] = "?";
  getnameinfo(raw(*this), length, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
  return text;
}

int SocketAddress::port() const {
  return ntohs(storage.ss_family == AF_INET
                   ? reinterpret_cast<const sockaddr_in&>(storage).sin_port
                   : reinterpret_cast<const sockaddr_in6&>(storage).sin6_port);
}

std::string SocketAddress::to_string() const {
  return storage.ss_family == AF_INET ? concat(host(), ":", port())
                                      : concat("[", host(), "]:", port());
}

std::vector<SocketAddress> resolve(const std::string& host, int port, const char* purpose) {
  addrinfo hints{}, *list = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  const std::string service = std::to_string(port);
  int rc = getaddrinfo(host.c_str(), service.c_str(), &hints, &list);
  // A small container may have no /etc/hosts, and RFC 6761 has no other answer.
  if (rc != 0 && host == "localhost") rc = getaddrinfo("127.0.0.1", service.c_str(), &hints, &list);
  if (rc != 0)
    fail("[rendezvous] ", purpose, " '", host, "' is no address and no known host name (",
         gai_strerror(rc), ")");
  std::vector<SocketAddress> found;
  for (addrinfo* p = list; p; p = p->ai_next) {
    SocketAddress a;
    std::memcpy(&a.storage, p->ai_addr, p->ai_addrlen);
    a.length = p->ai_addrlen;
    found.push_back(a);
  }
  freeaddrinfo(list);
  std::stable_partition(found.begin(), found.end(),
                        [](const SocketAddress& a) { return a.storage.ss_family == AF_INET; });
  return found;
}

Socket listen_on(const SocketAddress& address) {
  Socket s(socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  if (s) setsockopt(s.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (!s || bind(s.fd(), raw(address), address.length) != 0 || listen(s.fd(), 1024) != 0) {
    const int why = errno;
    fail("[rendezvous] cannot listen on ", address.to_string(), ": ", std::strerror(why),
         why == EADDRINUSE ? ". The port is in use, by another job perhaps: choose another "
                             "--master_port (MASTER_PORT)"
                           : "");
  }
  return s;
}

SocketAddress address_of(const Socket& socket) {
  SocketAddress a;
  a.length = sizeof a.storage;
  getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&a.storage), &a.length);
  return a;
}

SocketAddress local_address_towards(const SocketAddress& to) {
  // Connecting a datagram socket sends nothing; it only picks the route.
  Socket s(socket(to.storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!s || connect(s.fd(), raw(to), to.length) != 0)
    fail("[rendezvous] this machine has no way to ", to.host(), ": ", std::strerror(errno));
  return address_of(s);
}

Socket connect_to(const SocketAddress& address, Clock::time_point deadline) {
  Socket s(socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!s) return s;
  if (connect(s.fd(), raw(address), address.length) != 0) {
    if (errno != EINPROGRESS) return Socket();
    if (!wait_for(s.fd(), POLLOUT, deadline)) {
      errno = ETIMEDOUT;
      return Socket();
    }
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(s.fd(), SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) {
      errno = error;
      return Socket();
    }
  }
  const int on = 1;
  setsockopt(s.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  return s;
}

bool send_all(const Socket& socket, const std::string& bytes) {
  size_t at = 0;
  while (at < bytes.size()) {
    const ssize_t n = send(socket.fd(), bytes.data() + at, bytes.size() - at, MSG_NOSIGNAL);
    if (n > 0)
      at += n;
    else if (errno == EAGAIN
                 ? !wait_for(socket.fd(), POLLOUT, Clock::now() + std::chrono::seconds(30))
                 : errno != EINTR)
      return false;
  }
  return true;
}

bool receive_all(const Socket& socket, char* to, size_t n, Clock::time_point deadline) {
  size_t at = 0;
  while (at < n) {
    const ssize_t got = recv(socket.fd(), to + at, n - at, MSG_DONTWAIT);
    if (got > 0)
      at += got;
    else if (got == 0)
      return false;
    else if (errno == EAGAIN ? !wait_for(socket.fd(), POLLIN, deadline) : errno != EINTR)
      return false;
  }
  return true;
}

}  // namespace sherd::dist
