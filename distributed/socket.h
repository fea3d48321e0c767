// Sockets: the few calls on TCP sockets that the store and the rendezvous need, with deadlines and
// with errors that name the address.
#pragma once
#include <sys/socket.h>

#include <chrono>
#include <string>
#include <vector>

#include "distributed/fd.h"

namespace sherd::dist {

// An address that a name stands for, as numbers.
struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;

  bool is_loopback() const;
  std::string host() const;  // "127.0.0.1", "fe80::1"
  int port() const;
  std::string to_string() const;  // "127.0.0.1:29500", "[::1]:29500"
};

using Socket = Fd;

// What a name means, IPv4 first. Error if it means nothing: `purpose` says whose name it is
// ("MASTER_ADDR").
std::vector<SocketAddress> resolve(const std::string& host, int port, const char* purpose);
// Listens; port 0: any free one. Error names address and port.
Socket listen_on(const SocketAddress& address);
SocketAddress address_of(const Socket& socket);  // its own end
// The address of this machine's interface from which `to` is reached.
SocketAddress local_address_towards(const SocketAddress& to);
// Is it of a network that one of this machine's interfaces is on, or the machine's own?
bool is_neighbour(const SocketAddress& peer);
bool is_own(const SocketAddress& address);  // of one of this machine's interfaces
// A connection, or none (and errno says why). Waits until the deadline at most.
Socket connect_to(const SocketAddress& address, std::chrono::steady_clock::time_point deadline);
// All bytes, or false: the peer closed, an error, or the deadline passed.
bool send_all(const Socket& socket, const std::string& bytes);
bool receive_all(const Socket& socket, char* to, size_t n,
                 std::chrono::steady_clock::time_point deadline);

}  // namespace sherd::dist
