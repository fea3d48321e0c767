#include "distributed/runtime.h"

#include <chrono>
#include <cstdio>
#include <exception>
#include <unordered_map>

#include "autograd/checkpoint.h"
#include "distributed/first_error.h"
#include "distributed/fsdp_join.h"
#include "distributed/runtime_hooks.h"

namespace sherd::dist {
namespace {

int64_t nanoseconds_of(const std::function<void()>& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() -
                                                              start)
      .count();
}

}  // namespace

std::shared_ptr<Runtime> Runtime::of(nn::Module& module) {
  const std::shared_ptr<Hooks> h = Hooks::on(module);
  return h ? h->runtime : nullptr;
}

int Runtime::index_of(const Unit& unit) const {
  for (size_t i = 0; i < units_.size(); ++i)
    if (units_[i].get() == &unit) return int(i);
  fail("[fsdp] unit ", unit.name(), " belongs to another root");
}

void Runtime::require_idle(const char* what) const {
  if (summoned_)
    fail("[fsdp] ", what, " is not possible inside summon_full_params of ", root().name());
  if (!is_idle())
    fail("[fsdp] ", what, " is not possible during forward or backward of ", root().name());
}

Joinable& Runtime::joinable() {
  if (!join_) join_ = std::make_unique<FsdpJoinable>(*this);
  return *join_;
}
void Runtime::repeat(const GatherSchedule::Steps& steps) {
  for (auto& u : units_)
    for (auto& g : u->groups()) g.bucket->take_up_changes();
  carry_out(steps);
  for (const Step& s : steps)
    if (s.kind == Step::Kind::kReduce) schedule_->clear_pending(s.unit);
  for (auto& u : units_) u->set_usable(false);
}

void Runtime::begin_summon() {
  require_idle("summon_full_params");
  check_slots();
  summoned_ = true;
}

std::vector<int> Runtime::units_of(const nn::Module& module, bool recurse) const {
  std::vector<int> result;
  for (size_t i = 0; i < units_.size(); ++i)
    for (auto* m = &units_[i]->module().state(); m; m = recurse ? m->parent : nullptr)
      if (m == &module.state()) result.push_back(int(i));
  return result;
}

// ---- steps

// All of them, whatever one throws: other ranks issue the collectives of those after it, and the
// schedule takes them for done.
void Runtime::carry_out(const GatherSchedule::Steps& steps) {
  const GatherSchedule::Steps now = steps;
  FirstError errors;
  for (const Step& s : now) errors.run([&] { carry_out(s); });
  errors.rethrow();
}

void Runtime::carry_out(const Step& step) {
  Unit& u = *units_[step.unit];
  if (options_.record_trace) stats_.trace.push_back(to_string(step));
  if (join_) join_->note(step);
  switch (step.kind) {
    case Step::Kind::kGather:
      ++stats_.gathers;
      stats_.gathered_bytes += u.full_bytes();
      u.gather("gather unit " + u.name());
      break;
    case Step::Kind::kShow:
      stats_.wait_gather_ns += nanoseconds_of([&] { u.wait(); });
      u.show();
      break;
    case Step::Kind::kRelease: {
      const Unit::Entry* changed = u.changed_full();
      u.release();
      if (changed)
        fail("[fsdp] parameter ", changed->name,
             " was changed in place while it was gathered, which is lost now that "
             "its unit is sharded again: change the local part, fsdp.parameters(), instead");
      break;
    }
    case Step::Kind::kPost:
      break;
    case Step::Kind::kReduce: {
      std::vector<GradBucket*> buckets;
      for (auto& g : u.groups())
        // The same on every rank, whatever this one used.
        if (g.layout->requires_grad() || g.bucket->was_expected() || g.bucket->is_pending())
          buckets.push_back(g.bucket.get());
      ++stats_.reductions;
      for (auto* b : buckets) stats_.reduced_bytes += b->reduced_bytes();
      GradBucket::reduce(buckets, "reduce unit " + u.name());
      break;
    }
    case Step::Kind::kRetire:
      stats_.wait_reduce_ns += nanoseconds_of([&] {
        FirstError errors;
        for (auto& g : u.groups()) errors.run([&] { g.bucket->retire(); });
        errors.rethrow();
      });
      break;
    case Step::Kind::kDrop:
      for (auto& g : u.groups()) g.bucket->abort();
      break;
  }
}

