#include <algorithm>
#include <cstdio>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "core/context.h"
#include "core/generator.h"
#include "distributed/agree.h"
#include "distributed/agree_bf16.h"
#include "distributed/broadcast_coalesced.h"
#include "distributed/debug.h"
#include "distributed/distributed.h"
#include "distributed/fsdp_join.h"
#include "distributed/nodes.h"
#include "distributed/runtime_hooks.h"
#include "distributed/verify_models.h"

namespace sherd::dist {
namespace {

bool reshards_after_forward(ShardingStrategy s) {
  return s == ShardingStrategy::kFullShard || s == ShardingStrategy::kHybridShard;
}

void warn(const std::string& text) { std::fprintf(stderr, "[fsdp] %s\n", text.c_str()); }

bool computes_in_bf16(const std::vector<std::shared_ptr<Unit>>& units) {
  for (auto& u : units)
    for (auto& g : u->groups())
      if (g.compute == kBFloat16) return true;
  return false;
}

struct Said {  // once a rank
  bool one_rank = false;
};

}  // namespace

std::shared_ptr<Runtime> Runtime::make(nn::Module& root, const FsdpOptions& options) {
  std::shared_ptr<Runtime> r(new Runtime(root, options));
  r->build(root);
  return r;
}

Runtime::Runtime(nn::Module& root, const FsdpOptions& options)
    : options_(options), talks_(debug_option(DebugOption::kFsdp)) {
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
  const std::vector<std::vector<int>> nodes = ranks_by_node(group_);
  // All ranks make all groups.
  const auto join = [&](const std::vector<int>& ranks, Group& mine) {
    const Group g = int(ranks.size()) == group_->size() ? group_ : new_group(ranks);
    if (g->rank() >= 0) mine = g;
  };
  for (auto& ranks : nodes) join(ranks, shard_);
  for (size_t i = 0; i < nodes[0].size(); ++i) {
    std::vector<int> ranks;
    for (auto& node : nodes) ranks.push_back(node[i]);
    join(ranks, replicate_);
  }
}

// A unit's own options: the runtime's, and what the user changes of them.
FsdpOptions Runtime::options_of(nn::Module& module) const {
  FsdpOptions o = options_;
  if (options_.unit_options) {
    options_.unit_options(module, o);
    check_mixed_precision(o.mixed_precision);
  }
  return o;
}

UnitOptions Runtime::unit_options(const FsdpOptions& o) {
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

// Which modules are units, and what each of them takes.
struct Runtime::UnitPlan {
  std::vector<nn::Module*> modules;  // children first, the root last
  std::unordered_map<nn::Module*, std::vector<nn::Slot*>> parameters;  // by unit's module
  std::unordered_map<nn::Module*, FsdpOptions> options;  // by unit's module, of those that are new
  // By module: the unit's module that its parameters go to; null: none.
  std::unordered_map<nn::ModuleState*, nn::Module*> owner;
};

// Units: what the policy chose, what was wrapped by hand before, and the root. Notes what is
// ignored.
Runtime::UnitPlan Runtime::plan_units(nn::Module& root) {
  UnitPlan plan;
  std::unordered_set<nn::Module*> chosen;
  if (options_.auto_wrap_policy)
    for (nn::Module* m : options_.auto_wrap_policy(root)) chosen.insert(m);
  const std::unordered_set<nn::Module*> ignored(options_.ignored_modules.begin(),
                                                options_.ignored_modules.end());
  // above: the unit that takes what no unit below claims; null below an ignored module.
  const std::function<void(nn::Module&, nn::Module*)> claim = [&](nn::Module& m,
                                                                  nn::Module* above) {
    const bool is_root = &m == &root, wrapped = Hooks::on(m) != nullptr,
               left_out = ignored.count(&m) > 0;
    if (wrapped && left_out)
      fail("[fsdp] module ", m.full_name(),
           " is in ignored_modules and was wrapped before: one or the other");
    const bool is_unit = is_root || wrapped || (above && chosen.count(&m) && !m.is_container());
    nn::Module* unit = left_out ? nullptr : is_unit ? &m : above;
    plan.owner[&m.state()] = unit;
    for (auto& [name, child] : m.named_children()) claim(*child, unit);
    if (is_root || (is_unit && !left_out)) plan.modules.push_back(&m);
  };
  claim(root, nullptr);
  if (ignored.count(&root))
    warn("the root is in ignored_modules: nothing is sharded but units that were wrapped before");
  for (const Tensor& p : options_.ignored_parameters) ignored_.insert(p.impl());
  for (nn::Slot* s : root.slots())
    if (!s->is_buffer && s->tensor.defined() && !plan.owner[s->owner])
      ignored_.insert(s->tensor.impl());
  const auto is_managed = [&](const nn::Slot& s) {
    return !s.is_buffer && s.tensor.defined() && !is_ignored(s.tensor);
  };

  // Parameters that are tied across units belong to the root's.
  std::unordered_map<TensorImpl*, nn::Module*> claimed;
  std::unordered_set<TensorImpl*> shared;
  for (nn::Slot* s : root.slots()) {
    if (!is_managed(*s)) continue;
    auto [it, fresh] = claimed.emplace(s->tensor.impl(), plan.owner[s->owner]);
    if (!fresh && it->second != plan.owner[s->owner]) shared.insert(s->tensor.impl());
  }
  std::unordered_set<const autograd::GradSink*> own;
  for (nn::Module* m : plan.modules)
    if (const auto h = Hooks::on(*m))
      for (auto& g : h->unit->groups()) own.insert(g.bucket.get());
  for (nn::Slot* s : root.slots()) {
    if (!is_managed(*s)) continue;
    const autograd::AutogradMeta* meta = autograd::meta_of(s->tensor);
    if (meta && meta->sink && !own.contains(meta->sink.get()))
      fail("[fsdp] parameter ", s->full_name(),
           " is in another parallel wrapper already (DistributedDataParallel?): put it into "
           "ignored_parameters, or its module into ignored_modules, if that one is to reduce its "
           "gradient");
    const bool is_shared = shared.count(s->tensor.impl()) > 0, cut = s->tensor.impl()->placeholder;
    nn::Module* unit = is_shared ? &root : plan.owner[s->owner];
    if (is_shared && cut)
      fail("[fsdp] parameter ", s->full_name(),
           " is shared by units that were wrapped one by one: wrap only their "
           "common parent, or let a policy wrap");
    if (cut && !Hooks::on(*unit))
      fail("[fsdp] parameter ", s->full_name(),
           " was cut by a wrapping that failed: build the model anew");
    plan.parameters[unit].push_back(s);
  }
  return plan;
}

// [Note: a failed wrap] Modules get their hooks, and inner roots give up their units, when nothing
// can fail any more. So a wrap that throws leaves what was wrapped before as it was. Parameters
// that it had cut stay cut: computing with them and wrapping them again are errors.
void Runtime::build(nn::Module& root) {
  UnitPlan plan;
  // The user's policies and options, and what was wrapped before: these may fail on one rank alone.
  all_or_none(group_, [&] {
    plan = plan_units(root);
    for (nn::Module* m : plan.modules)
      if (const auto wrapped = Hooks::on(*m)) {
        wrapped->runtime->require_idle("wrapping a module around it");
        agree_with(*wrapped->runtime);
      } else {
        plan.options.emplace(m, options_of(*m));
      }
  });
  Tensor seeds = empty({1}, kInt64);
  *seeds.data<int64_t>() = int64_t(options_.seed.value_or(default_generator().state().seed));
  if (group_->size() > 1) group_->broadcast(seeds, 0, {.label = "fsdp seed"}).wait();
  const uint64_t seed = uint64_t(seeds.item<int64_t>());

  std::vector<std::shared_ptr<Hooks>> hooks;  // by unit
  std::vector<std::shared_ptr<Unit>> units, made;
  try {
    for (nn::Module* m : plan.modules) {
      std::shared_ptr<Hooks> h = Hooks::on(*m);
      if (!h) {
        const std::string name = m->full_name().empty() ? "root" : m->full_name();
        made.push_back(std::make_shared<Unit>(*m, name, plan.parameters[m],
                                              unit_options(plan.options[m]), seed));
        h = std::make_shared<Hooks>(made.back());
        if (const auto computed = made.back()->options().precision.buffer_dtype)
          for (nn::Slot* s : m->slots())
            if (s->is_buffer && s->tensor.defined() && is_float(s->tensor.dtype()) &&
                plan.owner[s->owner] == m)
              buffers_.push_back({s, s->tensor.dtype(), *computed});
      }
      hooks.push_back(h);
      units.push_back(h->unit);
    }
    root.materialize(seed);  // what was ignored
    make_schedule(units);
    verify(root, units);
    if (computes_in_bf16(units)) agree_on_bf16_products(group_);
    if (options_.sync_module_states) {
      std::vector<Tensor> buffers;
      for (auto& [name, t] : root.named_buffers()) buffers.push_back(t);
      broadcast_coalesced(group_, buffers, 0, "sync_module_states");
    }
  } catch (...) {
    for (auto& u : made) u->detach_sinks();
    throw;
  }

  incomplete_.assign(units.size(), 0);
  syncs_.assign(units.size(), true);
  for (size_t i = 0; i < units.size(); ++i) {
    if (const std::shared_ptr<Runtime> inner = hooks[i]->runtime) {
      if (!inner->units_.empty()) {
        ignored_.insert(inner->ignored_.begin(), inner->ignored_.end());
        buffers_.insert(buffers_.end(), inner->buffers_.begin(), inner->buffers_.end());
      }
      inner->units_.clear();
    } else {
      auto& all = plan.modules[i]->state().hooks;
      all.insert(all.begin(), hooks[i]);
    }
    hooks[i]->runtime = shared_from_this();
    hooks[i]->index = int(i);
    for (auto& g : units[i]->groups())
      g.bucket->on_complete = [this, i] {
        if (--incomplete_[i] == 0) gradients_complete(int(i));
      };
  }
  units_ = std::move(units);
  autograd::add_observer(this);
  if (group_->size() == 1 && options_.sharding_strategy != ShardingStrategy::kNoShard &&
      !std::exchange(Context::current().state<Said>().one_rank, true))
    warn(concat("there is one rank: ", name_of(options_.sharding_strategy),
                " works as no_shard, nothing is cut or gathered"));
}

void Runtime::make_schedule(const Units& units) {
  std::vector<ScheduledUnit> scheduled;
  for (auto& unit : units) {
    const Unit& u = *unit;
    ScheduledUnit s;
    s.full_bytes = u.full_bytes(), s.grad_bytes = u.gradient_bytes(), s.gathers = u.gathers();
    const bool keeps = unit == units.back() && !options_.reshard_root_after_forward;
    s.reshard_after_forward = u.options().reshard_after_forward.value_or(
        !keeps && reshards_after_forward(u.options().strategy));
    s.reshard_after_backward = u.options().reshard_after_backward;
    scheduled.push_back(s);
  }
  GatherSchedule::Options o;
  o.forward_prefetch = options_.forward_prefetch;
  o.backward_prefetch = options_.backward_prefetch;
  o.max_bytes = options_.max_gathered_bytes;
  schedule_ = std::make_unique<GatherSchedule>(std::move(scheduled), o);
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

void Runtime::verify(nn::Module& root, const Units& units) const {
  std::vector<std::string> lines;
  lines.push_back(concat("backward_prefetch ", int(options_.backward_prefetch),
                         ", forward_prefetch ", options_.forward_prefetch, ", max_gathered_bytes ",
                         options_.max_gathered_bytes));
  for (auto& u : units) {
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
  for (auto& [name, t] : root.named_buffers())
    lines.push_back(concat("buffer ", name, " ", t.sizes(), " ", t.dtype()));
  verify_equal_on_all_ranks("fsdp", group_, lines);
}

}  // namespace sherd::dist
