#include "distributed/fsdp.h"

#include <algorithm>
#include <array>
#include <unordered_map>
#include <unordered_set>

#include "autograd/grad_mode.h"
#include "core/pointwise.h"
#include "distributed/agree.h"
#include "distributed/first_error.h"
#include "optim/clip_grad.h"

namespace sherd {

FsdpModule::FsdpModule(nn::Module& module, const FsdpOptions& options) : module_(&module) {
  dist::Runtime::make(module, options);
}
FsdpModule::~FsdpModule() = default;

FsdpModule FsdpModule::of(nn::Module& unit) {
  if (!dist::Runtime::of(unit))
    fail("[fsdp] module ", unit.full_name(), " (", unit.type_name(),
         ") is no unit: wrap it, or let a policy choose it");
  return FsdpModule(unit);
}

FsdpModule fully_shard(nn::Module& module, const FullyShardOptions& options) {
  FsdpOptions o;
  o.device_mesh = options.mesh;
  o.mixed_precision = options.mp_policy;
  o.cpu_offload = options.offload_policy;
  o.ignored_parameters = options.ignored_params;
  if (options.mesh.ndim() == 2) o.sharding_strategy = ShardingStrategy::kHybridShard;
  FsdpModule fsdp(module, o);
  if (options.reshard_after_forward)
    fsdp.set_reshard_after_forward(*options.reshard_after_forward, false);
  return fsdp;
}

std::shared_ptr<dist::Runtime> FsdpModule::runtime() const { return dist::Runtime::of(*module_); }

Tensor FsdpModule::clip_grad_norm_(double max_norm, double norm_type) {
  const auto r = runtime();
  r->require_idle("clip_grad_norm_");
  if (&r->root().module() != module_)
    fail("[clip_grad_norm_] ", module_->full_name(), " is a unit below ", r->root().name(),
         ": call it on the root, whose norm counts every parameter once");
  std::vector<Tensor> managed;
  for (const Tensor& p : parameters())
    if (!r->is_ignored(p)) managed.push_back(p);
  return optim::clip_grad_norm_(managed, max_norm, norm_type);
}

namespace {

struct Place {
  nn::Slot* slot;
  std::string name;        // from the wrapped module
  const dist::Unit* unit;  // null: ignored
  std::pair<int, int> entry;
};

// In the order of the module's names, whatever units they are in.
std::vector<Place> places_of(const dist::Runtime& runtime, const nn::Module& module) {
  std::unordered_map<nn::Slot*, Place> by_slot;
  for (auto& u : runtime.units())
    for (auto place : u->order())
      for (nn::Slot* s : u->entry(place).slots) by_slot[s] = {s, "", u.get(), place};
  const std::string path = module.full_name();
  std::vector<Place> places;
  for (nn::Slot* s : module.slots()) {
    if (s->is_buffer || !s->tensor.defined()) continue;
    const auto it = by_slot.find(s);
    places.push_back(it != by_slot.end() ? it->second : Place{s, "", nullptr, {}});
    places.back().name = s->full_name().substr(path.empty() ? 0 : path.size() + 1);
  }
  return places;
}

}  // namespace

void FsdpModule::for_each_full(
    const std::function<Tensor(const std::string&, const Tensor&)>& local,
    const std::function<void(const std::string&, const Tensor&)>& f) {
  const auto r = runtime();
  dist::all_or_none(r->group(), [&] { r->require_idle("reading the full state"); });
  const bool root = r->group()->rank() == 0;
  // After the caller's first error the collectives go on, with zeros where it gives nothing.
  dist::FirstError errors;
  std::unordered_map<DType, DType> given_as;  // what the caller gave for one of that dtype
  for (const Place& p : places_of(*r, *module_)) {
    const Tensor& own = p.unit ? p.unit->entry(p.entry).local : p.slot->tensor;
    Tensor given;
    errors.run([&] { given = local(p.name, own); });
    DType& dtype = given_as.try_emplace(own.dtype(), own.dtype()).first->second;
    if (!given.defined()) given = zeros(own.sizes(), dtype);
    dtype = given.dtype();
    const Tensor whole = p.unit ? p.unit->collect(p.unit->entry(p.entry), given, 0) : given;
    if (root) errors.run_if_none([&] { f(p.name, whole); });
  }
  dist::throw_on_all(r->group(), errors.text());
}

nn::Module::NamedTensors FsdpModule::named_parameters() const {
  nn::Module::NamedTensors result;
  std::unordered_set<TensorImpl*> seen;
  for (auto& p : parts())
    if (seen.insert(p.parameter.impl()).second) result.emplace_back(p.name, p.parameter);
  return result;
}
std::vector<Tensor> FsdpModule::parameters() const {
  std::vector<Tensor> result;
  for (auto& [name, p] : named_parameters()) result.push_back(p);
  return result;
}

std::vector<FsdpModule::Part> FsdpModule::parts() const {
  std::vector<Part> result;
  const auto r = runtime();
  for (const Place& p : places_of(*r, *module_)) {
    if (!p.unit) {
      const Tensor& whole = p.slot->tensor;
      result.push_back({p.name, whole.sizes(), 0, whole.numel(), whole});
      continue;
    }
    const dist::Unit::Entry& e = p.unit->entry(p.entry);
    result.push_back({p.name, e.shape, e.owned.lo, e.owned.hi, e.local});
  }
  return result;
}

void FsdpModule::for_each_full_parameter(
    const std::function<void(const std::string&, const Tensor&)>& f) {
  for_each_full([](const std::string&, const Tensor& p) { return p.detach(); }, f);
}

nn::StateDict FsdpModule::full_state_dict() {
  const dist::CollectiveCall call("full_state_dict");
  nn::StateDict d;
  for_each_full_parameter(
      [&](const std::string& name, const Tensor& t) { d.set(name, t.clone()); });
  if (runtime()->group()->rank() == 0)
    for (auto& [name, t] : persistent_buffers()) d.set(name, t.clone());
  return d;
}

nn::Module::NamedTensors FsdpModule::persistent_buffers() const {
  auto buffers = module_->persistent_buffers();
  for (auto& [name, t] : buffers) t = to_raw(t, runtime()->original_dtype(t));
  return buffers;
}

nn::LoadResult FsdpModule::load_full_state_dict(const nn::StateDict& state, bool strict) {
  const dist::CollectiveCall call("load_full_state_dict");
  const auto buffers = module_->persistent_buffers();
  std::vector<Part> mine;
  nn::LoadResult result;
  // A state may be wrong on one rank alone.
  dist::all_or_none(runtime()->group(), [&] {
    runtime()->require_idle("loading");
    mine = parts();
    std::vector<nn::ExpectedTensor> expected, found;
    for (auto& p : mine) expected.push_back({p.name, p.full_shape});
    for (auto& [name, t] : buffers) {
      if (is_expanded(t))
        fail("[load_full_state_dict] ", name,
             " is expanded, several of its elements lie in one "
             "place: register a contiguous() tensor");
      expected.push_back({name, t.sizes()});
    }
    for (auto& [name, t] : state) found.push_back({name, t.sizes()});
    result = nn::check_state("load_full_state_dict", expected, found, strict);
  });
  NoGrad off;
  for (auto& p : mine)
    if (const Tensor* t = state.find(p.name)) {
      const Tensor c = contiguous_raw(*t);
      Tensor to = p.parameter;
      to.copy_(c.as_strided_raw({p.end - p.begin}, {1}, c.storage_offset() + p.begin)
                   .reshape(to.sizes()));
    }
  for (auto& [name, buffer] : buffers)
    if (const Tensor* t = state.find(name)) {
      Tensor to = buffer;
      to.copy_(t->detach());
    }
  return result;
}

void FsdpModule::unshard() {
  const auto r = runtime();
  const auto units = r->units_of(*module_, true);
  for (int u : units) r->gather(u);  // all are under way before the first is waited for
  for (int u : units) r->unshard(u);
}
FsdpModule::Unsharding FsdpModule::unshard_async() {
  const auto r = runtime();
  for (int u : r->units_of(*module_, true)) r->gather(u);
  return Unsharding(*this);
}
void FsdpModule::reshard() {
  const auto r = runtime();
  for (int u : r->units_of(*module_, true)) r->reshard(u);
}

void FsdpModule::set_requires_gradient_sync(bool on, bool recurse) {
  const auto r = runtime();
  r->require_idle("set_requires_gradient_sync");
  for (int u : r->units_of(*module_, recurse)) r->set_sync(u, on);
}
void FsdpModule::set_reshard_after_forward(bool on, bool recurse) {
  const auto r = runtime();
  for (int u : r->units_of(*module_, recurse)) r->set_reshard_after_forward(u, on);
}
void FsdpModule::set_reshard_after_backward(bool on, bool recurse) {
  const auto r = runtime();
  for (int u : r->units_of(*module_, recurse)) r->set_reshard_after_backward(u, on);
}
void FsdpModule::set_gradient_divide_factor(double factor) {
  const auto r = runtime();
  r->require_idle("set_gradient_divide_factor");
  for (int u : r->units_of(*module_, false))
    for (auto& g : r->units()[u]->groups()) g.bucket->set_divisor(factor);
}

void FsdpModule::set_comm_hook(const dist::CommHook& hook) {
  const auto r = runtime();
  r->require_idle("register_comm_hook");
  const auto units = r->units_of(*module_, true);
  for (int i : units)
    for (auto& g : r->units()[i]->groups())
      if (g.bucket->has_exchange())
        fail("[register_comm_hook] unit ", r->units()[i]->name(),
             " has a hook already: one a unit, for good");
  for (int i : units) {
    const dist::Unit* u = r->units()[i].get();
    for (auto& group : u->groups()) {
      const dist::Unit::FlatGroup* g = &group;
      group.bucket->set_exchange([u, g, hook](const Tensor& flat, const Tensor& output) {
        // Asked now: a module around this one may have been wrapped since.
        const auto runtime = dist::Runtime::of(u->module());
        dist::CommBucket b;
        b.index = runtime->index_of(*u), b.is_last = u == &runtime->root();
        b.buffer = flat, b.output = output;
        b.process_group = runtime->group();
        b.shard_group = u->options().shard, b.replicate_group = u->options().replicate;
        for (auto& e : g->bucket->entries())
          b.gradients.push_back(over_storage(flat.storage(), e.shape, flat.dtype(), e.offset));
        for (auto& e : g->entries) b.parameters.push_back(e.local);
        return hook(b);
      });
    }
  }
}

dist::SummonFullParams FsdpModule::summon_full_params(const SummonOptions& options) {
  const dist::CollectiveCall call("summon_full_params");
  const auto r = runtime();
  return dist::SummonFullParams(r, r->units_of(*module_, options.recurse), options);
}
void FsdpModule::apply(const std::function<void(nn::Module&)>& f) {
  const auto r = runtime();
  r->require_idle("apply");
  const auto summoned = summon_full_params();
  module_->apply(f);
}

std::string FsdpModule::summary() const {
  const auto r = runtime();
  std::vector<std::array<std::string, 7>> rows = {
      {"unit", "strategy", "ranks", "parameters", "piece KiB", "full KiB", "gathered"}};
  int64_t parameters = 0, piece = 0;
  for (int i : r->units_of(*module_, true)) {
    const dist::Unit& u = *r->units()[i];
    const dist::UnitOptions& o = u.options();
    int64_t bytes = 0;
    for (auto& g : u.groups()) bytes += g.piece.nbytes();
    const auto& unit = r->schedule().unit(i);
    const char* when = !unit.gathers                ? "never"
                       : unit.reshard_after_forward ? "forward and backward"
                                                    : "forward, kept for backward";
    rows.push_back({u.name(), name_of(o.strategy),
                    concat(dist::size_of_group(o.shard), " x ", dist::size_of_group(o.replicate)),
                    concat(u.num_parameters()), concat(bytes / 1024), concat(u.full_bytes() / 1024),
                    when});
    parameters += u.num_parameters(), piece += bytes;
  }
  rows.push_back({"all", "", "", concat(parameters), concat(piece / 1024), "", ""});
  std::array<size_t, 7> widths = {};
  for (auto& row : rows)
    for (size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  std::string text;
  for (auto& row : rows) {
    std::string line;
    for (size_t c = 0; c < row.size(); ++c)
      line += row[c] + std::string(widths[c] - row[c].size() + 2, ' ');
    text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  }
  return text;
}

}  // namespace sherd
