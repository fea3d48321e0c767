// A model and its training loop without tensors: calls a GatherSchedule as the runtime would, and
// checks what must hold of each step. For gather_schedule_test.cc and gather_schedule_flow_test.cc.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <random>
#include <set>

#include "core/error.h"
#include "distributed/gather_schedule.h"

namespace sherd::dist {

using Kind = Step::Kind;
using State = GatherSchedule::State;
using Lines = std::vector<std::string>;

// A call of a unit's module, with the units called inside it.
struct Call {
  int unit;
  std::vector<Call> inner = {};
  bool checkpointed = false;
};

// Bytes as the CPU's one queue of collectives sees them: an operation takes its memory when it
// starts and gives it back when it ends, and it starts after all earlier ones have ended. `chance`
// is how much of the queue has run before it must: 0 lazy, 1 eager.
class Memory {
 public:
  Memory(std::vector<ScheduledUnit> units, double chance) : units_(units), chance_(chance) {}

  void carry_out(Step s) {
    switch (s.kind) {
      case Kind::kGather:
        queue_.push_back(s);
        break;
      case Kind::kShow:
        run_until({Kind::kGather, s.unit});
        break;
      case Kind::kRelease:
        run_until({Kind::kGather, s.unit});
        now_ -= bytes(units_[s.unit].full_bytes, s.unit);
        break;
      case Kind::kReduce:
        queue_.push_back(s);
        break;
      case Kind::kRetire:
      case Kind::kDrop:
        run_until({Kind::kReduce, s.unit});
        break;
      case Kind::kPost:
        break;
    }
    while (!queue_.empty() && std::uniform_real_distribution<>()(random_) < chance_) run_one();
  }
  void first_gradient(int unit) { take(bytes(units_[unit].grad_bytes, unit)); }
  void drop_gradient(int unit) { now_ -= bytes(units_[unit].grad_bytes, unit); }
  int64_t now() const { return now_; }
  int64_t peak() const { return peak_; }

 private:
  int64_t bytes(int64_t n, int unit) const { return unit == int(units_.size()) - 1 ? 0 : n; }
  void take(int64_t n) { peak_ = std::max(peak_, now_ += n); }
  void run_one() {
    const Step s = queue_.front();
    queue_.pop_front();
    if (s.kind == Kind::kGather)
      take(bytes(units_[s.unit].full_bytes, s.unit));
    else
      now_ -= bytes(units_[s.unit].grad_bytes, s.unit);
  }
  void run_until(Step s) {
    while (std::ranges::find(queue_, s) != queue_.end()) run_one();
  }

  std::vector<ScheduledUnit> units_;
  double chance_;
  std::mt19937 random_{1};
  std::deque<Step> queue_;
  int64_t now_ = 0, peak_ = 0;
};

// A model and its training loop: calls the schedule as the runtime would, and checks each step.
class Training {
 public:
  Training(std::vector<ScheduledUnit> units, GatherSchedule::Options options = {},
           double chance = 0)
      : schedule(units, options), memory(units, chance), units_(units), full_(units.size()) {}

  // Returns a line an event, as design notes write them: "<r gather r, show r, gather 0".
  Lines forward(const std::vector<Call>& calls, bool train = true) {
    lines_.clear();
    for (const Call& c : calls) call(c, train ? ForwardKind::kTraining : ForwardKind::kInference);
    return lines_;
  }
  Lines forward(const Call& c, bool train = true) { return forward(std::vector{c}, train); }

  // The backward of everything recorded by `calls`, in reverse.
  Lines backward(const std::vector<Call>& calls, const std::set<int>& without_gather = {},
                 bool reduces = true) {
    lines_.clear();
    std::vector<GatherSchedule::PlanItem> plan;
    last_use_.assign(units_.size(), 0);
    for (auto c = calls.rbegin(); c != calls.rend(); ++c) add_to_plan(*c, plan);
    for (auto& item : plan) {
      ++last_use_[item.unit];
      item.gather = !without_gather.contains(item.unit);
    }
    has_grad_.assign(units_.size(), false);
    reduces_ = reduces;
    schedule.begin_backward(plan, reduces);
    for (auto c = calls.rbegin(); c != calls.rend(); ++c) back(*c);
    apply("end", schedule.end_backward());
    EXPECT_EQ(reducing_, -1) << "the last reduction was not retired";
    return lines_;
  }
  Lines backward(const Call& c, const std::set<int>& without_gather = {}) {
    return backward(std::vector{c}, without_gather);
  }
  void apply(const std::string& event, const GatherSchedule::Steps& steps) {
    std::string line = event;
    for (const Step& s : steps) {
      check(s);
      memory.carry_out(s);
      log.push_back(s);
      if (s.kind == Kind::kPost) continue;  // not in the worked example
      line += (line == event ? " " : ", ") + name(s);
    }
    lines_.push_back(line);
  }
  std::string name(int unit) const {
    return unit == int(units_.size()) - 1 ? "r" : std::to_string(unit);
  }
  std::string name(const Step& s) const {
    const std::string text = to_string(s);
    return concat(text.substr(0, text.find(' ')), " ", name(s.unit));
  }
  // The log since the last call, of these kinds.
  Lines take(const std::set<Kind>& kinds) {
    Lines r;
    for (const Step& s : log)
      if (kinds.contains(s.kind)) r.push_back(name(s));
    log.clear();
    return r;
  }
  int64_t count(Kind kind) const {
    return std::ranges::count_if(log, [&](const Step& s) { return s.kind == kind; });
  }
  void expect_all(State state) const {
    for (int u = 0; u < schedule.size(); ++u)
      EXPECT_EQ(schedule.state(u), units_[u].gathers ? state : State::kSharded) << u;
  }

