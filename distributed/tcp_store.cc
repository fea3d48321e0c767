#include "distributed/tcp_store.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <list>
#include <thread>
#include <utility>

#include "distributed/deadline.h"
#include "distributed/store_token.h"

namespace sherd::dist {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::string_view kMagic = "SHERDST2";
constexpr size_t kHelloBytes = 8 + kNonceBytes, kMaxFrame = 64 << 20;
constexpr char kWelcome = 'Y', kRefused = 'N';

// [Note: strangers]
constexpr auto kGreetingTime = std::chrono::seconds(10);
constexpr size_t kMaxGreeting = 256;

enum class What : uint8_t { kSet, kGet, kAdd, kCompareSet, kCheck, kWait, kDelete, kNumKeys };
enum class How : uint8_t { kDone, kTimeout, kError };

// Numbers and strings, one after another.
class Writer {
 public:
  explicit Writer(uint8_t first) { bytes_.push_back(char(first)); }
  Writer& number(int64_t x) {
    bytes_.append(reinterpret_cast<const char*>(&x), sizeof x);
    return *this;
  }
  Writer& text(const std::string& s) {
    number(int64_t(s.size()));
    bytes_ += s;
    return *this;
  }
  Writer& texts(const std::vector<std::string>& list) {
    number(int64_t(list.size()));
    for (const auto& s : list) text(s);
    return *this;
  }
  std::string frame() const {  // the length, and what was written
    const auto n = uint32_t(bytes_.size());
    return std::string(reinterpret_cast<const char*>(&n), sizeof n) + bytes_;
  }

 private:
  std::string bytes_;
};

// Throws where the bytes do not hold what is asked for.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}
  uint8_t byte() { return uint8_t(take(1)[0]); }
  int64_t number() {
    int64_t x;
    std::memcpy(&x, take(sizeof x).data(), sizeof x);
    return x;
  }
  std::string text() { return std::string(take(number())); }
  std::vector<std::string> texts() {
    std::vector<std::string> list;
    for (int64_t n = number(); n > 0; --n) list.push_back(text());
    return list;
  }

 private:
  std::string_view take(int64_t n) {
    if (n < 0 || n > int64_t(bytes_.size())) fail("[tcp_store] a message ends too early");
    const auto taken = bytes_.substr(0, n);
    bytes_.remove_prefix(n);
    return taken;
  }
  std::string_view bytes_;
};

std::string answer(How how, const std::string& text = "") {
  return Writer(uint8_t(how)).text(text).frame();
}

}  // namespace

