// Membership: this node among the nodes of a job. A thread of its own says to node 0 that this one
// lives and how its ranks are, and takes node 0's decisions; on node 0 it also serves the store and
// makes them (coordinator.h).
//
//     Membership nodes(options);
//     nodes.say_waiting(1);
//     ... poll nodes.fd(), then nodes.news()
//     nodes.say_running(round); ... nodes.say_failed(round, ends); ...
//
// News are the latest decision; a node that cannot reach node 0 for `lost_after` gets kStop with
// the reason, of its own making.
#pragma once
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "distributed/fd.h"
#include "distributed/launcher/coordinator.h"
#include "distributed/launcher/launcher.h"
#include "distributed/launcher/node.h"

namespace sherd::dist {

class TcpStore;

class Membership {
 public:
  // Throws Error if this node is to serve the store and cannot listen there; whatever else is wrong
  // comes as news.
  explicit Membership(const LaunchOptions& options);
  // Tells the others that this node leaves, for `reason` or because the job is over. Node 0 waits
  // until they know, a few seconds at most.
  ~Membership();
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;

  int fd() const { return wake_.fd(); }  // readable while there are news
  // The latest decision, once for each change.
  std::optional<Decision> news();
  int number() const;  // of this member; 0 until it has joined
  bool leads() const { return leads_; }
  StoreSocket take_rank_store();  // on node 0, of the round that began: what rank 0 is to serve on

  void say_waiting(int round);
  void say_running(int round);
  void say_done(int round);
  void say_failed(int round, const std::vector<RankEnd>& ends);
  void say_leaving(const std::string& reason);

 private:
  using Clock = std::chrono::steady_clock;

  void run();
  std::unique_ptr<TcpStore> join();
  void lead(TcpStore& store);
  void follow(TcpStore& store);
  void publish(const Decision& decision);
  void say(const std::function<void(NodeState&)>& change);

  const LaunchOptions options_;
  const bool loopback_;
  StoreSocket listener_;  // node 0's
  bool leads_ = false;
  Fd wake_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  NodeState state_;
  bool has_changed_ = false, is_ending_ = false;
  int number_ = 0;
  std::optional<Decision> news_;
  std::string last_decision_;
  Clock::time_point joined_;
  StoreSocket rank_store_{Fd(), 0};
  int rank_store_round_ = 0;
  std::optional<Coordinator> coordinator_;  // node 0's
  std::thread thread_;
};

}  // namespace sherd::dist
