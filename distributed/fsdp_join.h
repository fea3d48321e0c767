// FsdpJoinable: how a sharded model takes part in a Join (join.h). A rank that ran out of inputs
// carries out again, with zero gradients, the steps of its last iteration: gathers, releases and
// reductions. All ranks have the same order of them, so it is what the others do now.
//
// [Note: traces] Iterations that exchange gradients and those under no_sync have their own; they
// are noted in Joins alone, and kept for the next one.
#pragma once
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "distributed/gather_schedule.h"
#include "distributed/grad_bucket.h"
#include "distributed/join.h"

namespace sherd::dist {

class Runtime;

class FsdpJoinable : public Joinable {
 public:
  explicit FsdpJoinable(Runtime& runtime) : runtime_(runtime) {}

  // By the runtime: an outermost forward is about to begin; a step was carried out.
  void begin_forward(bool records);
  void note(const Step& step) {
    if (is_noting_) steps_.push_back(step);
  }

  std::unique_ptr<JoinHook> join_hook(Join& join) override;
  Group join_process_group() override;

 private:
  class Hook;
  void scale_divisors(int active, int of);
  void begin_iteration(const JoinIteration& now);
  void keep_steps();
  void shadow(Join& join);

  Runtime& runtime_;
  std::vector<std::pair<std::shared_ptr<GradBucket>, double>> divisors_;  // before the Join
  bool is_noting_ = false;
  int64_t kind_ = 0;                                 // what steps_ are of: JoinIteration::note()
  GatherSchedule::Steps steps_;                      // of the iteration that runs
  std::map<int64_t, GatherSchedule::Steps> traces_;  // by kind, of the last whole one
};

}  // namespace sherd::dist