FsdpStats Runtime::stats() const {
  FsdpStats s = stats_;
  const GatherSchedule::Counts& now = schedule_->counts();
  s.early_gathers = now.early - counts_before_.early;
  s.mispredicted = now.mispredicted - counts_before_.mispredicted;
  s.repaired = now.repaired - counts_before_.repaired;
  return s;
}
void Runtime::reset_stats() {
  stats_ = {};
  counts_before_ = schedule_->counts();
}

void Runtime::set_sync(const std::vector<bool>& on) {
  for (size_t i = 0; i < on.size(); ++i) set_sync(int(i), on[i]);
}
void Runtime::set_sync(int unit, bool on) {
  schedule_->set_sync(unit, on);
  syncs_[unit] = on;
}
void Runtime::set_reshard_after_forward(int unit, bool on) {
  units_[unit]->options().reshard_after_forward = on;
  schedule_->set_reshard_after_forward(unit, on);
}
void Runtime::set_reshard_after_backward(int unit, bool on) {
  units_[unit]->options().reshard_after_backward = on;
  schedule_->set_reshard_after_backward(unit, on);
}
void Runtime::gather(int unit) {
  require_idle("unshard");
  carry_out(schedule_->unshard(unit));
}
void Runtime::unshard(int unit) {
  gather(unit);
  units_[unit]->show();
}
void Runtime::reshard(int unit) {
  require_idle("reshard");
  carry_out(schedule_->reshard(unit));
}

// ---- forward
ForwardKind Runtime::forward_kind() const {
  if (autograd::is_recomputing() && in_backward_) return ForwardKind::kRecomputation;
  return grad_enabled() || autograd::is_checkpointing() ? ForwardKind::kTraining
                                                        : ForwardKind::kInference;
}

void Runtime::check_slots() {
  for (auto& u : units_) u->check_slots();
}

void Runtime::cast_buffers() {
  for (auto& b : buffers_)
    if (b.slot->tensor.dtype() != b.computed)
      b.slot->tensor.set_data(to_raw(b.slot->tensor, b.computed));
}

DType Runtime::original_dtype(const Tensor& buffer) const {
  for (auto& b : buffers_)
    if (b.slot->tensor.is_same(buffer)) return b.original;
  return buffer.dtype();
}

void Runtime::say(const char* what, int unit) const {
  if (talks_)
    std::fprintf(stderr, "[fsdp] rank %d: %s of unit %d (%s)\n", group_->rank(), what, unit,
                 units_[unit]->name().c_str());
}

void Runtime::forward_pre(int unit, const nn::TensorVisitor& inputs) {
  Unit& u = *units_[unit];
  const ForwardKind kind = forward_kind();
  say("pre-forward", unit);
  if (summoned_) fail("[fsdp] forward of ", u.name(), " is not possible inside summon_full_params");
  if (join_ && depth_ == 0 && kind != ForwardKind::kRecomputation)
    join_->begin_forward(kind == ForwardKind::kTraining);
  if (depth_ == 0 && kind != ForwardKind::kRecomputation) {
    check_slots();
    cast_buffers();
  }
  const MixedPrecision& p = u.options().precision;
  if (p.param_dtype && p.cast_forward_inputs) {
    // One tensor given twice stays one tensor: attention(x, x, x).
    std::vector<std::pair<Tensor, Tensor>> cast;
    inputs([&](Tensor& t) {
      if (!is_float(t.dtype()) || t.dtype() == *p.param_dtype) return;
      for (auto& [from, to] : cast)
        if (from.is_same(t)) {
          t = to;
          return;
        }
      const Tensor from = t;
      t = t.to(*p.param_dtype);
      cast.emplace_back(from, t);
    });
  }
  // Pushed first, so that unwind finds it if the gather throws.
  auto f = std::make_unique<Forward>();
  f->unit = unit, f->kind = kind;
  f->scope = make_ref<UnitScope>(shared_from_this(), unit);
  Forward& open = *f;
  forwards_.push_back(std::move(f));
  ++depth_;
  carry_out(schedule_->forward_pre(unit, kind, u.is_stale()));
  u.set_usable(true);
  open.guard = std::make_unique<autograd::ScopeGuard>(open.scope);
}

