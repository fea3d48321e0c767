#include "distributed/fsdp.h"

#include "autograd/grad_mode.h"
#include "optim/clip_grad.h"

namespace sherd {

FsdpModule::FsdpModule(nn::Module& module, const FsdpOptions& options) : module_(&module) {
  dist::Runtime::make(module, options);
}
FsdpModule::~FsdpModule() = default;

std::shared_ptr<dist::Runtime> FsdpModule::runtime() const { return dist::Runtime::of(*module_); }

FsdpModule::NoSync::NoSync(std::shared_ptr<dist::Runtime> runtime) : runtime_(std::move(runtime)) {
  runtime_->require_idle("no_sync");
  runtime_->set_sync(false);
}
FsdpModule::NoSync::~NoSync() { runtime_->set_sync(true); }

Tensor FsdpModule::clip_grad_norm_(double max_norm, double norm_type) {
  const auto r = runtime();
  r->require_idle("clip_grad_norm_");
  if (&r->root().module() != module_)
    fail("[clip_grad_norm_] ", module_->full_name(), " is a unit below ", r->root().name(),
         ": call it on the root, whose norm counts every parameter once");
  return optim::clip_grad_norm_(parameters(), max_norm, norm_type);
}

void FsdpModule::for_each_full(
    const std::function<Tensor(const std::string&, const Tensor&)>& local,
    const std::function<void(const std::string&, const Tensor&)>& f) {
  const auto r = runtime();
  r->require_idle("reading the full state");
  const bool root = r->group()->rank() == 0;
  // In the order of the module's names, whatever units they are in.
  std::vector<std::pair<nn::Slot*, std::pair<const dist::Unit*, std::pair<int, int>>>> places;
  for (auto& u : r->units())
    for (auto place : u->order())
      for (nn::Slot* s : u->entry(place).slots) places.push_back({s, {u.get(), place}});
  for (nn::Slot* slot : module_->slots()) {
    if (slot->is_buffer) continue;
    for (auto& [s, where] : places) {
      if (s != slot) continue;
      const dist::Unit::Entry& e = where.first->entry(where.second);
      const Tensor whole = where.first->collect(e, local(slot->full_name(), e.local), 0);
      if (root) f(slot->full_name(), whole);
      break;
    }
  }
}

void FsdpModule::for_each_full_parameter(
    const std::function<void(const std::string&, const Tensor&)>& f) {
  for_each_full([](const std::string&, const Tensor& p) { return p.detach(); }, f);
}

nn::StateDict FsdpModule::full_state_dict() {
  nn::StateDict d;
  for_each_full_parameter(
      [&](const std::string& name, const Tensor& t) { d.set(name, t.clone()); });
  return d;
}

std::vector<nn::ExpectedTensor> FsdpModule::full_shapes() const {
  std::vector<nn::ExpectedTensor> shapes;
  for (auto& u : runtime()->units())
    for (auto place : u->order()) {
      const dist::Unit::Entry& e = u->entry(place);
      for (nn::Slot* s : e.slots) shapes.push_back({s->full_name(), e.shape});
    }
  return shapes;
}

void FsdpModule::load_parts(
    const std::function<void(const std::string&, int64_t, int64_t, const Tensor&)>& read) {
  const auto r = runtime();
  r->require_idle("loading");
  NoGrad off;
  for (auto& u : r->units())
    for (auto place : u->order()) {
      const dist::Unit::Entry& e = u->entry(place);
      Tensor part = over_storage(e.local.storage(), {e.owned.numel()}, e.local.dtype(), e.owned.at);
      read(e.name, e.owned.lo, e.owned.hi, part);
      e.local.bump_version();
    }
}

nn::LoadResult FsdpModule::load_full_state_dict(const nn::StateDict& state, bool strict) {
  std::vector<nn::ExpectedTensor> found;
  for (auto& [name, t] : state) found.push_back({name, t.sizes()});
  nn::LoadResult result = nn::check_state("load_full_state_dict", full_shapes(), found, strict);
  load_parts([&](const std::string& name, int64_t begin, int64_t end, const Tensor& to) {
    const Tensor* t = state.find(name);
    if (!t) return;
    const Tensor c = contiguous_raw(*t);
    copy_raw(to, c.as_strided_raw({end - begin}, {1}, c.storage_offset() + begin));
  });
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
