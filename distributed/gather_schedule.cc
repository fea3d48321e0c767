#include "distributed/gather_schedule.h"

#include <algorithm>

#include "core/error.h"

namespace sherd::dist {

using Kind = Step::Kind;

std::string to_string(const Step& step) {
  static constexpr std::array names{"gather", "show",   "release", "post",
                                    "reduce", "retire", "drop"};
  return concat(names[int(step.kind)], " ", step.unit);
}

int64_t GatherSchedule::default_max_bytes(const std::vector<ScheduledUnit>& units,
                                          const Options& options) {
  std::vector<int64_t> sizes;
  for (size_t i = 0; i + 1 < units.size(); ++i)
    if (const int64_t s = std::max(units[i].full_bytes, units[i].grad_bytes)) sizes.push_back(s);
  if (sizes.empty()) return 0;
  std::ranges::sort(sizes);
  const int64_t largest = sizes.back(), median = sizes[sizes.size() / 2];
  const int ahead =
      std::max(options.forward_prefetch, int(options.backward_prefetch == BackwardPrefetch::kPre));
  return std::max((22 * largest + 9) / 10, (ahead + 2) * median);
}

GatherSchedule::GatherSchedule(std::vector<ScheduledUnit> units, Options options)
    : options_(options),
      max_bytes_(options.max_bytes > 0 ? options.max_bytes : default_max_bytes(units, options)) {
  if (units.empty()) fail("[gather_schedule] needs at least the root unit");
  if (options.forward_prefetch < 0)
    fail("[gather_schedule] forward_prefetch must not be negative, got ", options.forward_prefetch);
  for (const ScheduledUnit& u : units) units_.emplace_back(u);
}

int GatherSchedule::checked(int unit) const {
  if (unit < 0 || unit >= size()) fail("[gather_schedule] there is no unit ", unit);
  return unit;
}

void GatherSchedule::add(Kind kind, int unit) { steps_.push_back({kind, unit}); }

void GatherSchedule::gather(int unit, bool early) {
  add(Kind::kGather, unit);
  units_[unit].state = State::kGathering;
  units_[unit].guessed = early;
  ++counts_.gathers;
  counts_.early += early;
}

void GatherSchedule::release(int unit) {
  Unit& u = units_[unit];
  if (u.state == State::kSharded) return;
  counts_.mispredicted += u.guessed;
  u.guessed = false;
  u.state = State::kSharded;
  add(Kind::kRelease, unit);
}

// Full and shown; the caller adds the pin.
void GatherSchedule::acquire(int unit) {
  Unit& u = units_[unit];
  if (u.state == State::kSharded) gather(unit, false);
  if (u.state == State::kGathering) add(Kind::kShow, unit);
  u.guessed = false;
  u.state = State::kInUse;
}

void GatherSchedule::release_all() {
  for (int i = 0; i < size(); ++i) {
    Unit& u = units_[i];
    u.forward_pins = u.backward_pins = u.moved_pins = 0;
    u.entered.clear();
    release(i);
  }
  depth_ = 0;
  guessing_ = false;
}

// Of units in use or on their way. What is idle is kept from forward to backward by its options, or
// is needed next: no matter of prefetching.
int64_t GatherSchedule::live_bytes() const {
  int64_t bytes = 0;
  for (int i = 0; i < size(); ++i)
    if (units_[i].state == State::kInUse || units_[i].state == State::kGathering)
      bytes += full_bytes(i);
  return bytes;
}

// ---- forward

const GatherSchedule::Steps& GatherSchedule::forward_pre(int unit, ForwardKind kind, bool stale) {
  Unit& u = at(unit);
  steps_.clear();
  if (kind == ForwardKind::kRecomputation) {
    if (!in_backward_) fail("[gather_schedule] unit ", unit, " recomputes outside of backward");
    touch(unit);
    if (u.gathers) {
      acquire(unit);
      ++u.backward_pins;
    }
    if (options_.backward_prefetch == BackwardPrefetch::kPre) prefetch_backward(unit);
    return steps_;
  }
  if (depth_++ == 0) {
    order_key_ = {kind, unit};
    order_ = orders_[order_key_];
    order_at_ = 0;
    seen_.clear();
    guessing_ = !order_.empty();
  }
  seen_.push_back(unit);
  guessing_ = guessing_ && order_at_ < order_.size() && order_[order_at_] == unit;
  ++order_at_;
  if (u.gathers) {
    if (stale && u.state != State::kInUse) release(unit);
    acquire(unit);
    ++u.forward_pins;
  }
  if (guessing_) prefetch_forward();
  return steps_;
}

void GatherSchedule::prefetch_forward() {
  int ahead = 0;
  for (size_t i = order_at_; i < order_.size() && ahead < options_.forward_prefetch; ++i) {
    const int next = order_[i];
    if (!units_[next].gathers) continue;
    ++ahead;
    if (units_[next].state != State::kSharded) continue;
    if (live_bytes() + full_bytes(next) > max_bytes_ && !is_root(next)) return;
    gather(next, true);
  }
}

const GatherSchedule::Steps& GatherSchedule::forward_post(int unit, ForwardKind kind,
                                                          bool has_graph) {
  Unit& u = at(unit);
  steps_.clear();
  if (kind == ForwardKind::kRecomputation) {
    if (u.gathers && u.backward_pins == 0)
      fail("[gather_schedule] unit ", unit, " ends a recomputation that it did not begin");
    u.moved_pins += u.gathers;  // the pin goes to the scope that the recomputation made
    return steps_;
  }
  if (depth_ == 0 || (u.gathers && u.forward_pins == 0))
    fail("[gather_schedule] unit ", unit, " ends a forward that it did not begin");
  --depth_;
  if (u.gathers && --u.forward_pins + u.backward_pins == 0) {
    const bool is_next = guessing_ && order_at_ < order_.size() && order_[order_at_] == unit;
    if (kind == ForwardKind::kTraining && has_graph && (!u.reshard_after_forward || is_next))
      u.state = State::kIdle;
    else
      release(unit);
  }
  if (depth_ == 0) {
    for (int i = 0; i < size(); ++i)
      if (units_[i].guessed) release(i);
    orders_[order_key_] = seen_;
    guessing_ = false;
  }
  return steps_;
}

const GatherSchedule::Steps& GatherSchedule::forward_unwind(int unit) {
  Unit& u = at(unit);
  steps_.clear();
  if (depth_ == 0 || (u.gathers && u.forward_pins == 0))
    fail("[gather_schedule] unit ", unit, " unwinds a forward that it did not begin");
  if (depth_ == 1 && !in_backward_) {
    release_all();
    return steps_;
  }
  // An outer module may catch the exception and go on.
  --depth_;
  guessing_ = false;
  if (u.gathers && --u.forward_pins + u.backward_pins == 0) release(unit);
  return steps_;
}

// ---- backward

void GatherSchedule::begin_backward(std::vector<PlanItem> plan, bool reduces) {
  if (in_backward_) fail("[gather_schedule] a backward began inside another one");
  for (const PlanItem& item : plan) checked(item.unit);
  in_backward_ = true;
  plan_.clear();
  for (const PlanItem& item : plan) plan_.push_back({item});
  plan_at_ = -1;
  for (Unit& u : units_) u.syncs_now = u.sync && reduces;
}

// The unit's first planned scope that was not reached yet; null if the plan has none.
GatherSchedule::Planned* GatherSchedule::touch(int unit) {
  const auto item =
      std::ranges::find_if(plan_, [&](const Planned& p) { return p.unit == unit && !p.done; });
  if (item == plan_.end()) return nullptr;
  item->done = true;
  plan_at_ = int(item - plan_.begin());
  return &*item;
}

int GatherSchedule::next_planned() const {
  int i = plan_at_ + 1;
  while (i < int(plan_.size()) && plan_[i].done) ++i;
  return i;
}

void GatherSchedule::prefetch_backward(int current) {
  int i = next_planned();
  const int following = i < int(plan_.size()) ? plan_[i].unit : -1;
  // Passes over what needs no gather at all, but not over what is full at present: that one's own
  // turn is the time to gather the next.
  while (i < int(plan_.size()) &&
         (plan_[i].done || !plan_[i].gather || !units_[plan_[i].unit].gathers))
    ++i;
  if (i == int(plan_.size())) return;
  const int next = plan_[i].unit;
  if (units_[next].state != State::kSharded) return;
  if (!is_root(next)) {
    const int64_t with_next = live_bytes() + full_bytes(next);
    const int64_t grad = current < 0 ? 0 : grad_bytes(current);
    const int64_t freed =
        current < 0 || units_[current].state != State::kInUse ? 0 : full_bytes(current);
    const int64_t now = with_next + grad;
    const int64_t later = with_next - freed + grad + grad_bytes(following);
    if (std::max(now, later) > max_bytes_) return;
  }
  gather(next, true);
}

const GatherSchedule::Steps& GatherSchedule::enter(int unit) {
  Unit& u = at(unit);
  steps_.clear();
  if (!in_backward_) fail("[gather_schedule] unit ", unit, " was entered outside of backward");
  if (u.moved_pins) {
    --u.moved_pins;
    u.entered.push_back(true);
    return steps_;
  }
  const Planned* item = touch(unit);
  // Without a gather, what is full is used, and what is under way is for a later scope.
  const bool full = u.state == State::kInUse || u.state == State::kIdle;
  const bool pins = u.gathers && (!item || item->gather || full);
  if (pins) {
    acquire(unit);
    ++u.backward_pins;
  }
  u.entered.push_back(pins);
  if (options_.backward_prefetch == BackwardPrefetch::kPre) prefetch_backward(unit);
  return steps_;
}

void GatherSchedule::settle(int unit) {
  Unit& u = units_[unit];
  if (u.forward_pins + u.backward_pins) return;
  const int next = next_planned();
  if (next < int(plan_.size()) && plan_[next].unit == unit) {
    if (u.state == State::kInUse) u.state = State::kIdle;
    return;
  }
  add(Kind::kPost, unit);
  if (u.state == State::kGathering) return;  // ahead of time, for a later scope
  if (u.reshard_after_backward)
    release(unit);
  else if (u.state == State::kInUse)
    u.state = State::kIdle;
}

const GatherSchedule::Steps& GatherSchedule::leave(int unit) {
  Unit& u = at(unit);
  steps_.clear();
  if (u.entered.empty())
    fail("[gather_schedule] unit ", unit, " left a scope that it did not enter");
  if (u.entered.back()) --u.backward_pins;
  u.entered.pop_back();
  settle(unit);
  if (options_.backward_prefetch != BackwardPrefetch::kNone) prefetch_backward(-1);
  return steps_;
}

const GatherSchedule::Steps& GatherSchedule::skip(int unit) {
  Unit& u = at(unit);
  steps_.clear();
  if (!in_backward_) fail("[gather_schedule] unit ", unit, " was skipped outside of backward");
  if (u.moved_pins) {
    --u.moved_pins;
    --u.backward_pins;
  } else {
    touch(unit);
    if (u.state != State::kIdle) return steps_;
  }
  settle(unit);
  return steps_;
}

// At most one reduction is behind the current unit.
void GatherSchedule::reduce(int unit) {
  add(Kind::kReduce, unit);
  if (reducing_ >= 0) add(Kind::kRetire, reducing_);
  reducing_ = unit;
  units_[unit].pending = false;
}

const GatherSchedule::Steps& GatherSchedule::gradients_complete(int unit) {
  Unit& u = at(unit);
  steps_.clear();
  if (!in_backward_)
    fail("[gather_schedule] gradients of unit ", unit, " completed outside of backward");
  if (u.syncs_now)
    reduce(unit);
  else
    u.pending = true;
  return steps_;
}

const GatherSchedule::Steps& GatherSchedule::end_backward() {
  steps_.clear();
  if (!in_backward_) fail("[gather_schedule] no backward has begun");
  for (int i = 0; i < size(); ++i) {
    Unit& u = units_[i];
    counts_.repaired += u.backward_pins > 0;
    u.backward_pins = u.moved_pins = 0;
    u.entered.clear();
    if (u.forward_pins) continue;
    if (u.state != State::kIdle || u.reshard_after_backward) release(i);
  }
  for (int i = 0; i < size(); ++i)
    if (units_[i].pending && units_[i].syncs_now) reduce(i);
  if (reducing_ >= 0) add(Kind::kRetire, reducing_);
  reducing_ = -1;
  in_backward_ = false;
  plan_.clear();
  return steps_;
}

const GatherSchedule::Steps& GatherSchedule::abort() {
  steps_.clear();
  release_all();
  if (reducing_ >= 0) add(Kind::kDrop, reducing_);
  reducing_ = -1;
  in_backward_ = false;
  plan_.clear();
  return steps_;
}

// ---- by hand

const GatherSchedule::Steps& GatherSchedule::unshard(int unit) {
  const Unit& u = at(unit);
  steps_.clear();
  if (u.gathers && u.state == State::kSharded) gather(unit, false);
  return steps_;
}

const GatherSchedule::Steps& GatherSchedule::reshard(int unit) {
  steps_.clear();
  if (at(unit).state == State::kInUse)
    fail("[reshard] the parameters of unit ", unit, " are in use by a forward or backward");
  release(unit);
  return steps_;
}

void GatherSchedule::set_reshard_after_forward(int unit, bool on) {
  at(unit).reshard_after_forward = on;
}
void GatherSchedule::set_reshard_after_backward(int unit, bool on) {
  at(unit).reshard_after_backward = on;
}
void GatherSchedule::set_sync(int unit, bool on) { at(unit).sync = on; }
void GatherSchedule::clear_pending(int unit) { at(unit).pending = false; }

}  // namespace sherd::dist
