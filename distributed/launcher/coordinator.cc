#include "distributed/launcher/coordinator.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "core/error.h"

namespace sherd::dist {
namespace {

using Phase = NodeState::Phase;
using Kind = Decision::Kind;
using std::chrono::milliseconds;

// A node that is silent when others fail may be what they fail of.
constexpr milliseconds kWaitForSilent(3000);

std::string seconds_text(Coordinator::TimePoint::duration d) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", std::chrono::duration<double>(d).count());
  return text;
}

}  // namespace

std::string nnodes_text(int min_nodes, int max_nodes) {
  return min_nodes == max_nodes ? std::to_string(max_nodes) : concat(min_nodes, ":", max_nodes);
}

Coordinator::Coordinator(const Options& options, TimePoint now)
    : options_(options), forming_since_(now), decided_at_(now) {}

void Coordinator::hear(int number, const NodeState& state, TimePoint now) {
  auto [it, is_new] = members_.try_emplace(number, Member{state, now, now});
  Member& member = it->second;
  if (is_new) {
    refuse_other_nnodes(number);
    return;
  }
  if (member.is_lost) {  // who was given up may come back, as another member
    if (state.beat != member.state.beat && !std::exchange(member.is_refused, true))
      decision_.refused.emplace_back(number, concat("node 0 had not heard of this node for ",
                                                    seconds_text(options_.lost_after),
                                                    ", and goes on without it: start it again"));
    return;
  }
  if (state.beat != member.state.beat) member.seen = now;
  member.state = state;
}

const Decision& Coordinator::decide(TimePoint now) {
  if (decision_.is_last()) return decision_;
  // While this process was stopped (Ctrl-Z, a machine asleep) it heard nobody: that proves nothing.
  const auto pause = now - std::exchange(decided_at_, now);
  if (pause > options_.lost_after / 3)
    for (auto& [number, member] : members_)
      for (TimePoint* t : {&member.seen, &member.came}) *t = std::min(now, *t + pause);
  for (auto& [number, member] : members_)
    member.is_lost |= member.is_there() && now - member.seen > options_.lost_after;
  if (options_.by_node_rank) refuse_doubles(now);
  if (decision_.kind == Kind::kRunning)
    watch(now);
  else
    form(now);
  return decision_;
}

// The same node rank twice: one that was killed and started again, or a mistake. Which, the beats
// of the older will tell.
void Coordinator::refuse_doubles(TimePoint now) {
  for (auto& [number, member] : members_) {
    if (!member.is_there()) continue;
    for (const auto& [older, other] : members_) {
      if (older >= number || !other.is_there() || other.state.node_rank != member.state.node_rank)
        continue;
      const bool is_alive = other.seen - member.came > options_.taken_after;
      if (!is_alive && now - member.came <= 2 * options_.lost_after) continue;
      member.is_refused = true;
      decision_.refused.emplace_back(number, concat("--node_rank=", member.state.node_rank,
                                                    " is taken by ", other.state.host));
      break;
    }
  }
}

// Before anything runs it is not known which of the two is wrong: nobody goes on.
void Coordinator::refuse_other_nnodes(int number) {
  Member& member = members_.at(number);
  const std::string ours = nnodes_text(options_.min_nodes, options_.max_nodes);
  if (member.state.nnodes.empty() || member.state.nnodes == ours) return;
  const std::string text = concat(name(number), " was started with --nnodes=", member.state.nnodes,
                                  ", node 0 with --nnodes=", ours, ": all nodes need the same");
  if (decision_.kind == Kind::kForming && decision_.round == 1) {
    stop(text, 2);
  } else {
    member.is_refused = true;
    decision_.refused.emplace_back(number, text);
  }
}

std::vector<int> Coordinator::waiting(TimePoint now) const {
  std::vector<int> found;
  for (const auto& [number, member] : members_) {
    // One that is silent just now may be dead: a round with it would fail.
    if (!member.is_there() || member.state.phase != Phase::kWaiting ||
        now - member.seen > options_.silent_after)
      continue;
    if (!options_.by_node_rank) {
      found.push_back(number);
      continue;
    }
    const int rank = member.state.node_rank;
    // An older one of this rank is not known to be gone yet.
    const bool is_double = std::any_of(members_.begin(), members_.end(), [&](const auto& m) {
      return m.first < number && m.second.is_there() && m.second.state.node_rank == rank;
    });
    if (!is_double) found.push_back(number);
  }
  if (options_.by_node_rank)
    std::stable_sort(found.begin(), found.end(), [&](int a, int b) {
      return members_.at(a).state.node_rank < members_.at(b).state.node_rank;
    });
  return found;
}

void Coordinator::form(TimePoint now) {
  std::vector<int> ready = waiting(now);
  // Node 0 serves the store and rank 0: without it there is no round.
  const bool leads = !ready.empty() && ready.front() == 1;
  const int count = int(ready.size());
  if (const auto first = members_.find(1);
      first != members_.end() && first->second.state.phase == Phase::kLeft) {
    stop(concat(name(1), ": ", first->second.state.reason), 1);
    return;
  }
  if (leads && count >= options_.max_nodes) {
    ready.resize(size_t(options_.max_nodes));
    begin(ready);
    return;
  }
  if (!leads || count < options_.min_nodes) {
    enough_since_.reset();
    if (now - forming_since_ > options_.join_timeout)
      stop(concat("waited ", seconds_text(now - forming_since_), " for ", options_.min_nodes,
                  " nodes (--nnodes), and ", count, count == 1 ? " is" : " are", " here",
                  who_came(now)),
           1);
    return;
  }
  if (!enough_since_) enough_since_ = now;
  if (now - *enough_since_ >= options_.last_call) begin(ready);
}

