#include "nn/module.h"

#include <cxxabi.h>

#include <algorithm>
#include <mutex>
#include <typeinfo>
#include <unordered_set>

#include "autograd/grad_mode.h"
#include "autograd/meta.h"
#include "core/generator.h"
#include "core/philox.h"
#include "core/pointwise.h"

namespace sherd::nn {
namespace {

std::string join(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : name.empty() ? prefix : prefix + "." + name;
}

std::string path_of(const ModuleState* m) {
  std::string path;
  for (; m && m->parent; m = m->parent) path = join(m->name, path);
  return path;
}

template <class F>
void for_slots(const ModuleState& m, const std::string& prefix, bool recurse, const F& f) {
  for (auto& s : m.slots) f(join(prefix, s->name), *s);
  if (recurse)
    for (auto& [name, child] : m.children) for_slots(child->state(), join(prefix, name), true, f);
}

Module::NamedTensors named(const ModuleState& m, const std::string& prefix, bool recurse,
                           bool buffers) {
  Module::NamedTensors result;
  std::unordered_set<TensorImpl*> seen;
  for_slots(m, prefix, recurse, [&](const std::string& name, Slot& s) {
    if (s.is_buffer == buffers && s.tensor.defined() && seen.insert(s.tensor.impl()).second)
      result.emplace_back(name, s.tensor);
  });
  return result;
}

void fill(Slot& s, const std::string& name, uint64_t seed) {
  if (!s.declared) return;
  if (s.tied_to) {
    s.tensor = s.tied_to->tensor;
    s.declared = s.tied_to->declared.load();
    return;
  }
  autograd::make_meta(s.tensor).name = name;
  MemoryScope scope(MemoryCategory::kParameters);
  Tensor values = empty(s.tensor.sizes(), s.tensor.dtype(), kCPU);
  const uint64_t key = philox_key(seed, name.data(), name.size());
  s.init.fill(
      key, 0,
      s.init.whole ? values : over_storage(values.storage(), {values.numel()}, values.dtype()));
  s.tensor.set_data(values);
  s.declared = false;
}

// Of `m` and below, under the names from the outermost module. Threads may share a model whose
// first forward this is.
void materialize(ModuleState& m, uint64_t seed) {
  static std::recursive_mutex mutex;
  std::lock_guard lock(mutex);
  const std::string path = path_of(&m);
  for_slots(m, path, true, [&](const std::string& name, Slot& s) {
    if (!s.tied_to) fill(s, name, seed);
  });
  for_slots(m, path, true, [&](const std::string& name, Slot& s) { fill(s, name, seed); });
}

class FunctionHooks : public CallHooks {
 public:
  FunctionHooks(std::function<void(Module&)> pre, std::function<void(Module&)> post)
      : pre_(std::move(pre)), post_(std::move(post)) {}
  void pre(Module& m, const TensorVisitor&) override {
    if (pre_) pre_(m);
  }
  void post(Module& m, const TensorVisitor&) override {
    if (post_) post_(m);
  }

