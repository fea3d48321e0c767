#include "distributed/launcher/node.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sched.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <string_view>
#include <thread>

#include "core/error.h"
#include "distributed/socket.h"

namespace sherd::dist {
namespace {

// Low numbers are what a shell script between the launcher and rank 0 redirects.
constexpr int kLowestStoreFd = 64;

// Returns -1 with errno.
int listen_on(const sockaddr* address, socklen_t length, int family, int port) {
  const int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  const int on = 1, off = 0;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  sockaddr_storage bound{};
  memcpy(&bound, address, length);
  if (family == AF_INET6) {
    setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port = htons(static_cast<uint16_t>(port));
  } else {
    reinterpret_cast<sockaddr_in*>(&bound)->sin_port = htons(static_cast<uint16_t>(port));
  }
  if (bind(fd, reinterpret_cast<sockaddr*>(&bound), length) == 0 && listen(fd, SOMAXCONN) == 0) {
    return fd;
  }
  const int error = errno;
  close(fd);
  errno = error;
  return -1;
}

int port_of(int fd) {
  sockaddr_storage bound{};
  socklen_t length = sizeof bound;
  getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &length);
  return ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                                           : reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
}

int listen_on_all(int port) {
  sockaddr_in6 any6{};
  any6.sin6_family = AF_INET6;
  any6.sin6_addr = in6addr_any;
  const int fd = listen_on(reinterpret_cast<sockaddr*>(&any6), sizeof any6, AF_INET6, port);
  if (fd >= 0 || errno == EADDRINUSE || errno == EACCES) return fd;
  sockaddr_in any4{};  // a kernel without IPv6
  any4.sin_family = AF_INET;
  return listen_on(reinterpret_cast<sockaddr*>(&any4), sizeof any4, AF_INET, port);
}

int listen_on_name(const std::string& name, int port) {
  int fd = -1, error = 0;
  for (const SocketAddress& a : resolve(name, port, "master_addr")) {
    fd = listen_on(reinterpret_cast<const sockaddr*>(&a.storage), a.length, a.storage.ss_family,
                   port);
    error = errno;
    if (fd >= 0 || error == EADDRINUSE) break;
  }
  errno = error;
  return fd;
}

}  // namespace

int core_count() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));  // over 1024 cores
}

int accelerator_count() {
  int devices = 0;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/dev", error)) {
    const std::string name = entry.path().filename();
    const std::string_view prefix = "nvidia";
    devices += name.size() > prefix.size() && name.starts_with(prefix) &&
               std::all_of(name.begin() + prefix.size(), name.end(),
                           [](unsigned char c) { return std::isdigit(c); });
  }
  if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES")) {
    const std::string_view list = visible;
    if (list.empty() || list == "-1" || list == "NoDevFiles") return 0;
    devices = std::min(devices, 1 + static_cast<int>(std::count(list.begin(), list.end(), ',')));
  }
  return devices;
}

std::string host_name() {
  char name[256] = "";
  gethostname(name, sizeof name - 1);
  return name;
}

StoreSocket listen_if_free(const std::string& address, int port) {
  Fd fd(address.empty() ? listen_on_all(port) : listen_on_name(address, port));
  if (fd.fd() < 0) {
    const int error = errno;
    switch (error) {
      case EADDRINUSE:
        return {Fd(), port};
      case EADDRNOTAVAIL:
        fail("[launch] master_addr ", address,
             " is not an address of this machine; it is where rank 0 runs");
      default:
        fail("[launch] cannot listen on port ", port, address.empty() ? "" : " on ", address, ": ",
             strerror(error));
    }
  }
  if (const int high = fcntl(fd.fd(), F_DUPFD_CLOEXEC, kLowestStoreFd); high >= 0) fd = Fd(high);
  const int bound = port_of(fd.fd());
  return {std::move(fd), bound};
}

StoreSocket listen_for_store(const std::string& address, int port) {
  StoreSocket store = listen_if_free(address, port);
  if (store.fd.fd() < 0)
    fail("[launch] port ", port, address.empty() ? "" : " on ", address,
         " is in use: give another master_port, or none (on one node), which takes a free one");
  return store;
}

}  // namespace sherd::dist
