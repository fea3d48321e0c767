#include "distributed/fsdp.h"

#include <unordered_map>
#include <unordered_set>

#include "autograd/grad_mode.h"
#include "optim/clip_grad.h"

namespace sherd {

FsdpModule::FsdpModule(nn::Module& module, const FsdpOptions& options) : module_(&module) {
  dist::Runtime::make(module, options);
}
FsdpModule::~FsdpModule() = default;

std::shared_ptr<dist::Runtime> FsdpModule::runtime() const { return dist::Runtime::of(*module_); }

Tensor FsdpModule::clip_grad_norm_(double max_norm, double norm_type) {
  const auto r = runtime();
  r->require_idle("clip_grad_norm_");
  if (&r->root().module() != module_)
    fail("[clip_grad_norm_] ", module_->full_name(), " is a unit below ", r->root().name(),
         ": call it on the root, whose norm counts every parameter once");
  return optim::clip_grad_norm_(parameters(), max_norm, norm_type);
}

namespace {

struct Place {
  nn::Slot* slot;
  std::string name;  // from the wrapped module
  const dist::Unit* unit;
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
  for (nn::Slot* s : module.slots())
    if (auto it = by_slot.find(s); it != by_slot.end()) {
      places.push_back(it->second);
      places.back().name = s->full_name().substr(path.empty() ? 0 : path.size() + 1);
    }
  return places;
}

}  // namespace

void FsdpModule::for_each_full(
    const std::function<Tensor(const std::string&, const Tensor&)>& local,
    const std::function<void(const std::string&, const Tensor&)>& f) {
  const auto r = runtime();
  r->require_idle("reading the full state");
  const bool root = r->group()->rank() == 0;
  for (const Place& p : places_of(*r, *module_)) {
    const dist::Unit::Entry& e = p.unit->entry(p.entry);
    const Tensor whole = p.unit->collect(e, local(p.name, e.local), 0);
    if (root) f(p.name, whole);
  }
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
  nn::StateDict d;
  for_each_full_parameter(
      [&](const std::string& name, const Tensor& t) { d.set(name, t.clone()); });
  if (runtime()->group()->rank() == 0)
    for (auto& [name, t] : module_->persistent_buffers()) d.set(name, t.clone());
  return d;
}

nn::LoadResult FsdpModule::load_full_state_dict(const nn::StateDict& state, bool strict) {
  runtime()->require_idle("loading");
  std::vector<nn::ExpectedTensor> expected, found;
  const std::vector<Part> mine = parts();
  for (auto& p : mine) expected.push_back({p.name, p.full_shape});
  const auto buffers = module_->persistent_buffers();
  for (auto& [name, t] : buffers) expected.push_back({name, t.sizes()});
  for (auto& [name, t] : state) found.push_back({name, t.sizes()});
  nn::LoadResult result = nn::check_state("load_full_state_dict", expected, found, strict);
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
  for (int i = 0; i < int(r->units().size()); ++i) r->unshard(i);
}
void FsdpModule::reshard() {
  const auto r = runtime();
  for (int i = 0; i < int(r->units().size()); ++i) r->reshard(i);
}

}  // namespace sherd