std::string Coordinator::who_came(TimePoint now) const {
  std::string text;
  for (const int number : waiting(now)) text += concat(text.empty() ? ": " : ", ", name(number));
  return text;
}

void Coordinator::begin(const std::vector<int>& members) {
  decision_.kind = Kind::kRunning;
  decision_.nodes.clear();
  decision_.world_size = 0;
  for (const int number : members) {
    decision_.nodes.push_back({number, decision_.world_size});
    decision_.world_size += members_.at(number).state.nproc;
  }
  enough_since_.reset();
  failed_since_.reset();
}

void Coordinator::watch(TimePoint now) {
  size_t done = 0, ended = 0;
  bool failed = false, is_any_lost = false, is_any_silent = false;
  for (const auto& node : decision_.nodes) {
    const Member& member = members_.at(node.member);
    const bool is_current = member.state.round == decision_.round;
    const bool is_done = is_current && member.state.phase == Phase::kDone;
    const bool has_failed =
        !is_done && ((is_current && member.state.phase == Phase::kFailed) || !member.is_there());
    done += is_done;
    ended += is_done || has_failed;
    failed |= has_failed;
    is_any_lost |= has_failed && member.is_lost;
    is_any_silent |= !is_done && !has_failed && now - member.seen > options_.silent_after;
  }
  if (done == decision_.nodes.size()) {
    decision_.kind = Kind::kSuccess;
    return;
  }
  if (failed) {
    if (!failed_since_) failed_since_ = now;
    const auto since = now - *failed_since_;
    if (is_any_lost || ended == decision_.nodes.size() ||
        since >= (is_any_silent ? std::max(options_.settle, kWaitForSilent) : options_.settle))
      end_round(now);
    return;
  }
  std::vector<int> others = waiting(now);
  std::erase_if(others, [&](int number) {  // has not read yet that the round began
    return std::any_of(decision_.nodes.begin(), decision_.nodes.end(),
                       [&](const auto& node) { return node.member == number; });
  });
  if (!others.empty() && int(decision_.nodes.size()) < options_.max_nodes && done == 0) {
    decision_.kind = Kind::kRestart;
    decision_.text = concat(name(others.front()), " has come: all ranks start again, with it");
    ++decision_.round;
    forming_since_ = now;
  }
}

void Coordinator::end_round(TimePoint now) {
  std::string text;
  const auto add = [&](const std::string& line) { text += (text.empty() ? "" : "\n") + line; };
  std::vector<RankEnd> ends;
  std::map<int, int> member_of;  // rank
  int exit_code = 0;
  bool must_stop = false;
  for (const auto& node : decision_.nodes) {
    const Member& member = members_.at(node.member);
    if (member.state.phase == Phase::kLeft) {
      add(concat(name(node.member), ": ", member.state.reason));
      must_stop |= node.member == 1;
      exit_code = 1;
    } else if (member.is_lost ||
               (now - member.seen > options_.silent_after && member.state.phase != Phase::kDone &&
                member.state.phase != Phase::kFailed)) {
      add(concat(name(node.member), ": its sherdrun has not been heard of for ",
                 seconds_text(now - member.seen), " (ended, or cut off from the network)"));
      exit_code = 1;
    }
    for (const RankEnd& end : member.state.ends) {
      if (member.state.phase != Phase::kFailed || !end.failed()) continue;
      ends.push_back(end);
      member_of[end.rank] = node.member;
    }
  }
  std::stable_sort(ends.begin(), ends.end(),
                   [](const RankEnd& a, const RankEnd& b) { return a.seconds < b.seconds; });
  const auto failures = failures_by_cause(ends);
  if (!failures.empty())
    add(describe_all(
        failures, [&](const RankEnd& end) { return members_.at(member_of[end.rank]).state.host; }));
  if (exit_code == 0) exit_code = launcher_exit_code(failures.front());
  // Arguments that were wrong once will be again.
  must_stop |= !failures.empty() && std::all_of(failures.begin(), failures.end(), is_usage_error);
  if (must_stop || decision_.restarts >= options_.max_restarts) {
    stop(text, exit_code);
    return;
  }
  ++decision_.restarts;
  decision_.kind = Kind::kRestart;
  decision_.text = concat(text, "\nrestart ", decision_.restarts, " of ", options_.max_restarts,
                          ": all ranks start again");
  ++decision_.round;
  forming_since_ = now;
}

void Coordinator::stop(const std::string& text, int exit_code) {
  decision_.kind = Kind::kStop;
  decision_.text = text;
  decision_.exit_code = exit_code;
}

std::string Coordinator::name(int member) const {
  const NodeState& state = members_.at(member).state;
  for (size_t i = 0; i < decision_.nodes.size(); ++i)
    if (decision_.nodes[i].member == member) return concat("node ", i, " (", state.host, ")");
  return state.node_rank >= 0 ? concat("node ", state.node_rank, " (", state.host, ")")
                              : concat("a node (", state.host, ")");
}

bool Coordinator::all_have_left() const {
  return std::all_of(members_.begin(), members_.end(),
                     [](const auto& m) { return m.first == 1 || !m.second.is_there(); });
}

}  // namespace sherd::dist