// One thread serves all clients.
class TcpStoreServer::Loop {
 public:
  Loop(Socket listener, std::string token)
      : listener_(std::move(listener)),
        token_(std::move(token)),
        neighbours_only_(token_.empty() && !address_of(listener_).is_loopback()),
        wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    fcntl(listener_.fd(), F_SETFL, fcntl(listener_.fd(), F_GETFL) | O_NONBLOCK);
    thread_ = std::thread([this] { run(); });
  }
  ~Loop() {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = write(wake_.fd(), &one, sizeof one);
    thread_.join();
  }
  int port() const { return address_of(listener_).port(); }

 private:
  struct Client {
    Socket socket;
    Clock::time_point since;
    std::string in, out;
    std::string expected_proof = {}, own_proof = {};  // after its hello
    bool greeted = false, gone = false;
    bool refused = false;  // gone once it was told
    // A request that waits for keys.
    std::vector<std::string> missing;
    Clock::time_point deadline;
    bool waiting = false, wants_value = false;
    std::string key;
  };

  void run() {
    for (;;) {
      std::vector<pollfd> fds{{wake_.fd(), POLLIN, 0}, {listener_.fd(), POLLIN, 0}};
      auto next = Clock::time_point::max();
      if (is_full_) {  // no descriptor was left for the next connection
        fds[1].fd = -1;
        next = Clock::now() + Milliseconds(100);
        is_full_ = false;
      }
      for (Client& c : clients_) {
        fds.push_back({c.socket.fd(), short(POLLIN | (c.out.empty() ? 0 : POLLOUT)), 0});
        if (c.waiting) next = std::min(next, c.deadline);
        if (!c.greeted) next = std::min(next, c.since + kGreetingTime);
      }
      int patience = -1;
      if (next != Clock::time_point::max()) {
        const auto left = std::chrono::ceil<Milliseconds>(next - Clock::now()).count();
        patience = int(std::clamp<int64_t>(left, 0, 1 << 30));
      }
      poll(fds.data(), fds.size(), patience);
      if (fds[0].revents) return;
      auto fd = fds.begin() + 2;
      for (Client& c : clients_) {
        if (fd->revents & (POLLIN | POLLHUP | POLLERR)) receive(c);
        ++fd;
      }
      if (fds[1].revents) accept_all();
      settle_waits();
      for (Client& c : clients_) {
        flush(c);
        if (!c.greeted && Clock::now() >= c.since + kGreetingTime) c.gone = true;
      }
      clients_.remove_if([](const Client& c) { return c.gone; });
    }
  }

  void accept_all() {
    for (;;) {
      SocketAddress peer;
      peer.length = sizeof peer.storage;
      Socket s(accept4(listener_.fd(), reinterpret_cast<sockaddr*>(&peer.storage), &peer.length,
                       SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!s) {
        is_full_ = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
        if (is_full_) drop_oldest_stranger();
        return;
      }
      if (neighbours_only_ && !is_neighbour(peer)) continue;
      const auto strangers = std::count_if(clients_.begin(), clients_.end(),
                                           [](const Client& c) { return !c.greeted && !c.gone; });
      if (size_t(strangers) >= kMaxGreeting) drop_oldest_stranger();
      Client& c = clients_.emplace_back();
      c.socket = std::move(s);
      c.since = Clock::now();
    }
  }

  void drop_oldest_stranger() {  // clients_ are in order of arrival
    for (Client& c : clients_) {
      if (c.greeted || c.gone) continue;
      c.gone = true;
      return;
    }
  }

  void receive(Client& c) {
    char block[1 << 16];
    const size_t most = c.greeted ? sizeof block : 2 * kHelloBytes;
    for (;;) {
      const ssize_t n = recv(c.socket.fd(), block, most, 0);
      if (n > 0) {
        c.in.append(block, n);
        if (c.in.size() > 2 * kMaxFrame) c.gone = true;
        if (size_t(n) == sizeof block && !c.gone) continue;
      } else if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
        c.gone = true;
      }
      break;
    }
    parse(c);
  }

  // The hello, then the proof; see [Note: store protocol].
  void greet(Client& c) {
    if (c.expected_proof.empty()) {
      const size_t n = std::min(kMagic.size(), c.in.size());
      if (c.in.compare(0, n, kMagic.substr(0, n)) != 0) c.gone = true;
      if (c.gone || c.in.size() < kHelloBytes) return;
      const std::string theirs = c.in.substr(kMagic.size(), kNonceBytes), ours = make_nonce();
      c.in.erase(0, kHelloBytes);
      c.out.append(kMagic).append(ours);
      c.expected_proof = proof_of(token_, "client", theirs, ours);
      c.own_proof = proof_of(token_, "server", theirs, ours);
    }
    if (c.in.size() < kProofBytes) return;
    c.greeted = same_proof(std::string_view(c.in).substr(0, kProofBytes), c.expected_proof);
    c.refused = !c.greeted;
    c.in.erase(0, kProofBytes);
    c.out += c.greeted ? kWelcome + c.own_proof : std::string(1, kRefused);
  }

  void parse(Client& c) {
    if (c.refused) c.in.clear();
    if (!c.greeted && !c.refused && !c.gone) greet(c);
    if (!c.greeted) return;
    while (!c.gone && !c.waiting && c.in.size() >= sizeof(uint32_t)) {
      uint32_t n;
      std::memcpy(&n, c.in.data(), sizeof n);
      if (n > kMaxFrame) c.gone = true;
      if (c.gone || c.in.size() < sizeof n + n) return;
      const std::string frame = c.in.substr(sizeof n, n);
      c.in.erase(0, sizeof n + n);
      try {
        serve(c, Reader(frame));
      } catch (const Error&) {  // garbage
        c.gone = true;
      }
    }
  }

  void serve(Client& c, Reader r) {
    const auto what = What(r.byte());
    switch (what) {
      case What::kSet: {
        const std::string key = r.text();
        values_.set(key, r.text());
        c.out += answer(How::kDone);
        break;
      }
      case What::kAdd: {
        const std::string key = r.text();
        const int64_t amount = r.number();
        try {
          c.out += answer(How::kDone, std::to_string(values_.add(key, amount)));
        } catch (const Error& e) {
          c.out += answer(How::kError, e.what());
        }
        break;
      }
      case What::kCompareSet: {
        const std::string key = r.text(), expected = r.text();
        c.out += answer(How::kDone, values_.compare_set(key, expected, r.text()));
        break;
      }
      case What::kCheck:
        c.out += answer(How::kDone, values_.check(r.texts()) ? "1" : "0");
        break;
      case What::kDelete:
        c.out += answer(How::kDone, values_.delete_key(r.text()) ? "1" : "0");
        break;
      case What::kNumKeys:
        c.out += answer(How::kDone, std::to_string(values_.num_keys()));
        break;
      case What::kGet:
      case What::kWait:
        c.missing = r.texts();
        c.deadline = Clock::now() + Milliseconds(std::clamp<int64_t>(r.number(), 0, 1LL << 40));
        c.wants_value = what == What::kGet;
        if (c.wants_value && c.missing.size() != 1) fail("[tcp_store] get of no single key");
        if (c.wants_value) c.key = c.missing[0];
        c.waiting = true;
        settle(c);
        break;
      default:
        fail("[tcp_store] unknown request");
    }
  }

  void settle(Client& c) {
    std::erase_if(c.missing, [&](const std::string& k) { return values_.check({k}); });
    if (c.missing.empty()) {
      c.waiting = false;
      c.out += answer(How::kDone, c.wants_value ? values_.get(c.key) : "");
    } else if (Clock::now() >= c.deadline) {
      c.waiting = false;
      c.out += answer(How::kTimeout, quote_keys(c.missing));
    }
  }

  void settle_waits() {
    for (Client& c : clients_) {
      if (!c.waiting || c.gone) continue;
      settle(c);
      if (!c.waiting) parse(c);
    }
  }

  void flush(Client& c) {
    while (!c.out.empty() && !c.gone) {
      const ssize_t n = send(c.socket.fd(), c.out.data(), c.out.size(), MSG_NOSIGNAL);
      if (n > 0)
        c.out.erase(0, n);
      else if (errno == EAGAIN)
        return;
      else if (errno != EINTR)
        c.gone = true;
    }
    if (c.refused) c.gone = true;
  }

  Socket listener_;
  const std::string token_;
  const bool neighbours_only_;
  Socket wake_;
  bool is_full_ = false;
  std::list<Client> clients_;
  MemoryStore values_;
  std::thread thread_;
};