  GatherSchedule schedule;
  Memory memory;
  std::vector<Step> log;

 private:
  enum Full { kNothing, kUnderWay, kThere };

  // What must hold of any list of steps.
  void check(Step s) {
    Full& full = full_[s.unit];
    switch (s.kind) {
      case Kind::kGather:
        EXPECT_TRUE(units_[s.unit].gathers);
        EXPECT_EQ(full, kNothing);
        full = kUnderWay;
        break;
      case Kind::kShow:
        EXPECT_EQ(full, kUnderWay);
        full = kThere;
        break;
      case Kind::kRelease:
        EXPECT_NE(full, kNothing);
        full = kNothing;
        break;
      case Kind::kReduce:
        reduced_before_ = reducing_;
        reducing_ = s.unit;
        break;
      case Kind::kRetire:
      case Kind::kDrop:
        EXPECT_TRUE(s.unit == reduced_before_ || s.unit == reducing_) << "at most one is behind";
        if (s.unit == reducing_ && reduced_before_ < 0) reducing_ = -1;
        reduced_before_ = -1;
        break;
      case Kind::kPost:
        break;
    }
  }
  void expect_shown(int unit) {
    if (units_[unit].gathers) {
      EXPECT_EQ(full_[unit], kThere) << unit;
      EXPECT_EQ(schedule.state(unit), State::kInUse);
    }
  }

  void call(const Call& c, ForwardKind kind) {
    apply("<" + name(c.unit), schedule.forward_pre(c.unit, kind));
    for (const Call& i : c.inner) call(i, kind);
    expect_shown(c.unit);
    apply(name(c.unit) + ">", schedule.forward_post(c.unit, kind));
  }
  // Falling sequence numbers: a scope begins with what its module did last.
  static void add_to_plan(const Call& c, std::vector<GatherSchedule::PlanItem>& plan) {
    plan.push_back({c.unit});
    for (auto i = c.inner.rbegin(); i != c.inner.rend(); ++i) add_to_plan(*i, plan);
  }
  void back(const Call& c) {
    if (c.checkpointed) call(c, ForwardKind::kRecomputation);
    apply("<" + name(c.unit), schedule.enter(c.unit));
    if (!has_grad_[c.unit] && reduces_) {
      has_grad_[c.unit] = true;
      if (units_[c.unit].grad_bytes) memory.first_gradient(c.unit);
    }
    for (auto i = c.inner.rbegin(); i != c.inner.rend(); ++i) back(*i);
    if (--last_use_[c.unit] == 0 && reduces_ && units_[c.unit].grad_bytes)
      apply("last leaf of " + name(c.unit), schedule.gradients_complete(c.unit));
    apply(name(c.unit) + ">", schedule.leave(c.unit));
  }

  std::vector<ScheduledUnit> units_;
  std::vector<Full> full_;
  std::vector<int> last_use_;
  std::vector<bool> has_grad_;
  bool reduces_ = true;
  int reducing_ = -1, reduced_before_ = -1;
  Lines lines_;
};

constexpr int kBlock = 100;

// n blocks and a root, as FULL_SHARD or SHARD_GRAD_OP; the root keeps its own.
inline std::vector<ScheduledUnit> blocks(int n, bool full_shard = true,
                                         bool root_reshards = false) {
  std::vector<ScheduledUnit> units(n + 1, {kBlock, kBlock});
  for (auto& u : units) u.reshard_after_forward = full_shard;
  units.back().reshard_after_forward = root_reshards;
  return units;
}
inline Call model(int n, bool checkpointed = false) {
  Call root{n};
  for (int i = 0; i < n; ++i) root.inner.push_back({i, {}, checkpointed});
  return root;
}

}  // namespace sherd::dist