void Runtime::forward_post(int unit, const nn::TensorVisitor& outputs) {
  // A result that is a parameter itself would lose its bytes with it.
  outputs([&](Tensor& t) {
    for (auto& g : units_[unit]->groups())
      if (!g.whole && t.storage().get() == g.full.storage().get()) {
        t = t.clone();
        break;
      }
  });
  std::unique_ptr<Forward> f = std::move(forwards_.back());
  forwards_.pop_back();
  f->guard.reset();
  --depth_;
  const bool has_graph = f->scope->has_nodes() || autograd::is_checkpointing();
  FirstError errors;
  errors.run([&] { carry_out(schedule_->forward_post(unit, f->kind, has_graph)); });
  if (schedule_->state(unit) == GatherSchedule::State::kIdle) units_[unit]->set_usable(false);
  say("post-forward", unit);
  errors.rethrow();
}

void Runtime::forward_unwind(int unit) noexcept {
  // The pre of this very unit may have thrown before it opened anything.
  if (forwards_.empty() || forwards_.back()->unit != unit) return;
  std::unique_ptr<Forward> f = std::move(forwards_.back());
  forwards_.pop_back();
  f->guard.reset();
  --depth_;
  try {
    if (f->kind != ForwardKind::kRecomputation) carry_out(schedule_->forward_unwind(unit));
  } catch (const std::exception&) {  // the first exception is on its way already
  }
}

// ---- backward
bool Runtime::on_plan(const autograd::Plan& plan) {
  std::vector<GatherSchedule::PlanItem> items;
  for (auto& item : plan.scopes)
    if (auto* s = dynamic_cast<UnitScope*>(item.scope); s && s->runtime() == this)
      items.push_back({s->unit(), item.recomputed || s->reads_parameters() ||
                                      options_.gather_in_backward == GatherInBackward::kAlways});
  std::unordered_map<autograd::GradSink*, std::vector<autograd::AutogradMeta*>> expected;
  for (auto& [leaf, n] : plan.leaves)
    if (leaf->sink) expected[leaf->sink.get()].push_back(leaf);
  bool mine = !items.empty();
  for (auto& u : units_)
    for (auto& g : u->groups()) mine = mine || expected.count(g.bucket.get());
  if (!mine) return false;
  if (plan.create_graph)
    fail("[backward] create_graph through the sharded model ", root().name(),
         " is not supported: take second "
         "derivatives of the unwrapped model");
  if (summoned_)
    fail("[backward] a backward of ", root().name(), " is not possible inside summon_full_params");
  if (in_backward_) fail("[backward] a backward of ", root().name(), " began inside another one");
  if (depth_ > 0) fail("[backward] backward of ", root().name(), " began inside its forward");
  check_slots();
  syncs_now_ = syncs_;
  for (size_t i = 0; i < units_.size(); ++i) {
    incomplete_[i] = 0;
    for (auto& g : units_[i]->groups()) {
      if (!plan.accumulates) continue;
      const auto& leaves = expected[g.bucket.get()];
      const bool was_pending = g.bucket->is_pending();
      g.bucket->expect(leaves);
      if (was_pending && !g.bucket->is_pending()) schedule_->clear_pending(int(i));
      incomplete_[i] += !leaves.empty();
    }
  }
  schedule_->begin_backward(std::move(items), plan.accumulates);
  in_backward_ = true;
  return true;
}

void Runtime::enter(int unit) {
  say("pre-backward", unit);
  carry_out(schedule_->enter(unit));
  units_[unit]->set_usable(true);
}

void Runtime::leave(int unit) {
  FirstError errors;
  errors.run([&] { carry_out(schedule_->leave(unit)); });
  if (schedule_->state(unit) == GatherSchedule::State::kIdle) units_[unit]->set_usable(false);
  say("post-backward", unit);
  errors.rethrow();
}

void Runtime::recomputed(int unit) { carry_out(schedule_->skip(unit)); }

void Runtime::gradients_complete(int unit) {
  FirstError errors;
  errors.run([&] { carry_out(schedule_->gradients_complete(unit)); });
  if (!syncs_now_[unit])
    for (auto& g : units_[unit]->groups()) g.bucket->keep_pending();
  errors.rethrow();
}

void Runtime::on_end(bool failed) {
  if (!in_backward_) return;
  in_backward_ = false;
  if (failed) {
    FirstError errors;
    errors.run([&] { carry_out(schedule_->abort()); });
    for (int i = 0; i < int(units_.size()); ++i) {
      for (auto& g : units_[i]->groups()) g.bucket->abort();
      schedule_->clear_pending(i);
    }
    while (!forwards_.empty()) forwards_.pop_back();  // scopes close in reverse
    depth_ = 0;
    return errors.rethrow();
  }
  carry_out(schedule_->end_backward());
}

}  // namespace sherd::dist