TcpStoreServer::TcpStoreServer(Socket listener, std::string token)
    : loop_(std::make_unique<Loop>(std::move(listener), std::move(token))) {}
TcpStoreServer::~TcpStoreServer() = default;
int TcpStoreServer::port() const { return loop_->port(); }

TcpStore::TcpStore(const TcpStoreOptions& options)
    : host_(options.host),
      port_(options.port),
      token_(options.token),
      answer_time_(options.answer_time),
      quiet_time_(options.quiet_time),
      addresses_(resolve(options.host, options.port, "the store's host")) {
  set_timeout(options.timeout);
  if (options.serve) {
    Socket listener;
    if (options.listen_fd >= 0) {
      listener = Socket(fcntl(options.listen_fd, F_DUPFD_CLOEXEC, 0));
      int listens = 0;
      socklen_t size = sizeof listens;
      if (!listener || getsockopt(listener.fd(), SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 ||
          !listens)
        fail("[tcp_store] file descriptor ", options.listen_fd,
             " (SHERD_STORE_FD) is no socket that listens");
    } else {
      SocketAddress at = addresses_[0];
      if (options.everywhere || !at.is_loopback()) {
        if (at.storage.ss_family == AF_INET)
          reinterpret_cast<sockaddr_in&>(at.storage).sin_addr.s_addr = htonl(INADDR_ANY);
        else
          reinterpret_cast<sockaddr_in6&>(at.storage).sin6_addr = in6addr_any;
      }
      listener = listen_on(at);
    }
    server_ = std::make_unique<TcpStoreServer>(std::move(listener), token_);
    port_ = server_->port();
    addresses_ = resolve(host_, port_, "the store's host");
  }
  idle_.push_back(connect(deadline_after(options.timeout), false));
  server_address_.length = sizeof server_address_.storage;
  getpeername(idle_[0].fd(), reinterpret_cast<sockaddr*>(&server_address_.storage),
              &server_address_.length);
}

TcpStore::~TcpStore() {
  idle_.clear();
  server_.reset();
}

void TcpStore::leave(Milliseconds patience) {
  std::lock_guard lock(mutex_);
  char byte;
  if (!server_ && !idle_.empty()) receive_all(idle_[0], &byte, 1, deadline_after(patience));
  idle_.clear();
  server_.reset();
}

Socket TcpStore::connect(Clock::time_point deadline, bool again) {
  const auto start = Clock::now();
  auto pause = Milliseconds(2);
  bool said = false;
  // Whose network will not come: a container without a loopback device.
  const bool is_local = std::ranges::all_of(addresses_, [](const SocketAddress& a) {
    return a.host().starts_with("127.") || a.host() == "::1";
  });
  for (;;) {
    int why = 0;
    for (const SocketAddress& a : addresses_) {
      Socket s = connect_to(a, deadline);
      if (!s) {
        why = errno;
        continue;
      }
      // A server that is stopped or overrun does not use up the patience of the other addresses.
      if (greet(s, a, std::min(deadline, Clock::now() + kGreetingTime))) return s;
      why = ECONNRESET;
    }
    const bool is_hopeless = (again && why == ECONNREFUSED) || (is_local && why == ENETUNREACH);
    const auto waited = std::chrono::round<Milliseconds>(Clock::now() - start);
    const auto text = [&] {
      return concat("[tcp_store] no store at ", name(), " after ", waited.count(), " ms (",
                    std::strerror(why),
                    "): rank 0 serves it; is it running, and is this the address that it has on "
                    "this network?");
    };
    if (Clock::now() + pause >= deadline || is_hopeless) throw StoreUnreachable(text());
    if (waited > quiet_time_ && !std::exchange(said, true))
      std::fprintf(stderr, "%s Going on to try.\n", text().c_str());
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, Milliseconds(250));
  }
}

