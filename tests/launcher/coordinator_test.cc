// What node 0 decides, from what the nodes say: no sockets, and a clock that the test turns.
#include "distributed/launcher/coordinator.h"

#include <gtest/gtest.h>
#include <signal.h>

#include "core/error.h"

namespace sherd::dist {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Phase = NodeState::Phase;
using Kind = Decision::Kind;

class Nodes {
 public:
  explicit Nodes(const Coordinator::Options& options) : coordinator_(options, now_) {}

  void add(int member, int node_rank = -1, int nproc = 2) {
    states_[member] = {
        .host = "host" + std::to_string(member), .nproc = nproc, .node_rank = node_rank};
  }
  NodeState& operator[](int member) { return states_.at(member); }
  void die(int member) { states_.erase(member); }

  void sleep(milliseconds time) { now_ += time; }  // node 0 is stopped, and hears nobody
  // The living beat all the while.
  const Decision& after(milliseconds time) {
    for (const auto end = now_ + time;; now_ += milliseconds(100)) {
      for (auto& [member, state] : states_) {
        ++state.beat;
        coordinator_.hear(member, state, now_);
      }
      const Decision& decision = coordinator_.decide(now_);
      if (now_ >= end) return decision;
    }
  }
  const Decision& now() { return after(milliseconds(0)); }

  void run(int round) {
    for (const auto& node : now().nodes) {
      NodeState& state = states_.at(node.member);
      state.phase = Phase::kRunning, state.round = round;
    }
  }
  void fail_ranks(int member, int round, std::vector<RankEnd> ends) {
    NodeState& state = states_.at(member);
    state.phase = Phase::kFailed, state.round = round, state.ends = std::move(ends);
  }
  bool all_have_left() const { return coordinator_.all_have_left(); }

 private:
  Coordinator::TimePoint now_{};
  std::map<int, NodeState> states_;
  Coordinator coordinator_;
};

std::vector<int> members(const Decision& decision) {
  std::vector<int> list;
  for (const auto& node : decision.nodes) list.push_back(node.member);
  return list;
}
bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}
#define EXPECT_HAS(text, part) EXPECT_TRUE(has(text, part)) << "'" << (part) << "' in: " << (text)

TEST(Coordinator, R_014_complete_at_the_maximum) {
  Nodes nodes({.min_nodes = 2, .max_nodes = 3});
  nodes.add(1), nodes.add(2, -1, 3);
  EXPECT_EQ(nodes.after(seconds(5)).kind, Kind::kForming);
  nodes.add(3);
  const Decision& d = nodes.now();
  EXPECT_EQ(d.kind, Kind::kRunning);
  EXPECT_EQ(members(d), (std::vector{1, 2, 3}));
  EXPECT_EQ(d.world_size, 7);
  EXPECT_EQ(d.nodes[1].first_rank, 2);
  EXPECT_EQ(d.nodes[2].first_rank, 5);
}

TEST(Coordinator, R_014_complete_after_the_last_call) {
  Nodes nodes({.min_nodes = 1, .max_nodes = 3, .last_call = seconds(30)});
  nodes.add(1);
  nodes.after(seconds(20));
  nodes.add(2);
  EXPECT_EQ(nodes.after(seconds(9)).kind, Kind::kForming);
  EXPECT_EQ(nodes.after(seconds(2)).kind, Kind::kRunning);
  EXPECT_EQ(members(nodes.now()), (std::vector{1, 2}));
}

TEST(Coordinator, R_014_join_timeout_says_who_came) {
  Nodes nodes({.min_nodes = 3, .max_nodes = 3, .join_timeout = seconds(60)});
  nodes.add(1), nodes.add(2);
  const Decision& d = nodes.after(seconds(61));
  EXPECT_EQ(d.kind, Kind::kStop);
  EXPECT_HAS(d.text, "for 3 nodes (--nnodes), and 2 are here: a node (host1), a node (host2)");
  nodes.add(3);  // too late
  EXPECT_EQ(nodes.after(seconds(1)).kind, Kind::kStop);
}

TEST(Coordinator, R_014_lost_heart_beats_remove_a_node) {
  Nodes nodes({.min_nodes = 2, .max_nodes = 2, .lost_after = seconds(15)});
  nodes.add(1), nodes.add(2);
  nodes.run(1);
  nodes.die(2);
  EXPECT_EQ(nodes.after(seconds(14)).kind, Kind::kRunning);
  const Decision& d = nodes.after(seconds(3));
  EXPECT_EQ(d.kind, Kind::kStop);
  EXPECT_EQ(d.exit_code, 1);
  EXPECT_HAS(d.text, "node 1 (host2): its sherdrun has not been heard of for 15.");
}