 private:
  std::function<void(Module&)> pre_, post_;
};

}  // namespace

// ---- slots
std::string Slot::full_name() const { return join(path_of(owner), name); }

void Slot::materialize_tree() {
  ModuleState* root = owner;
  while (root->parent) root = root->parent;
  materialize(*root, default_generator().state().seed);
}

void Parameter::tie(const Parameter& other) const {
  if (slot_ == other.slot_) return;
  if (!(slot_->tensor.sizes() == other.slot_->tensor.sizes()))
    fail("[tie] parameters ", slot_->full_name(), " ", slot_->tensor.sizes(), " and ",
         other.slot_->full_name(), " ", other.slot_->tensor.sizes(), " differ in shape");
  slot_->tied_to = other.slot_->tied_to ? other.slot_->tied_to : other.slot_;
  slot_->tensor = slot_->tied_to->tensor;
  slot_->declared = slot_->tied_to->declared.load();
}

// ---- the tree
Module::Module() : state_(std::make_unique<ModuleState>()) {}
Module::~Module() = default;

void Module::check_name(const std::string& name) const {
  if (name.empty() || name.find('.') != std::string::npos)
    fail("[module] \"", name, "\" cannot be a name in ", type_name(),
         ": it must not be empty or hold a dot");
  for (auto& s : state_->slots)
    if (s->name == name)
      fail("[module] ", type_name(), " has a parameter or buffer ", name, " already");
  for (auto& c : state_->children)
    if (c.first == name) fail("[module] ", type_name(), " has a child ", name, " already");
}

Parameter Module::parameter(const std::string& name, const Dims& shape, Initializer init,
                            DType dtype) {
  check_name(name);
  auto slot = std::make_unique<Slot>();
  slot->name = name;
  slot->owner = state_.get();
  slot->init = std::move(init);
  slot->tensor = empty(shape, dtype, kMeta);
  slot->tensor.set_requires_grad(is_float(dtype));
  slot->declared = true;
  state_->slots.push_back(std::move(slot));
  return Parameter(state_->slots.back().get());
}

Buffer Module::buffer(const std::string& name, const Tensor& value, bool persistent) {
  check_name(name);
  auto slot = std::make_unique<Slot>();
  slot->name = name;
  slot->owner = state_.get();
  slot->is_buffer = true;
  slot->persistent = persistent;
  slot->tensor = value;
  state_->slots.push_back(std::move(slot));
  return Buffer(state_->slots.back().get());
}

void Module::insert(const std::string& name, std::unique_ptr<Module> module) {
  check_name(name);
  module->state_->parent = state_.get();
  module->state_->name = name;
  state_->children.emplace_back(name, std::move(module));
}

Module::NamedTensors Module::named_parameters(const std::string& prefix, bool recurse) const {
  return named(*state_, prefix, recurse, false);
}
Module::NamedTensors Module::named_buffers(const std::string& prefix, bool recurse) const {
  return named(*state_, prefix, recurse, true);
}
Module::NamedTensors Module::persistent_buffers() const {
  NamedTensors result;
  for_slots(*state_, "", true, [&](const std::string& name, Slot& s) {
    if (s.is_buffer && s.persistent && s.tensor.defined()) result.emplace_back(name, s.tensor);
  });
  return result;
}
std::vector<Tensor> Module::parameters() const {
  std::vector<Tensor> result;
  for (auto& [name, p] : named_parameters()) result.push_back(p);
  return result;
}
std::vector<std::pair<std::string, Module*>> Module::named_modules(const std::string& prefix) {
  std::vector<std::pair<std::string, Module*>> result{{prefix, this}};
  for (auto& [name, child] : state_->children)
    for (auto& m : child->named_modules(join(prefix, name))) result.push_back(m);
  return result;
}
std::vector<std::pair<std::string, Module*>> Module::named_children() const {
  std::vector<std::pair<std::string, Module*>> result;
  for (auto& [name, child] : state_->children) result.emplace_back(name, child.get());
  return result;
}
std::vector<Slot*> Module::slots(bool recurse) const {
  std::vector<Slot*> result;
  for_slots(*state_, "", recurse, [&](const std::string&, Slot& s) { result.push_back(&s); });
  return result;
}
int64_t Module::num_parameters() const {
  int64_t n = 0;
  for (auto& [name, p] : named_parameters()) n += p.numel();
  return n;
}
void throw_from(const Module& module, const Error& error) {
  if (error.is_located() || typeid(error) != typeid(Error)) throw;
  const std::string name = module.full_name();
  throw error.at(concat(" (in ", name.empty() ? "" : concat("module '", name, "', "),
                        module.type_name(), ")"));
}

std::string Module::full_name() const { return path_of(state_.get()); }
std::string Module::type_name() const {
  int status = 0;
  std::unique_ptr<char, void (*)(void*)> text(
      abi::__cxa_demangle(typeid(*this).name(), nullptr, nullptr, &status), std::free);
  return status == 0 ? text.get() : typeid(*this).name();
}

// ---- state
StateDict Module::state_dict(const std::string& prefix) const {
  StateDict d;
  for_slots(*state_, prefix, true, [&](const std::string& name, Slot& s) {
    if (!s.persistent || !s.tensor.defined()) return;
    if (s.tensor.impl()->placeholder)
      fail("[state_dict] parameter ", name,
           " is sharded: use full_state_dict() of FullyShardedDataParallel");
    d.set(name, s.get().detach());
  });
  return d;
}

LoadResult Module::load_state_dict(const StateDict& state, bool strict) {
  std::vector<ExpectedTensor> expected, found;
  std::vector<std::pair<std::string, Slot*>> targets;
  for_slots(*state_, "", true, [&](const std::string& name, Slot& s) {
    if (!s.persistent || !s.tensor.defined()) return;
    if (s.tensor.impl()->placeholder)
      fail("[load_state_dict] parameter ", name,
           " is sharded: load through FullyShardedDataParallel");
    if (is_expanded(s.tensor))
      fail("[load_state_dict] ", name,
           " is expanded, several of its elements lie in one place: "
           "register a contiguous() tensor");
    expected.push_back({name, s.tensor.sizes()});
    targets.emplace_back(name, &s);
  });
  for (auto& [name, t] : state) found.push_back({name, t.sizes()});
  LoadResult result = check_state("load_state_dict", expected, found, strict);
  NoGrad off;
  for (auto& [name, slot] : targets)
    if (const Tensor* t = state.find(name)) {
      Tensor to = slot->get();
      to.copy_(t->detach());
    }
  return result;
}

void Module::materialize() { materialize(default_generator().state().seed); }
void Module::materialize(uint64_t seed) { nn::materialize(*state_, seed); }

void Module::train(bool on) {
  state_->training = on;
  for (auto& [name, child] : state_->children) child->train(on);
}

Module& Module::to(DType dtype) {
  if (!is_float(dtype))
    fail("[to] a module's parameters cannot become ", dtype, ": expected a floating point dtype");
  for (Slot* s : slots()) {
    if (!s->tensor.defined() || !is_float(s->tensor.dtype()) || s->tensor.dtype() == dtype)
      continue;
    const Tensor gradient = s->tensor.grad();
    s->tensor.set_data(s->declared ? empty(s->tensor.sizes(), dtype, kMeta)
                                   : to_raw(s->tensor, dtype));
    s->tensor.set_grad(gradient.defined() ? to_raw(gradient, dtype) : gradient);
  }
  return *this;
}
Module& Module::to(Device device) {
  if (device.is_cuda()) fail("[to] this build has no CUDA: modules live on the cpu");
  if (device.is_cpu()) materialize();
  return *this;
}
Module& Module::requires_grad_(bool on) {
  for (Slot* s : slots())
    if (!s->is_buffer) s->tensor.set_requires_grad(on);
  return *this;
}
void Module::zero_grad() {
  for (Slot* s : slots())
    if (!s->is_buffer) s->tensor.set_grad({});
}
void Module::apply(const std::function<void(Module&)>& f) {
  for (auto& [name, child] : state_->children) child->apply(f);
  f(*this);
}
void Module::register_forward_pre_hook(std::function<void(Module&)> hook) {
  state_->hooks.push_back(std::make_shared<FunctionHooks>(std::move(hook), nullptr));
}
void Module::register_forward_hook(std::function<void(Module&)> hook) {
  state_->hooks.push_back(std::make_shared<FunctionHooks>(nullptr, std::move(hook)));
}

}  // namespace sherd::nn
