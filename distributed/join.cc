#include "distributed/join.h"

#include <algorithm>
#include <cstdio>
#include <exception>

#include "distributed/agree.h"
#include "distributed/distributed.h"

namespace sherd::dist {
namespace {

// As in PyTorch: from then on it is more likely a mistake than an uneven end.
constexpr int kSkewToWarnOf = 1000;

}  // namespace

int JoinIteration::active() const {
  return int(std::count_if(said.begin(), said.end(), [](int64_t s) { return s > 0; }));
}
int JoinIteration::authority() const {
  for (int r = int(said.size()) - 1; r >= 0; --r)
    if (said[size_t(r)] > 0) return r;
  return int(said.size()) - 1;
}
int64_t JoinIteration::note() const { return active() ? said[size_t(authority())] - 1 : 0; }

Join::Join(const std::vector<JoinableRef>& joinables, const JoinOptions& options)
    : options_(options), exceptions_(std::uncaught_exceptions()) {
  if (joinables.empty()) fail("[join] there is nothing to join: give at least one joinable");
  if (!options_.enable) return;
  for (const JoinableRef& ref : joinables) {
    Joinable* j = &ref.get();
    if (j->join_ || std::count(joinables_.begin(), joinables_.end(), j))
      fail("[join] joinable ", joinables_.size(), " is in a Join already: one at a time");
    const Group g = j->join_process_group();
    if (group_ && g != group_)
      fail("[join] joinable ", joinables_.size(), " is of the process group ", g->name(),
           ", the first of ", group_->name(), ": all must be of one group");
    group_ = g;
    const bool is_step = dynamic_cast<JoinableStep*>(j) != nullptr;
    if (is_step && joinables_.empty())
      fail("[join] a JoinableStep is the first joinable: put it behind the model that it steps");
    has_step_ = has_step_ || is_step;
    joinables_.push_back(j);
  }
  if (group_->rank() < 0) fail("[join] this rank is not in the process group ", group_->name());
  iteration_.said.assign(size_t(group_->size()), 0);
  for (Joinable* j : joinables_) hooks_.push_back(j->join_hook(*this));
  for (Joinable* j : joinables_) j->join_ = this;
}

void Join::detach() {
  for (Joinable* j : joinables_)
    if (j->join_ == this) j->join_ = nullptr;
}

Join::~Join() noexcept(false) {
  if (std::uncaught_exceptions() <= exceptions_ && options_.enable) {
    try {
      shadow_others();
    } catch (...) {
      detach();
      throw;
    }
  }
  detach();
}

JoinIteration Join::exchange(int64_t said) {
  JoinIteration it;
  it.said = all_gather_number(group_, said, {.label = "join"});
  const int authority = it.authority();
  for (int r = 0; r < group_->size(); ++r)
    if (it.has_inputs(r) && it.said[size_t(r)] != it.said[size_t(authority)])
      fail("[join] ranks ", r, " and ", authority,
           " begin different iterations (one exchanges gradients and the other is in no_sync, or "
           "one is in training and the other evaluates): all ranks with inputs do the same");
  if (it.active() > 0) iteration_ = it;
  return it;
}

void Join::notify_join_context(Joinable& joinable) {
  if (joinable.join_ && joinable.join_->is_first(joinable))
    joinable.join_->begin(joinable, JoinIteration::kExchanges);
}

JoinIteration Join::begin(Joinable& joinable, int64_t note) {
  JoinIteration it = exchange(1 + note);
  if (is_first(joinable) && options_.throw_on_early_termination && it.active() < group_->size()) {
    int r = 0;
    while (it.has_inputs(r)) ++r;
    fail("[join] a rank exhausted its inputs (rank ", r,
         "), which ends the training of all ranks since throw_on_early_termination is set");
  }
  return it;
}

JoinIteration Join::shadow(Joinable& joinable) {
  return is_first(joinable) ? iteration_ : exchange(0);
}

void Join::shadow_others() {
  for (int64_t i = 0; exchange(0).active() > 0; ++i) {
    if (options_.throw_on_early_termination)
      fail("[join] rank ", group_->rank(),
           " exhausted its inputs before others did, which ends the training of all ranks since "
           "throw_on_early_termination is set");
    if (i == kSkewToWarnOf)
      std::fprintf(stderr,
                   "[join] rank %d ran out of inputs %d iterations ago, and other ranks still have "
                   "some: is the data cut evenly?\n",
                   group_->rank(), kSkewToWarnOf);
    for (auto& h : hooks_) h->main_hook();
  }
  const bool is_last = iteration_.active() == 0 || iteration_.has_inputs(group_->rank());
  for (auto& h : hooks_) h->post_hook(is_last);
}

// ---- JoinableStep
namespace {

// So that a step on some ranks only is an error at once, and no parameters that differ.
void meet(const Group& group) {
  group->all_reduce(zeros({1}, kInt32), ReduceOp::kSum, {.label = "join step"}).wait();
}

}  // namespace

class JoinableStep::Hook : public JoinHook {
 public:
  Hook(JoinableStep& step, Join& join) : step_(step), join_(join) {}
  void main_hook() override {
    if (!join_.iteration().exchanges()) return;
    meet(step_.group_);
    step_.step_();
  }

 private:
  JoinableStep& step_;
  Join& join_;
};

JoinableStep::JoinableStep(std::function<void()> step, Group process_group)
    : step_(std::move(step)), group_(process_group ? process_group : default_group()) {}

void JoinableStep::operator()() {
  if (join()) meet(group_);
  step_();
}

std::unique_ptr<JoinHook> JoinableStep::join_hook(Join& join) {
  return std::make_unique<Hook>(*this, join);
}

}  // namespace sherd::dist