TEST(Coordinator, NobodyIsLostWhileNode0WasStopped) {
  Nodes nodes({.min_nodes = 2, .max_nodes = 2, .lost_after = seconds(15)});
  nodes.add(1), nodes.add(2);
  nodes.run(1);
  nodes.sleep(seconds(3600));
  EXPECT_EQ(nodes.after(seconds(20)).kind, Kind::kRunning);
  nodes.die(2);
  nodes.sleep(seconds(3600));
  EXPECT_EQ(nodes.after(seconds(14)).kind, Kind::kRunning);
  EXPECT_EQ(nodes.after(seconds(3)).kind, Kind::kStop);
}

TEST(Coordinator, KilledNodeMayComeBackWhileNode0Stutters) {
  Nodes nodes({.min_nodes = 2,
               .max_nodes = 2,
               .by_node_rank = true,
               .max_restarts = 1,
               .lost_after = seconds(3)});
  nodes.add(1, 0), nodes.add(2, 1);
  nodes.run(1);
  nodes.die(2);
  nodes.add(3, 1);
  for (int i = 0; i < 3; ++i) nodes.after(milliseconds(500)), nodes.sleep(milliseconds(1500));
  nodes.after(seconds(4));
  nodes[1].phase = Phase::kWaiting;
  EXPECT_EQ(nodes.after(seconds(10)).kind, Kind::kRunning);
  EXPECT_TRUE(nodes.now().refused.empty());
  EXPECT_EQ(members(nodes.now()), (std::vector{1, 3}));
}

TEST(Coordinator, NodeThatWasGivenUpIsTold) {
  Nodes nodes({.min_nodes = 1, .max_nodes = 2, .max_restarts = 1, .last_call = seconds(1)});
  nodes.add(1), nodes.add(2);
  nodes.run(1);
  const NodeState asleep = nodes[2];
  nodes.die(2);
  EXPECT_EQ(nodes.after(seconds(17)).kind, Kind::kRestart);
  EXPECT_TRUE(nodes.now().refused.empty());
  nodes.add(2), nodes[2] = asleep;
  const Decision& d = nodes.after(seconds(1));
  ASSERT_EQ(d.refused.size(), 1u);
  EXPECT_EQ(d.refused[0].first, 2);
  EXPECT_HAS(d.refused[0].second, "goes on without it: start it again");
}

TEST(Coordinator, R_015_static_ranks_follow_from_the_node_rank) {
  Nodes nodes({.min_nodes = 3, .max_nodes = 3, .by_node_rank = true});
  nodes.add(1, 0), nodes.add(2, 2);
  EXPECT_EQ(nodes.after(seconds(20)).kind, Kind::kForming);
  nodes.add(3, 1);
  EXPECT_EQ(members(nodes.now()), (std::vector{1, 3, 2}));
}

TEST(Coordinator, SameNodeRankTwiceIsRefused) {
  Nodes nodes({.min_nodes = 2, .max_nodes = 2, .by_node_rank = true});
  nodes.add(1, 0);
  nodes.add(2, 0);
  const Decision& d = nodes.after(seconds(31));
  ASSERT_EQ(d.refused.size(), 1u);
  EXPECT_EQ(d.refused[0].first, 2);
  EXPECT_HAS(d.refused[0].second, "--node_rank=0 is taken by host1");
  EXPECT_EQ(d.kind, Kind::kForming);
  nodes.add(3, 1);
  EXPECT_EQ(nodes.now().kind, Kind::kRunning);
}

TEST(Coordinator, ASecondNodeOfTheSameRankIsRefusedWhileTheFirstLives) {
  Nodes nodes({.min_nodes = 2, .max_nodes = 2, .by_node_rank = true});
  nodes.add(1, 0), nodes.add(2, 1);
  nodes.run(1);
  nodes.add(3, 1);
  EXPECT_TRUE(nodes.after(seconds(5)).refused.empty());  // the first may be about to end
  const Decision& d = nodes.after(seconds(2));
  ASSERT_EQ(d.refused.size(), 1u);
  EXPECT_EQ(d.refused[0].first, 3);
  EXPECT_EQ(d.kind, Kind::kRunning);
}