// False: the connection was lost, try again. Error where there is no use in that.
bool TcpStore::greet(const Socket& s, const SocketAddress& a, Clock::time_point deadline) {
  const std::string ours = make_nonce();
  std::string hello(kHelloBytes, '\0'), answer(1, '\0'), proof(kProofBytes, '\0');
  if (!send_all(s, concat(kMagic, ours)) || !receive_all(s, hello.data(), kMagic.size(), deadline))
    return false;
  if (!hello.starts_with(kMagic))
    fail("[tcp_store] at ", a.to_string(),
         " another program answers, not a store of Sherd: choose another --master_port "
         "(MASTER_PORT)");
  if (!receive_all(s, hello.data() + kMagic.size(), kNonceBytes, deadline)) return false;
  const std::string theirs = hello.substr(kMagic.size());
  if (!send_all(s, proof_of(token_, "client", ours, theirs)) ||
      !receive_all(s, answer.data(), 1, deadline))
    return false;
  const bool welcome = answer[0] == kWelcome && receive_all(s, proof.data(), kProofBytes, deadline);
  if (answer[0] == kWelcome && !welcome) return false;
  if (!welcome || !same_proof(proof, proof_of(token_, "server", ours, theirs)))
    fail("[tcp_store] the store at ", a.to_string(),
         " has another token than this process, which has ", token_.empty() ? "none" : "one", ": ",
         kTokenVariable, " must be the same for all of a job; or this is another job's store");
  return true;
}

