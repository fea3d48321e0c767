#include "distributed/runtime.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <unordered_map>
#include <unordered_set>

#include "autograd/checkpoint.h"
#include "core/generator.h"
#include "distributed/distributed.h"
#include "distributed/verify_models.h"

namespace sherd {

namespace {

constexpr std::array kStrategies = {
    std::pair{ShardingStrategy::kFullShard, "full_shard"},
    std::pair{ShardingStrategy::kShardGradOp, "shard_grad_op"},
    std::pair{ShardingStrategy::kNoShard, "no_shard"},
    std::pair{ShardingStrategy::kHybridShard, "hybrid_shard"},
    std::pair{ShardingStrategy::kHybridShardZero2, "hybrid_shard_zero2"}};

bool reshards_after_forward(ShardingStrategy s) {
  return s == ShardingStrategy::kFullShard || s == ShardingStrategy::kHybridShard;
}

}  // namespace

const char* name_of(ShardingStrategy s) {
  for (auto& [strategy, name] : kStrategies)
    if (strategy == s) return name;
  fail("[fsdp] there is no sharding strategy number ", int(s));
}
ShardingStrategy sharding_strategy(const std::string& name) {
  std::string all;
  for (auto& [strategy, known] : kStrategies) {
    if (name == known) return strategy;
    all += concat(all.empty() ? "" : ", ", known);
  }
  fail("[fsdp] there is no sharding strategy '", name, "': there are ", all);
}
bool is_hybrid(ShardingStrategy s) {
  return s == ShardingStrategy::kHybridShard || s == ShardingStrategy::kHybridShardZero2;
}

void check_mixed_precision(const MixedPrecision& p) {
  auto check = [](const char* field, const std::optional<DType>& d) {
    if (d && !is_float(*d))
      fail("[fsdp] mixed_precision.", field, " must be float16, bfloat16, float32 or float64, got ",
           *d);
  };
  check("param_dtype", p.param_dtype);
  check("reduce_dtype", p.reduce_dtype);
  check("buffer_dtype", p.buffer_dtype);
}

namespace dist {
namespace {

void warn(const std::string& text) { std::fprintf(stderr, "[fsdp] %s\n", text.c_str()); }

int64_t nanoseconds_of(const std::function<void()>& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() -
                                                              start)
      .count();
}

}  // namespace

// The nodes of one call of a unit's module.
class Runtime::UnitScope : public autograd::Scope {
 public:
  UnitScope(std::shared_ptr<Runtime> runtime, int unit)
      : runtime_(std::move(runtime)), unit_(unit) {}
  const Runtime* runtime() const { return runtime_.get(); }
  int unit() const { return unit_; }
  bool reads_parameters() const { return !saved_.empty(); }

  void on_enter() override {
    for (auto& [entry, version] : saved_)
      if (entry->local.version() != version)
        fail("[backward] parameter ", entry->name,
             " was changed in place after this forward saved it for backward: run the forward "
             "again after the change");
    runtime_->enter(unit_);
  }
  void on_leave() override { runtime_->leave(unit_); }
  void on_recomputed() override { runtime_->recomputed(unit_); }
  void on_save(const Tensor& t) override {
    const Unit::Entry* e = runtime_->units_[unit_]->find_full(t);
    if (!e) return;
    for (auto& s : saved_)
      if (s.first == e) return;
    saved_.emplace_back(e, e->local.version());
  }

 private:
  std::shared_ptr<Runtime> runtime_;
  int unit_;
  // Parameters whose full tensors backward reads, with the version of the local one then.
  std::vector<std::pair<const Unit::Entry*, uint32_t>> saved_;
};

struct Runtime::Forward {
  int unit;
  ForwardKind kind;
  Ref<UnitScope> scope;
  std::unique_ptr<autograd::ScopeGuard> guard;
};

// On a unit's module. It outlives the facade, so that the module stays usable.
class Runtime::Hooks : public nn::CallHooks {
 public:
  Hooks(std::shared_ptr<Unit> unit) : unit(std::move(unit)) {}
  std::shared_ptr<Unit> unit;
  std::shared_ptr<Runtime> runtime;
  int index = 0;