TEST(Coordinator, NodesThatDisagreeOnTheirNumber) {
  for (const bool is_running : {false, true}) {
    Nodes nodes({.min_nodes = 1, .max_nodes = 2, .last_call = seconds(60)});
    nodes.add(1), nodes[1].nnodes = "1:2";
    if (is_running) {
      nodes.add(2), nodes[2].nnodes = "1:2";
      nodes.run(1);
    }
    nodes.add(3), nodes[3].nnodes = "3";
    const Decision& d = nodes.now();
    const std::string text = is_running ? d.refused.at(0).second : d.text;
    EXPECT_EQ(d.kind, is_running ? Kind::kRunning : Kind::kStop);
    EXPECT_HAS(text, "host3) was started with --nnodes=3, node 0 with --nnodes=1:2");
  }
}

TEST(Coordinator, KilledNodeMayComeBackUnderItsRank) {
  Nodes nodes({.min_nodes = 2, .max_nodes = 2, .by_node_rank = true, .max_restarts = 1});
  nodes.add(1, 0), nodes.add(2, 1);
  nodes.run(1);
  nodes.die(2);
  nodes.add(3, 1);
  nodes.fail_ranks(1, 1, {{.rank = 0, .exit_code = 1, .error = "rank 2 left"}});
  EXPECT_EQ(nodes.after(seconds(2)).kind, Kind::kRunning);  // waits for the silent one
  const Decision& d = nodes.after(milliseconds(1500));
  EXPECT_EQ(d.kind, Kind::kRestart);
  EXPECT_EQ(d.text.find("node 1 (host2): its sherdrun has not been heard of for 3."), 0u) << d.text;
  EXPECT_HAS(d.text, "rank 0: exit code 1: rank 2 left");
  EXPECT_HAS(d.text, "restart 1 of 1");
  nodes[1].phase = Phase::kWaiting;
  EXPECT_EQ(nodes.after(seconds(5)).kind, Kind::kRestart);  // is the older one gone?
  EXPECT_EQ(nodes.after(seconds(10)).kind, Kind::kRunning);
  EXPECT_EQ(members(nodes.now()), (std::vector{1, 3}));
  EXPECT_EQ(nodes.now().round, 2);
  EXPECT_EQ(nodes.now().restarts, 1);
  EXPECT_TRUE(nodes.now().refused.empty());
}

TEST(Coordinator, R_007_cause_is_first_over_all_nodes) {
  Nodes nodes({.min_nodes = 2, .max_nodes = 2});
  nodes.add(1), nodes.add(2);
  nodes.run(1);
  nodes.fail_ranks(1, 1,
                   {{.rank = 0, .exit_code = 1, .seconds = 2.0, .error = "rank 3 left"},
                    {.rank = 1, .exit_code = 1, .seconds = 2.1, .error = "rank 3 left"}});
  EXPECT_EQ(nodes.after(milliseconds(500)).kind, Kind::kRunning);
  nodes.fail_ranks(2, 1, {{.rank = 3, .signal = SIGKILL, .seconds = 2.2}});
  const Decision& d = nodes.now();  // all have ended: no need to wait
  EXPECT_EQ(d.kind, Kind::kStop);
  EXPECT_EQ(d.text.find("rank 3: killed by SIGKILL\n"), 0u) << d.text;
  EXPECT_HAS(d.text, "on host2");
  EXPECT_EQ(d.exit_code, 128 + SIGKILL);
}

TEST(Coordinator, R_009_restarts_are_counted) {
  Nodes nodes({.min_nodes = 2, .max_nodes = 2, .max_restarts = 2});
  nodes.add(1), nodes.add(2);
  for (int round = 1; round <= 3; ++round) {
    for (int m : {1, 2}) nodes[m].phase = Phase::kWaiting;
    EXPECT_EQ(nodes.now().kind, Kind::kRunning);
    EXPECT_EQ(nodes.now().round, round);
    EXPECT_EQ(nodes.now().restarts, round - 1);
    nodes.run(round);
    nodes.fail_ranks(1, round, {{.rank = 1, .exit_code = 3}});
    EXPECT_EQ(nodes.after(seconds(1)).kind, round < 3 ? Kind::kRestart : Kind::kStop);
  }
  EXPECT_EQ(nodes.now().exit_code, 3);
}

TEST(Coordinator, UsageErrorsAreNotRepeated) {
  Nodes nodes({.min_nodes = 2, .max_nodes = 2, .max_restarts = 2});
  nodes.add(1), nodes.add(2);
  nodes.run(1);
  nodes.fail_ranks(1, 1, {{.rank = 0, .exit_code = 2}});
  nodes.fail_ranks(2, 1, {{.rank = 2, .exit_code = 2}});
  EXPECT_EQ(nodes.now().kind, Kind::kStop);
  EXPECT_EQ(nodes.now().exit_code, 2);
}

