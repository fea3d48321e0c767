// What the nodes of a job tell each other through their store: each node one text about itself,
// which it alone writes, and node 0 one text of what it decided, which it alone writes.
#pragma once
#include <string>
#include <vector>

#include "distributed/launcher/failure.h"

namespace sherd::dist {

struct NodeState {
  enum class Phase {
    kWaiting,  // for `round`
    kRunning,  // its ranks of `round`
    kDone,     // they all ended well
    kFailed,   // some failed: `ends`
    kLeft,     // its sherdrun ends: `reason`, empty if it has read the last decision
  };
  std::string host;
  int nproc = 1;
  int node_rank = -1;       // as asked for; -1: any
  std::string nnodes = {};  // as asked for, "2" or "2:4"; empty: not known
  Phase phase = Phase::kWaiting;
  int round = 1;
  std::vector<RankEnd> ends = {};
  std::string reason = {};
  int64_t beat = 0;  // goes up while it lives
};

struct Decision {
  enum class Kind {
    kForming,  // round `round` has not begun
    kRunning,  // it has: `nodes`
    kRestart,  // it is over, and there will be another; `text` says why
    kStop,     // and there will be none
    kSuccess,
  };
  struct Node {
    int member;
    int first_rank;
  };
  Kind kind = Kind::kForming;
  int round = 1;
  int restarts = 0;              // after failures, so far
  std::vector<Node> nodes = {};  // by group rank
  int world_size = 0;
  std::string master_addr = {};
  int master_port = 0;
  std::string text = {};
  int exit_code = 0;
  std::vector<std::pair<int, std::string>> refused = {};  // member, and why

  bool is_last() const { return kind == Kind::kStop || kind == Kind::kSuccess; }
};

std::string to_text(const NodeState& state);
std::string to_text(const Decision& decision);
// Error on anything else.
NodeState node_state_from(const std::string& text);
Decision decision_from(const std::string& text);

}  // namespace sherd::dist
