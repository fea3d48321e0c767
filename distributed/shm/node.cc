#include "distributed/shm/node.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <sstream>

#include "core/context.h"
#include "core/error.h"
#include "distributed/deadline.h"
#include "distributed/exchange_texts.h"
#include "distributed/store_token.h"

namespace sherd::dist {
namespace {

using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;

struct Hello {  // travels beside an arena's descriptor
  char token[33] = {};
  int32_t rank = -1;
};

// A Context has one arena for all its life: tensors outlive their process group.
struct OwnArena {
  std::mutex mutex;
  std::shared_ptr<Arena> arena;
};

std::shared_ptr<Arena> own_arena() {
  auto& own = Context::current().state<OwnArena>();
  std::lock_guard lock(own.mutex);
  if (!own.arena) own.arena = std::make_shared<Arena>();
  return own.arena;
}

struct Address {
  sockaddr_un name{};
  socklen_t length = sizeof(sa_family_t);
};

Address address_named(const std::string& name) {
  Address a;
  a.name.sun_family = AF_UNIX;
  const size_t n = std::min(name.size(), sizeof a.name.sun_path - 1);
  std::memcpy(a.name.sun_path + 1, name.data(), n);  // after a zero: the abstract namespace
  a.length = socklen_t(offsetof(sockaddr_un, sun_path) + 1 + n);
  return a;
}

const sockaddr* raw(const Address& a) { return reinterpret_cast<const sockaddr*>(&a.name); }

// Under a free name that the system chose, which is returned too.
std::pair<Socket, std::string> listen_unnamed() {
  Socket s(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  Address a;
  a.name.sun_family = AF_UNIX;
  if (s.fd() < 0 || bind(s.fd(), raw(a), a.length) != 0 || listen(s.fd(), SOMAXCONN) != 0)
    fail("[shm] cannot listen on a unix socket: ", std::strerror(errno));
  a.length = sizeof a.name;
  getsockname(s.fd(), reinterpret_cast<sockaddr*>(&a.name), &a.length);
  return {std::move(s),
          std::string(a.name.sun_path + 1, a.length - offsetof(sockaddr_un, sun_path) - 1)};
}

bool is_of_this_user(const Socket& s) {
  ucred peer{};
  socklen_t length = sizeof peer;
  return getsockopt(s.fd(), SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == geteuid();
}

union Control {  // aligned for a cmsghdr
  char bytes[CMSG_SPACE(sizeof(int))];
  cmsghdr header;
};

bool send_hello(const Socket& s, const Hello& hello, int fd) {
  iovec data{const_cast<Hello*>(&hello), sizeof hello};
  Control control{};
  msghdr message{};
  message.msg_iov = &data, message.msg_iovlen = 1;
  message.msg_control = control.bytes, message.msg_controllen = sizeof control.bytes;
  cmsghdr* c = CMSG_FIRSTHDR(&message);
  c->cmsg_level = SOL_SOCKET, c->cmsg_type = SCM_RIGHTS, c->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(c), &fd, sizeof fd);
  return sendmsg(s.fd(), &message, MSG_NOSIGNAL) == ssize_t(sizeof hello);
}

bool wait_readable(int fd, TimePoint deadline) {
  const auto left = std::chrono::ceil<Milliseconds>(deadline - Clock::now()).count();
  pollfd p{fd, POLLIN, 0};
  return poll(&p, 1, int(std::clamp<int64_t>(left, 0, 1 << 30))) > 0;
}

// A hello and the descriptor that came with it; none: nothing came, or something else.
Fd receive_hello(const Socket& s, Hello& hello, TimePoint deadline) {
  if (!wait_readable(s.fd(), deadline)) return Fd();
  iovec data{&hello, sizeof hello};
  Control control{};
  msghdr message{};
  message.msg_iov = &data, message.msg_iovlen = 1;
  message.msg_control = control.bytes, message.msg_controllen = sizeof control.bytes;
  const ssize_t n = recvmsg(s.fd(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  const cmsghdr* c = n > 0 ? CMSG_FIRSTHDR(&message) : nullptr;
  if (!c || c->cmsg_type != SCM_RIGHTS) return Fd();
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(c), sizeof fd);
  Fd file(fd);
  if (n != ssize_t(sizeof hello)) return Fd();
  return file;
}

}  // namespace

std::string boot_id() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return boot;
}

std::string host_id() {
  const std::string boot = boot_id();
  if (boot.empty()) fail("[shm] the running kernel has no readable boot_id, by which hosts differ");
  std::string id = boot;
  for (const char* ns : {"/proc/self/ns/net", "/proc/self/ns/pid"}) {
    struct stat s {};
    if (stat(ns, &s) == 0) id += concat("-", s.st_ino);
  }
  return concat(id, "-", geteuid());
}

// What a rank says of itself in the store. No host: its memory cannot be shared.
struct Node::Announcement {
  std::string host = "-", socket = "-", token = "-";
};

std::shared_ptr<Node> Node::meet(Store& store, int rank, int world_size, Milliseconds timeout) {
  auto node = std::make_shared<Node>();
  node->rank_ = rank;
  Announcement mine;
  Socket listener;
  try {
    node->arena_ = own_arena();
    std::tie(listener, mine.socket) = listen_unnamed();
    mine.token = make_token();
    mine.host = host_id();
  } catch (const Error& e) {
    node->why_not_ = e.what();
  }
  Party party{.rank = rank, .timeout = timeout};
  for (int r = 0; r < world_size; ++r) party.ranks.push_back(r);
  const std::vector<std::string> texts =
      exchange_texts(store, "node", concat(mine.host, " ", mine.socket, " ", mine.token), party);
  std::vector<Announcement> all(world_size);
  for (int r = 0; r < world_size; ++r) {
    std::istringstream(texts[r]) >> all[r].host >> all[r].socket >> all[r].token;
    node->hosts_.push_back(all[r].host == "-" ? "" : all[r].host);
    if (r == rank || (mine.host != "-" && all[r].host == mine.host)) node->ranks_.push_back(r);
  }
  if (node->ranks_.size() == 1) return node;
  node->connect(all, listener, timeout);
  set_block_source(Context::current(), node->arena_);
  node->wake_ = Fd(eventfd(0, EFD_CLOEXEC));
  node->thread_ = std::thread([n = node.get()] { n->watch(); });
  return node;
}

Node::~Node() {
  if (!thread_.joinable()) return;
  const uint64_t one = 1;
  if (write(wake_.fd(), &one, sizeof one) < 0) return;  // cannot fail: its counter is 0
  thread_.join();
}

// All ranks connect to those below them before they answer those above: a connection is accepted
// by the system, so nobody waits in a circle.
void Node::connect(const std::vector<Announcement>& all, const Socket& listener,
                   Milliseconds timeout) {
  const auto deadline = deadline_after(timeout);
  const int fd = arena_->fd();
  std::map<int, Socket> below;
  for (int r : ranks_) {
    if (r >= rank_) continue;
    Socket s(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const Address a = address_named(all[r].socket);
    Hello hello{{}, rank_};
    all[r].token.copy(hello.token, sizeof hello.token - 1);
    if (::connect(s.fd(), raw(a), a.length) != 0)
      fail("[shm] rank ", rank_, " cannot reach rank ", r, " on this host: ", std::strerror(errno));
    if (!is_of_this_user(s))
      fail("[shm] rank ", r, "'s socket on this host belongs to another user");
    if (!send_hello(s, hello, fd))
      fail("[shm] rank ", rank_, " cannot reach rank ", r, " on this host: ", std::strerror(errno));
    below[r] = std::move(s);
  }
  const auto above = ranks_.end() - std::upper_bound(ranks_.begin(), ranks_.end(), rank_);
  while (int64_t(peers_.size()) < above) {
    if (!wait_readable(listener.fd(), deadline)) {
      std::string missing;
      for (int r : ranks_)
        if (r > rank_ && !peers_.count(r)) missing += concat(missing.empty() ? "" : ", ", r);
      fail("[shm] rank ", rank_, " waited ", timeout.count(),
           " ms for the others to come: missing are ranks ", missing);
    }
    Socket s(accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC));
    if (s.fd() < 0 && errno != EAGAIN && errno != EINTR && errno != ECONNABORTED)
      fail("[shm] cannot accept a connection: ", std::strerror(errno));
    if (s.fd() < 0 || !is_of_this_user(s)) continue;
    Hello hello;
    Fd file = receive_hello(s, hello, std::min(deadline, Clock::now() + Milliseconds(2000)));
    hello.token[sizeof hello.token - 1] = 0;
    if (!file || all[rank_].token != hello.token || !has(hello.rank) || hello.rank <= rank_ ||
        peers_.count(hello.rank) || !send_hello(s, {{}, rank_}, fd))
      continue;  // a stranger
    peers_[hello.rank] = std::make_unique<Peer>(std::move(s), std::move(file), &pages_);
  }
  for (auto& [r, s] : below) {
    Hello hello;
    Fd file = receive_hello(s, hello, deadline);
    if (!file || hello.rank != r)
      fail("[shm] rank ", rank_, " waited ", timeout.count(),
           " ms for the others to come: missing are ranks ", r);
    peers_[r] = std::make_unique<Peer>(std::move(s), std::move(file), &pages_);
  }
}

void Node::watch() {
  std::vector<int> ranks;
  std::vector<pollfd> fds{{wake_.fd(), POLLIN, 0}};
  for (auto& [r, peer] : peers_) {
    ranks.push_back(r);
    fds.push_back({peer->socket.fd(), POLLIN | POLLRDHUP, 0});
  }
  for (;;) {
    if (poll(fds.data(), fds.size(), -1) < 0) continue;
    if (fds[0].revents) return;
    std::lock_guard lock(mutex_);
    for (size_t i = 1; i < fds.size(); ++i) {
      if (!fds[i].revents) continue;
      fds[i].fd = -1;
      peers_.at(ranks[i - 1])->lost = true;
      for (Listener* l : listeners_) l->on_lost(ranks[i - 1]);
    }
  }
}

bool Node::has(int rank) const { return std::binary_search(ranks_.begin(), ranks_.end(), rank); }

int Node::ranks_per_host(const std::vector<int>& ranks) const {
  std::vector<std::string> seen;
  size_t width = 0;
  for (size_t first = 0; first < ranks.size();) {
    const std::string& host = hosts_[ranks[first]];
    size_t end = first;
    while (end < ranks.size() && hosts_[ranks[end]] == host) ++end;
    if (first == 0) width = end;
    if (host.empty() || end - first != width || !std::has_single_bit(width) || width < 2 ||
        std::count(seen.begin(), seen.end(), host) > 0)
      return 0;
    seen.push_back(host);
    first = end;
  }
  return seen.size() > 1 ? int(width) : 0;
}

bool Node::share_memory(const std::vector<int>& ranks) const {
  return !hosts_[ranks[0]].empty() && std::all_of(ranks.begin(), ranks.end(), [&](int r) {
    return hosts_[r] == hosts_[ranks[0]];
  });
}

char* Node::at(int rank, const Place& place, int64_t bytes, bool stays) {
  return peers_.at(rank)->view.at(place, bytes, stays);
}

void Node::forget(int rank, const Place& place) { peers_.at(rank)->view.forget(place); }

void Node::trim() {
  constexpr int64_t kMost = 8000;  // of the 65,530 mappings that Linux allows a process
  int64_t mapped = 0;
  for (auto& [rank, peer] : peers_) mapped += peer->view.mapped();
  if (mapped <= kMost) return;
  if (std::unique_lock alone(reads_, std::try_to_lock); alone)
    for (auto& [rank, peer] : peers_) peer->view.forget_most();
}

bool Node::is_lost(int rank) const { return peers_.at(rank)->lost; }

void Node::add(Listener* listener) {
  std::lock_guard lock(mutex_);
  listeners_.push_back(listener);
}
void Node::remove(Listener* listener) {
  std::lock_guard lock(mutex_);
  std::erase(listeners_, listener);
}

}  // namespace sherd::dist