TEST(Coordinator, NodeThatComesLateIsTakenIn) {
  Nodes nodes({.min_nodes = 1, .max_nodes = 2, .last_call = seconds(1)});
  nodes.add(1);
  EXPECT_EQ(nodes.after(seconds(2)).kind, Kind::kRunning);
  nodes.run(1);
  nodes.add(2);
  EXPECT_EQ(nodes.now().kind, Kind::kRestart);
  EXPECT_EQ(nodes.now().restarts, 0);
  nodes[1].phase = Phase::kWaiting;
  EXPECT_EQ(nodes.now().kind, Kind::kRunning);
  EXPECT_EQ(members(nodes.now()), (std::vector{1, 2}));
  // But a job that is full is left alone.
  nodes.run(2);
  nodes.add(3);
  EXPECT_EQ(nodes.after(seconds(5)).kind, Kind::kRunning);
}

TEST(Coordinator, R_013_interrupted_node_may_come_back_but_node_0_ends_the_job) {
  for (const int left : {1, 2}) {
    Nodes nodes({.min_nodes = 2, .max_nodes = 2, .max_restarts = 1});
    nodes.add(1), nodes.add(2);
    nodes.run(1);
    nodes[left].phase = Phase::kLeft, nodes[left].reason = "interrupted by SIGTERM";
    const Decision& d = nodes.after(milliseconds(1500));
    EXPECT_EQ(d.kind, left == 1 ? Kind::kStop : Kind::kRestart);
    EXPECT_HAS(d.text, concat("node ", left - 1, " (host", left, "): interrupted by SIGTERM"));
  }
}

TEST(Coordinator, R_013_node_0_interrupted_before_the_start) {
  Nodes nodes({.min_nodes = 3, .max_nodes = 3});
  nodes.add(1), nodes.add(2);
  nodes.now();
  nodes[1].phase = Phase::kLeft, nodes[1].reason = "interrupted by SIGINT";
  EXPECT_EQ(nodes.now().kind, Kind::kStop);
  EXPECT_HAS(nodes.now().text, "(host1): interrupted by SIGINT");
}

TEST(Coordinator, Success) {
  Nodes nodes({.min_nodes = 2, .max_nodes = 2});
  nodes.add(1), nodes.add(2);
  nodes.run(1);
  nodes[1].phase = Phase::kDone;
  EXPECT_EQ(nodes.after(seconds(60)).kind, Kind::kRunning);
  nodes[2].phase = Phase::kDone;
  EXPECT_EQ(nodes.now().kind, Kind::kSuccess);
  EXPECT_FALSE(nodes.all_have_left());
  nodes[2].phase = Phase::kLeft;
  nodes.now();
  EXPECT_EQ(nodes.now().kind, Kind::kSuccess);
  EXPECT_TRUE(nodes.all_have_left());
}

TEST(NodeState, TravelsAsText) {
  NodeState state{.host = "a \"host\"",
                  .nproc = 3,
                  .node_rank = 2,
                  .phase = Phase::kFailed,
                  .round = 7,
                  .ends = {{.rank = 4,
                            .local_rank = 1,
                            .pid = 99,
                            .signal = 9,
                            .seconds = 1.5,
                            .error = "no \xff UTF-8",
                            .log = "logs/1"}},
                  .reason = "r",
                  .beat = 12};
  const NodeState same = node_state_from(to_text(state));
  EXPECT_EQ(same.host, state.host);
  EXPECT_EQ(same.ends.at(0).signal, 9);
  EXPECT_EQ(same.ends.at(0).error.substr(0, 3), "no ");
  EXPECT_EQ(same.ends.at(0).log, "logs/1");
  EXPECT_EQ(same.beat, 12);
  const Decision decision{.kind = Kind::kRestart,
                          .round = 3,
                          .nodes = {{1, 0}, {4, 2}},
                          .world_size = 5,
                          .master_addr = "m",
                          .master_port = 9,
                          .text = "t",
                          .refused = {{2, "why"}}};
  EXPECT_EQ(to_text(decision_from(to_text(decision))), to_text(decision));
  for (const char* bad : {"", "{}", "[1]", "{\"host\": 3}", "\xff"}) {
    EXPECT_THROW(node_state_from(bad), Error);
    EXPECT_THROW(decision_from(bad), Error);
  }
}

}  // namespace
}  // namespace sherd::dist