// Sends a request and returns the answer's text. StoreTimeout carries the missing keys alone.
std::string TcpStore::ask(const std::string& request, Milliseconds patience) {
  Socket s;
  {
    std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      s = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  if (!s) s = connect(deadline_after(answer_time_), true);
  const auto deadline = deadline_after(answer_time_, deadline_after(patience));
  uint32_t n = 0;
  std::string text;
  bool ok = send_all(s, request) &&
            receive_all(s, reinterpret_cast<char*>(&n), sizeof n, deadline) && n <= kMaxFrame;
  if (ok) {
    text.resize(n);
    ok = receive_all(s, text.data(), n, deadline);
  }
  if (!ok)
    fail("[tcp_store] the store ", name(), " ",
         Clock::now() < deadline ? "closed the connection: rank 0, which serves it, has ended"
                                 : "does not answer");
  Reader r(text);
  const auto how = How(r.byte());
  text = r.text();
  {
    std::lock_guard lock(mutex_);
    idle_.push_back(std::move(s));
  }
  if (how == How::kTimeout)
    throw StoreTimeout(concat("[store] waited ", patience.count(), " ms for ", text,
                              " in the store '", name(), "': never set"));
  if (how == How::kError) throw Error(text);
  return text;
}

void TcpStore::set(const std::string& key, const std::string& value) {
  if (key.size() + value.size() > kMaxFrame / 2)
    fail("[tcp_store] key '", key.substr(0, 40), "' and its value have ", key.size() + value.size(),
         " bytes, at most ", kMaxFrame / 2, " are allowed");
  ask(Writer(uint8_t(What::kSet)).text(key).text(value).frame(), Milliseconds(0));
}
std::string TcpStore::get(const std::string& key) {
  return ask(Writer(uint8_t(What::kGet)).texts({key}).number(timeout().count()).frame(), timeout());
}
int64_t TcpStore::add(const std::string& key, int64_t amount) {
  return std::stoll(
      ask(Writer(uint8_t(What::kAdd)).text(key).number(amount).frame(), Milliseconds(0)));
}
std::string TcpStore::compare_set(const std::string& key, const std::string& expected,
                                  const std::string& desired) {
  return ask(Writer(uint8_t(What::kCompareSet)).text(key).text(expected).text(desired).frame(),
             Milliseconds(0));
}
bool TcpStore::check(const std::vector<std::string>& keys) {
  return ask(Writer(uint8_t(What::kCheck)).texts(keys).frame(), Milliseconds(0)) == "1";
}
void TcpStore::wait(const std::vector<std::string>& keys, Milliseconds timeout) {
  ask(Writer(uint8_t(What::kWait)).texts(keys).number(timeout.count()).frame(), timeout);
}
bool TcpStore::delete_key(const std::string& key) {
  return ask(Writer(uint8_t(What::kDelete)).text(key).frame(), Milliseconds(0)) == "1";
}
int64_t TcpStore::num_keys() {
  return std::stoll(ask(Writer(uint8_t(What::kNumKeys)).frame(), Milliseconds(0)));
}

}  // namespace sherd::dist
