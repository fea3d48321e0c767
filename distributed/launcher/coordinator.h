// Coordinator: how node 0 leads a job over several nodes: from what each node says of itself it
// makes rounds (who runs, with which ranks), and decides what follows a failure. No sockets, no
// clock of its own: that is membership.h.
//
//     Coordinator coordinator(options, now);
//     for (...) coordinator.hear(member, state, now);     // as often as there is news, or none
//     Decision d = coordinator.decide(now);
//
// [Note: rounds] Members are numbered as they come, node 0 first. A round begins when max_nodes
// wait for it, or min_nodes have waited for `last_call`; with node ranks given, when each of them
// waits. It ends
//  * well, when the ranks of all its nodes did;
//  * when ranks of a node failed, or a node left, or was not heard of for `lost_after`. Others have
//    `settle` to report their own failures, so that the cause can be told; then there is another
//    round, if max_restarts allows, or the job stops with what was the cause;
//  * when there is a place left and another node waits. That is no failure.
#pragma once
#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "distributed/launcher/node_state.h"

namespace sherd::dist {

std::string nnodes_text(int min_nodes, int max_nodes);  // "2" or "2:4"

class Coordinator {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  using Milliseconds = std::chrono::milliseconds;

  struct Options {
    int min_nodes = 1, max_nodes = 1;
    bool by_node_rank = false;  // each node said which it is
    int max_restarts = 0;
    Milliseconds join_timeout{600'000};
    Milliseconds last_call{30'000};
    Milliseconds lost_after{15'000};
    Milliseconds settle{1'000};
    Milliseconds silent_after{500};  // several times what lies between two beats
    // A node that was told to end beats until its ranks have ended: LaunchOptions::grace, and more.
    Milliseconds taken_after{6'000};
  };

  Coordinator(const Options& options, TimePoint now);

  void hear(int member, const NodeState& state, TimePoint now);
  // What all nodes are to do now. When it turns to kRunning, master_addr and master_port are left
  // to the caller.
  const Decision& decide(TimePoint now);
  // No member but node 0 is still to read the last decision.
  bool all_have_left() const;

 private:
  struct Member {
    NodeState state;
    TimePoint came, seen;
    bool is_lost = false, is_refused = false;

    bool is_there() const {
      return !is_lost && !is_refused && state.phase != NodeState::Phase::kLeft;
    }
  };

  void form(TimePoint now);
  void begin(const std::vector<int>& members);
  void watch(TimePoint now);
  void end_round(TimePoint now);
  void refuse_doubles(TimePoint now);
  void refuse_other_nnodes(int number);
  std::vector<int> waiting(TimePoint now) const;
  std::string name(int member) const;
  std::string who_came(TimePoint now) const;
  void stop(const std::string& text, int exit_code);

  const Options options_;
  std::map<int, Member> members_;
  Decision decision_;
  TimePoint forming_since_, decided_at_;
  std::optional<TimePoint> enough_since_;  // min_nodes wait
  std::optional<TimePoint> failed_since_;
};

}  // namespace sherd::dist
