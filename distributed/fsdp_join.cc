#include "distributed/fsdp_join.h"

#include <algorithm>

#include "distributed/runtime.h"

namespace sherd::dist {

class FsdpJoinable::Hook : public JoinHook {
 public:
  Hook(FsdpJoinable& joinable, Join& join) : joinable_(joinable), join_(join) {}
  ~Hook() override {
    joinable_.scale_divisors(1, 1);
    joinable_.is_noting_ = false;
  }
  void main_hook() override { joinable_.shadow(join_); }
  void post_hook(bool) override { joinable_.keep_steps(); }

 private:
  FsdpJoinable& joinable_;
  Join& join_;
};

Group FsdpJoinable::join_process_group() { return runtime_.group(); }

std::unique_ptr<JoinHook> FsdpJoinable::join_hook(Join& join) {
  runtime_.require_idle("Join");
  if (!join.has_step())
    fail(
        "[join] FullyShardedDataParallel in a Join needs a JoinableStep behind it: a rank whose "
        "inputs ran out still holds a part of the parameters, which is to be stepped with the "
        "others' (see join.h)");
  for (auto& u : runtime_.units())
    if (!u->options().reshard_after_backward)
      fail("[join] unit ", u->name(), " of ", runtime_.root().name(),
           " stays gathered after backward (set_reshard_after_backward), so which of its forwards "
           "gather depends on the steps before: not possible inside a Join");
  divisors_.clear();
  for (auto& u : runtime_.units())
    for (auto& g : u->groups()) divisors_.emplace_back(g.bucket, g.bucket->divisor());
  return std::make_unique<Hook>(*this, join);
}

void FsdpJoinable::scale_divisors(int active, int of) {
  for (auto& [bucket, divisor] : divisors_) bucket->set_divisor(divisor * active / of);
}

void FsdpJoinable::begin_iteration(const JoinIteration& now) {
  if (!join()->options().divide_by_initial_world_size)
    scale_divisors(now.active(), int(now.said.size()));
}

void FsdpJoinable::keep_steps() {
  const bool failed = std::any_of(steps_.begin(), steps_.end(),
                                  [](const Step& s) { return s.kind == Step::Kind::kDrop; });
  if (is_noting_ && !failed) traces_[kind_] = std::move(steps_);
  is_noting_ = false;
  steps_.clear();
}

void FsdpJoinable::begin_forward(bool records) {
  if (!join()) return;
  if (!records)
    fail("[join] inside a Join, a forward of ", runtime_.root().name(),
         " under no_grad is not possible: ranks that ran out of inputs would not gather with it. "
         "Evaluate when the Join is over");
  keep_steps();
  const auto& syncs = runtime_.syncs();
  const auto on = std::count(syncs.begin(), syncs.end(), true);
  if (on != 0 && on != int64_t(syncs.size()))
    fail("[join] inside a Join, gradient synchronisation of ", runtime_.root().name(),
         " must be on or off for all its units");
  kind_ = on ? JoinIteration::kExchanges : 0;
  begin_iteration(join()->begin(*this, kind_));
  is_noting_ = true;
}

void FsdpJoinable::shadow(Join& join) {
  keep_steps();
  const JoinIteration now = join.shadow(*this);
  begin_iteration(now);
  const auto trace = traces_.find(now.note());
  if (trace == traces_.end())
    fail("[join] rank ", runtime_.group()->rank(), " has run no iteration ",
         now.exchanges() ? "" : "under no_sync ", "of ", runtime_.root().name(),
         " in a Join yet, and so does not know the order of its collectives: give each rank at "
         "least one input");
  runtime_.require_idle("the end of a Join");
  runtime_.repeat(trace->second);
}

}  // namespace sherd::dist
