#include "distributed/launcher/membership.h"

#include <errno.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "core/error.h"
#include "distributed/deadline.h"
#include "distributed/socket.h"
#include "distributed/store_token.h"
#include "distributed/tcp_store.h"

namespace sherd::dist {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kFarewell(
    5000);  // node 0 waits so long for the others to read the last word
constexpr milliseconds kSomeoneElses(10'000);         // a store without our job's decisions
constexpr const char* kRunIdKey = "sherdrun/run_id";  // node 0's
constexpr milliseconds kPatience(5000);               // before it is said what is waited for
constexpr milliseconds kAttempt(1000);  // of a connection, between looks at whether we are to end

Coordinator::Options coordinator_options(const LaunchOptions& o) {
  return {.min_nodes = o.min_nodes > 0 ? o.min_nodes : o.nnodes,
          .max_nodes = o.nnodes,
          .by_node_rank = o.rdzv_backend == RdzvBackend::kStatic,
          .max_restarts = o.max_restarts,
          .join_timeout = o.start_timeout,
          .last_call = o.last_call,
          .lost_after = o.lost_after,
          .silent_after = std::max(milliseconds(500), 3 * o.monitor_interval)};
}

// A machine's own name often has a loopback address on that machine: only the numbers count.
bool means_loopback(const std::string& host) {
  return host == "localhost" || host == "::1" ||
         (host.starts_with("127.") && host.find_first_not_of("0123456789.") == std::string::npos);
}

// With node ranks given, node 0 serves; else the first on the machine that the endpoint names.
StoreSocket listen_if_first(const LaunchOptions& o, bool loopback) {
  const std::string where = loopback ? o.master_addr : "";
  if (o.rdzv_backend == RdzvBackend::kStatic) {
    if (o.node_rank != 0) return {Fd(), 0};
    return listen_for_store(where, o.master_port);
  }
  const auto addresses = resolve(o.master_addr, o.master_port, "the rendezvous");
  if (std::none_of(addresses.begin(), addresses.end(), is_own)) return {Fd(), 0};
  return listen_if_free(where, o.master_port);
}

}  // namespace

Membership::Membership(const LaunchOptions& options)
    : options_(options),
      loopback_(means_loopback(options.master_addr)),
      listener_(listen_if_first(options, loopback_)),
      leads_(listener_.fd.fd() >= 0),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  state_.host = options.local_addr.empty() ? host_name() : options.local_addr;
  state_.nproc = options.nproc_per_node;
  state_.nnodes = nnodes_text(coordinator_options(options).min_nodes, options.nnodes);
  state_.node_rank = options.rdzv_backend == RdzvBackend::kStatic ? options.node_rank : -1;
  thread_ = std::thread([this] { run(); });
}