  ~Hooks() override { unit->detach_module(); }

  void pre(nn::Module&, const nn::TensorVisitor& inputs) override {
    runtime->forward_pre(index, inputs);
  }
  void post(nn::Module&, const nn::TensorVisitor& outputs) override {
    runtime->forward_post(index, outputs);
  }
  void unwind(nn::Module&) noexcept override { runtime->forward_unwind(index); }

  static Hooks* on(nn::Module& m) {
    for (auto& h : m.state().hooks)
      if (auto* mine = dynamic_cast<Hooks*>(h.get())) return mine;
    return nullptr;
  }
};

std::shared_ptr<Runtime> Runtime::of(nn::Module& module) {
  Hooks* h = Hooks::on(module);
  return h ? h->runtime : nullptr;
}

// ---- construction
std::shared_ptr<Runtime> Runtime::make(nn::Module& root, const FsdpOptions& options) {
  std::shared_ptr<Runtime> r(new Runtime(root, options));
  r->build(root);
  return r;
}

Runtime::Runtime(nn::Module& root, const FsdpOptions& options) : options_(options) {
  check_mixed_precision(options.mixed_precision);
  if (Hooks::on(root))
    fail("[fsdp] module ", root.type_name(), " is wrapped already: wrap each module once");
  if (root.is_container())
    fail("[fsdp] ", root.type_name(),
         " is a list without a forward of its own: wrap its elements, or the module above");
  if (!options.device.is_cpu())
    fail("[fsdp] device ", options.device, " is not in this build: use the cpu");
  find_groups();
}

// [Note: groups] `group_` is all ranks: the full strategies shard over it, kNoShard replicates over
// it. The hybrid ones shard over one line of a grid of ranks and replicate over the other.
void Runtime::find_groups() {
  const FsdpOptions& o = options_;
  const DeviceMesh& mesh = o.device_mesh;
  if (mesh.defined() && (o.process_group || o.shard_group || o.replicate_group))
    fail("[fsdp] got a device_mesh and groups: give one or the other");
  if (mesh.ndim() > 2)
    fail("[fsdp] the device_mesh has ", mesh.ndim(),
         " dimensions, should have one, or two of which one replicates and the other shards: take "
         "those of it, mesh[\"shard\"]");
  group_ = mesh.ndim() == 1  ? mesh.get_group()
           : o.process_group ? o.process_group
                             : default_group();
  if (group_->rank() < 0) fail("[fsdp] this rank is not in the process group ", group_->name());
  if (mesh.ndim() == 2) {
    if (mesh.mesh_dim_names().empty())
      fail(
          "[fsdp] the device_mesh has two dimensions without names: name them, \"replicate\" and "
          "\"shard\"");
    const bool named = mesh.has_name("shard") && mesh.has_name("replicate");
    shard_ = named ? mesh.get_group("shard") : mesh.get_group(1);
    replicate_ = named ? mesh.get_group("replicate") : mesh.get_group(0);
  } else if (o.shard_group || o.replicate_group) {
    if (!o.shard_group || !o.replicate_group)
      fail("[fsdp] got a ", o.shard_group ? "shard_group" : "replicate_group",
           " alone: hybrid sharding needs both, shard_group and replicate_group");
    DeviceMesh::from_groups({o.replicate_group, o.shard_group});  // checks
    shard_ = o.shard_group, replicate_ = o.replicate_group;
  }
  if (shard_ && shard_->size() * replicate_->size() != group_->size())
    fail("[fsdp] a shard group of ", shard_->size(), " ranks and a replicate group of ",
         replicate_->size(), " make ", shard_->size() * replicate_->size(), " ranks, and group '",
         group_->name(), "' has ", group_->size(), ": give process_group, that of all of them");
}

// For the hybrid strategies, where nothing was said: the ranks of one node shard.
void Runtime::find_node_groups() {
  if (!options_.auto_wrap_policy || options_.process_group || options_.device_mesh.defined())
    fail("[fsdp] ", name_of(options_.sharding_strategy),
         " needs two groups, one that shards and one that replicates: give a device_mesh of two "
         "dimensions named \"replicate\" and \"shard\", or shard_group and replicate_group (the "
         "ranks of one node shard by default only where an auto_wrap_policy makes all units)");
  const int local = local_world_size(), world = group_->size();
  if (world % local != 0)
    fail("[fsdp] ", world, " ranks do not make whole nodes of ", local,
         ": give shard_group and replicate_group");
  const DeviceMesh mesh = init_device_mesh({world / local, local}, {"replicate", "shard"});
  shard_ = mesh.get_group("shard"), replicate_ = mesh.get_group("replicate");
}

UnitOptions Runtime::unit_options(nn::Module& module) {
  FsdpOptions o = options_;
  if (options_.unit_options) {
    options_.unit_options(module, o);
    check_mixed_precision(o.mixed_precision);
  }
  UnitOptions u;
  u.strategy = o.sharding_strategy;
  u.precision = o.mixed_precision;
  u.sync_module_states = o.sync_module_states;
  const auto several = [](const Group& g) { return g->size() > 1 ? g : nullptr; };
  if (is_hybrid(u.strategy)) {
    if (!shard_) find_node_groups();
    u.shard = several(shard_), u.replicate = several(replicate_);
  } else {
    (u.strategy == ShardingStrategy::kNoShard ? u.replicate : u.shard) = several(group_);
  }
  return u;
}

Runtime::~Runtime() {
  autograd::remove_observer(this);
  for (auto& u : units_) u->detach_sinks();
}

void Runtime::build(nn::Module& root) {
  // Units: what the policy chose, what was wrapped by hand before (adopted), and the root.
  std::unordered_set<nn::Module*> chosen;
  if (options_.auto_wrap_policy)
    for (nn::Module* m : options_.auto_wrap_policy(root)) chosen.insert(m);
  chosen.erase(&root);

  std::unordered_map<nn::ModuleState*, nn::Module*>
      owner;  // module state -> the unit's module that claims its parameters
  std::vector<nn::Module*> unit_modules;  // children first
  const std::unordered_set<nn::Module*> ignored(options_.ignored_modules.begin(),
                                                options_.ignored_modules.end());
  // above: the unit that takes what no unit below claims; null below an ignored module.
  const std::function<void(nn::Module&, nn::Module*)> claim = [&](nn::Module& m,
                                                                  nn::Module* above) {
    const bool wrapped = Hooks::on(m), left_out = ignored.count(&m) > 0;
    if (wrapped && left_out)
      fail("[fsdp] module ", m.full_name(),
           " is in ignored_modules and was wrapped before: one or the other");
    const bool is_unit = &m == &root || wrapped || (above && chosen.count(&m) && !m.is_container());
    nn::Module* unit = left_out ? nullptr : is_unit ? &m : above;
    owner[&m.state()] = unit;
    for (auto& [name, child] : m.named_children()) claim(*child, unit);
    if (&m == &root || (is_unit && !left_out)) unit_modules.push_back(&m);
  };
  claim(root, nullptr);
  if (ignored.count(&root))
    warn("the root is in ignored_modules: nothing is sharded but units that were wrapped before");
  for (const Tensor& p : options_.ignored_parameters) ignored_.insert(p.impl());
  for (nn::Slot* s : root.slots())
    if (!s->is_buffer && s->tensor.defined() && !owner[s->owner]) ignored_.insert(s->tensor.impl());
  const auto is_managed = [&](const nn::Slot& s) {
    return !s.is_buffer && s.tensor.defined() && !is_ignored(s.tensor);
  };

  // Tied parameters across chosen units belong to their lowest common ancestor's unit: here, the
  // root.
  std::unordered_map<TensorImpl*, nn::Module*> claimed;
  std::unordered_set<TensorImpl*> shared;
  for (nn::Slot* s : root.slots()) {
    if (!is_managed(*s)) continue;
    auto [it, fresh] = claimed.emplace(s->tensor.impl(), owner[s->owner]);
    if (!fresh && it->second != owner[s->owner]) shared.insert(s->tensor.impl());
  }
  std::unordered_map<nn::Module*, std::vector<nn::Slot*>> slots;
  for (nn::Slot* s : root.slots()) {
    if (!is_managed(*s)) continue;
    nn::Module* unit = shared.count(s->tensor.impl()) ? &root : owner[s->owner];
    if (shared.count(s->tensor.impl()) && s->tensor.impl()->placeholder)
      fail("[fsdp] parameter ", s->full_name(),
           " is shared by units that were wrapped one by one: wrap only their "
           "common parent, or let a policy wrap");
    slots[unit].push_back(s);
  }

  Tensor seed = empty({1}, kInt64);
  *seed.data<int64_t>() = int64_t(options_.seed.value_or(default_generator().state().seed));
  if (group_->size() > 1) group_->broadcast(seed, 0, {.label = "fsdp seed"}).wait();

  for (nn::Module* m : unit_modules)
    if (Hooks* wrapped = Hooks::on(*m)) {
      wrapped->runtime->require_idle("wrapping a module around it");
      agree_with(*wrapped->runtime);
    }
  std::vector<ScheduledUnit> scheduled;
  std::vector<std::shared_ptr<Runtime>> adopted;  // inner roots, whose units are this one's now
  for (nn::Module* m : unit_modules) {
    Hooks* wrapped = Hooks::on(*m);
    std::shared_ptr<Hooks> hooks;
    if (wrapped) {
      if (adopted.empty() || adopted.back() != wrapped->runtime)
        adopted.push_back(wrapped->runtime);
      for (auto& h : m->state().hooks)
        if (h.get() == wrapped) hooks = std::static_pointer_cast<Hooks>(h);
    } else {
      const std::string name =
          m == &root ? (m->full_name().empty() ? "root" : m->full_name()) : m->full_name();
      auto unit = std::make_shared<Unit>(*m, name, slots[m], unit_options(*m),
                                         uint64_t(*seed.data<int64_t>()));
      hooks = std::make_shared<Hooks>(unit);
      m->state().hooks.insert(m->state().hooks.begin(), hooks);
    }
    if (!wrapped && hooks->unit->options().precision.buffer_dtype)
      for (nn::Slot* s : m->slots())
        if (s->is_buffer && s->tensor.defined() && is_float(s->tensor.dtype()) &&
            owner[s->owner] == m)
          buffers_.push_back(
              {s, s->tensor.dtype(), *hooks->unit->options().precision.buffer_dtype});
    hooks->runtime = shared_from_this();
    hooks->index = int(units_.size());
    units_.push_back(hooks->unit);
    const Unit& u = *hooks->unit;
    ScheduledUnit s;
    s.full_bytes = u.full_bytes(), s.grad_bytes = u.gradient_bytes(), s.gathers = u.gathers();
    const bool keeps = m == &root && !options_.reshard_root_after_forward;
    s.reshard_after_forward = u.options().reshard_after_forward.value_or(
        !keeps && reshards_after_forward(u.options().strategy));
    s.reshard_after_backward = u.options().reshard_after_backward;
    scheduled.push_back(s);
  }
  for (auto& inner : adopted) {
    ignored_.insert(inner->ignored_.begin(), inner->ignored_.end());
    buffers_.insert(buffers_.end(), inner->buffers_.begin(), inner->buffers_.end());
    inner->units_.clear();
  }
  root.materialize(uint64_t(*seed.data<int64_t>()));  // what was ignored
  GatherSchedule::Options o;
  o.forward_prefetch = options_.forward_prefetch;
  o.backward_prefetch = options_.backward_prefetch;
  o.max_bytes = options_.max_gathered_bytes;
  schedule_ = std::make_unique<GatherSchedule>(std::move(scheduled), o);
  incomplete_.assign(units_.size(), 0);
  syncs_.assign(units_.size(), true);
  for (size_t i = 0; i < units_.size(); ++i)
    for (auto& g : units_[i]->groups())
      g.bucket->on_complete = [this, i] {
        if (--incomplete_[i] == 0) gradients_complete(int(i));
      };
  verify();
  if (options_.sync_module_states && group_->size() > 1)
    for (auto& [name, t] : root.named_buffers())
      if (t.numel()) {
        group_->broadcast(t, 0, {.label = "sync_module_states " + name}).wait();
        t.bump_version();
      }
  autograd::add_observer(this);
}

// What can only be one for all units, whoever wrapped them.
void Runtime::agree_with(const Runtime& inner) const {
  const auto compare = [&](const char* option, int64_t here, int64_t there) {
    if (here != there)
      fail("[fsdp] ", option, " is ", there, " for ", inner.root().name(),
           ", which was wrapped before, and ", here,
           " for the module around it: give all the same");
  };
  compare("max_gathered_bytes", options_.max_gathered_bytes, inner.options_.max_gathered_bytes);
  compare("forward_prefetch", options_.forward_prefetch, inner.options_.forward_prefetch);
  compare("backward_prefetch", int(options_.backward_prefetch),
          int(inner.options_.backward_prefetch));
}

void Runtime::verify() const {
  std::vector<std::string> lines;
  lines.push_back(concat("backward_prefetch ", int(options_.backward_prefetch),
                         ", forward_prefetch ", options_.forward_prefetch, ", max_gathered_bytes ",
                         options_.max_gathered_bytes));
  for (auto& u : units_) {
    lines.push_back(concat("unit ", u->name(), ", ", name_of(u->options().strategy), " over ",
                           size_of_group(u->options().shard), " x ",
                           size_of_group(u->options().replicate), " ranks"));
    for (auto place : u->order()) {
      const Unit::Entry& e = u->entry(place);
      const Unit::FlatGroup& g = u->groups()[place.first];
      lines.push_back(concat("parameter ", e.name, " ", e.shape, " ", g.master, " computed in ",
                             g.compute, e.local.requires_grad() ? "" : " frozen"));
    }
  }
  for (auto& [name, t] : root().module().named_buffers())
    lines.push_back(concat("buffer ", name, " ", t.sizes(), " ", t.dtype()));
  verify_equal_on_all_ranks("fsdp", group_, lines);
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
void Runtime::carry_out(const GatherSchedule::Steps& steps) {
  const GatherSchedule::Steps now = steps;
  for (const Step& s : now) carry_out(s);
}

void Runtime::carry_out(const Step& step) {
  Unit& u = *units_[step.unit];
  if (options_.record_trace) stats_.trace.push_back(to_string(step));
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
        for (auto& g : u.groups()) g.bucket->retire();
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

void Runtime::forward_pre(int unit, const nn::TensorVisitor& inputs) {
  Unit& u = *units_[unit];
  const ForwardKind kind = forward_kind();
  if (summoned_) fail("[fsdp] forward of ", u.name(), " is not possible inside summon_full_params");
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
  carry_out(schedule_->forward_post(unit, f->kind, has_graph));
  if (schedule_->state(unit) == GatherSchedule::State::kIdle) units_[unit]->set_usable(false);
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
  carry_out(schedule_->enter(unit));
  units_[unit]->set_usable(true);
}

void Runtime::leave(int unit) {
  carry_out(schedule_->leave(unit));
  if (schedule_->state(unit) == GatherSchedule::State::kIdle) units_[unit]->set_usable(false);
}

void Runtime::recomputed(int unit) { carry_out(schedule_->skip(unit)); }

void Runtime::gradients_complete(int unit) {
  carry_out(schedule_->gradients_complete(unit));
  if (!syncs_now_[unit])
    for (auto& g : units_[unit]->groups()) g.bucket->keep_pending();
}

void Runtime::on_end(bool failed) {
  if (!in_backward_) return;
  in_backward_ = false;
  if (failed) {
    carry_out(schedule_->abort());
    for (int i = 0; i < int(units_.size()); ++i) {
      for (auto& g : units_[i]->groups()) g.bucket->abort();
      schedule_->clear_pending(i);
    }
    while (!forwards_.empty()) forwards_.pop_back();  // scopes close in reverse
    depth_ = 0;
    return;
  }
  carry_out(schedule_->end_backward());
}

}  // namespace dist
}  // namespace sherd