Membership::~Membership() {
  {
    std::lock_guard lock(mutex_);
    state_.phase = NodeState::Phase::kLeft;
    is_ending_ = has_changed_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

int Membership::number() const {
  std::lock_guard lock(mutex_);
  return number_;
}

std::optional<Decision> Membership::news() {
  uint64_t count;
  [[maybe_unused]] const ssize_t n = read(wake_.fd(), &count, sizeof count);
  std::lock_guard lock(mutex_);
  return std::exchange(news_, std::nullopt);
}

StoreSocket Membership::take_rank_store() {
  std::lock_guard lock(mutex_);
  return std::move(rank_store_);
}

void Membership::say(const std::function<void(NodeState&)>& change) {
  {
    std::lock_guard lock(mutex_);
    change(state_);
    has_changed_ = true;
  }
  changed_.notify_all();
}

void Membership::say_waiting(int round) {
  say([&](NodeState& s) { s.phase = NodeState::Phase::kWaiting, s.round = round, s.ends.clear(); });
}
void Membership::say_running(int round) {
  say([&](NodeState& s) { s.phase = NodeState::Phase::kRunning, s.round = round; });
}
void Membership::say_done(int round) {
  say([&](NodeState& s) { s.phase = NodeState::Phase::kDone, s.round = round; });
}
void Membership::say_failed(int round, const std::vector<RankEnd>& ends) {
  say([&](NodeState& s) { s.phase = NodeState::Phase::kFailed, s.round = round, s.ends = ends; });
}
void Membership::say_leaving(const std::string& reason) {
  say([&](NodeState& s) { s.phase = NodeState::Phase::kLeft, s.reason = reason; });
}

void Membership::publish(const Decision& decision) {
  {
    std::lock_guard lock(mutex_);
    news_ = decision;
  }
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = write(wake_.fd(), &one, sizeof one);
}

// Null: we are to end.
std::unique_ptr<TcpStore> Membership::join() {
  const auto start = Clock::now(), deadline = deadline_after(options_.start_timeout, start);
  bool has_told = false;
  for (;;) {
    try {
      return std::make_unique<TcpStore>(
          TcpStoreOptions{.host = loopback_ || !leads_ ? options_.master_addr : "localhost",
                          .port = options_.master_port,
                          .serve = leads_,
                          .listen_fd = listener_.fd.fd(),
                          .timeout = kAttempt,
                          .token = token_from_environment(),
                          .answer_time = options_.lost_after});
    } catch (const StoreUnreachable& e) {
      if (!has_told && Clock::now() - start > kPatience) {
        has_told = true;
        std::fprintf(stderr, "sherdrun: waiting for node 0 at %s:%d (%s)\n",
                     options_.master_addr.c_str(), options_.master_port, e.what());
      }
      if (Clock::now() >= deadline)
        fail("[launch] waited ", std::chrono::round<milliseconds>(options_.start_timeout).count(),
             " ms for node 0 at ", options_.master_addr, ":", options_.master_port,
             ": does sherdrun run there, and is this its address as seen from here?");
    }
    std::lock_guard lock(mutex_);
    if (is_ending_) return nullptr;
  }
}

void Membership::run() {
  std::unique_ptr<TcpStore> store;
  std::string key;
  bool said_goodbye = false;
  const auto lost = [&](const std::string& why) {
    publish({.kind = Decision::Kind::kStop, .text = why, .exit_code = 1});
  };
  try {
    store = join();
    if (!store) return;
    const int number = leads_ ? 1 : 1 + int(store->add(options_.run_id + "/others", 1));
    if (leads_) store->set(kRunIdKey, options_.run_id);
    if (leads_) coordinator_.emplace(coordinator_options(options_), Clock::now());
    key = concat(options_.run_id, "/node/", number);
    std::lock_guard lock(mutex_);
    number_ = number;
  } catch (const std::exception& e) {
    lost(e.what());
    return;
  }
  auto last_heard = Clock::now();
  joined_ = last_heard;
  auto farewell = Clock::time_point::max();
  for (;;) {
    bool is_ending;
    try {
      std::string text;
      {
        std::lock_guard lock(mutex_);
        ++state_.beat;
        text = to_text(state_);
        is_ending = is_ending_;
        has_changed_ = false;
      }
      store->set(key, text);
      said_goodbye = is_ending;
      leads_ ? lead(*store) : follow(*store);
      last_heard = Clock::now();
    } catch (const std::exception& e) {
      std::unique_lock lock(mutex_);
      if (is_ending_) return;
      if (Clock::now() - last_heard >= options_.lost_after || leads_) {
        lock.unlock();
        lost(concat("lost node 0 at ", options_.master_addr, ":", options_.master_port,
                    ", which leads the job: it has ended, or the network is cut (", e.what(), ")"));
        return;
      }
    }
    if (said_goodbye) {
      farewell = std::min(farewell, Clock::now() + kFarewell);
      if (!leads_ || coordinator_->all_have_left() || Clock::now() >= farewell) return;
    }
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, options_.monitor_interval,
                      [&] { return has_changed_ && !said_goodbye; });
  }
}

void Membership::lead(TcpStore& store) {
  const auto now = Clock::now();
  const auto others = store.add(options_.run_id + "/others", 0);
  for (int member = 1; member <= 1 + others; ++member) {
    const std::string key = concat(options_.run_id, "/node/", member);
    if (store.check({key})) coordinator_->hear(member, node_state_from(store.get(key)), now);
  }
  const std::string before = last_decision_;
  Decision decision = coordinator_->decide(now);
  if (decision.kind == Decision::Kind::kRunning) {
    // One port for each round, so that what is left of the last one cannot get in.
    std::lock_guard lock(mutex_);
    if (rank_store_round_ != decision.round) {
      rank_store_ = listen_for_store(loopback_ ? options_.master_addr : "", 0);
      rank_store_round_ = decision.round;
    }
    decision.master_addr = options_.master_addr;
    decision.master_port = rank_store_.port;
  }
  const std::string text = to_text(decision);
  if (text == before) return;
  last_decision_ = text;
  store.set(options_.run_id + "/decision", text);
  publish(decision);
}

void Membership::follow(TcpStore& store) {
  const std::string key = options_.run_id + "/decision";
  if (!store.check({key})) {
    if (store.check({kRunIdKey}) && store.get(kRunIdKey) != options_.run_id)
      publish({.kind = Decision::Kind::kStop,
               .text = concat("[launch] node 0 at ", options_.master_addr, ":",
                              options_.master_port, " has another --rdzv_id: '",
                              store.get(kRunIdKey), "', and this node '", options_.run_id, "'"),
               .exit_code = 1});
    else if (Clock::now() - joined_ > std::min<milliseconds>(options_.start_timeout, kSomeoneElses))
      publish({.kind = Decision::Kind::kStop,
               .text = concat("[launch] at ", options_.master_addr, ":", options_.master_port,
                              " nobody leads a job of the name '", options_.run_id,
                              "': is --rdzv_id the same on all nodes?"),
               .exit_code = 1});
    return;
  }
  const std::string text = store.get(key);
  if (text == last_decision_) return;
  last_decision_ = text;
  publish(decision_from(text));
}

}  // namespace sherd::dist
