#include "optim/optimizer.h"

#include <cmath>
#include <unordered_map>
#include <unordered_set>

#include "autograd/meta.h"
#include "core/allocator.h"
#include "core/pointwise.h"
#include "nn/shard_info.h"

namespace sherd::optim {
namespace {

constexpr double kMostSteps = 0x1p53;  // that a double counts

DType state_dtype(DType param) { return param == kFloat64 ? kFloat64 : kFloat32; }

// Contiguous, in a dtype that kernels take beside states of `dtype`.
Tensor for_kernel(const Tensor& grad, DType dtype) {
  const bool is_half = grad.dtype() == kBFloat16 || grad.dtype() == kFloat16;
  const bool taken = grad.dtype() == dtype || (is_half && dtype == kFloat32);
  return contiguous_raw(taken ? grad : to_raw(grad, dtype));
}

Tensor scalar(int64_t v) { return full({}, double(v), kInt64); }

Tensor option_tensor(const std::variant<double*, bool*, std::array<double, 2>*>& value) {
  if (auto* d = std::get_if<double*>(&value)) return full({}, **d, kFloat64);
  if (auto* b = std::get_if<bool*>(&value)) return full({}, **b, kBool);
  return tensor<double>(std::span<const double>(*std::get<2>(value)), {2});
}
void set_option(const std::variant<double*, bool*, std::array<double, 2>*>& value,
                const Tensor& from) {
  if (auto* d = std::get_if<double*>(&value)) {
    **d = from.item();
  } else if (auto* b = std::get_if<bool*>(&value)) {
    **b = from.item() != 0;
  } else {
    const Tensor pair = contiguous_raw(to_raw(from, kFloat64));
    std::copy_n(pair.data<double>(), 2, std::get<2>(value)->begin());
  }
}

std::string group_key(int64_t group, const char* option) {
  return concat("param_groups.", group, ".", option);
}
std::string state_key(const std::string& parameter, const char* tensor) {
  return concat("state.", parameter, ".", tensor);
}

}  // namespace

void check_range(const char* op, const char* option, double value, double min, double end) {
  if (!(value >= min && value < end))
    fail("[", op, "] ", option, " must be in [", min, ", ", end, "), got ", value);
}

Optimizer::~Optimizer() = default;

// ---- construction
void Optimizer::add_parameters(const std::vector<Tensor>& params,
                               const std::vector<std::string>& names) {
  std::unordered_set<const void*> seen;  // FSDP's two tensors of one parameter share their meta
  std::unordered_set<std::string> given;
  auto identities = [](const Tensor& p) {
    return std::array<const void*, 2>{p.impl(), autograd::meta_of(p)};
  };
  for (auto& e : entries_) {
    for (auto* id : identities(e.param)) seen.insert(id);
    given.insert(e.name);
  }
  seen.erase(nullptr), given.erase("");
  std::vector<Entry> added;
  for (size_t i = 0; i < params.size(); ++i) {
    Entry e;
    if (!params[i].defined())
      fail("[optimizer] parameter ", entries_.size() + i, " is an undefined tensor");
    e.param = params[i], e.group = num_groups_;
    if (!names.empty()) e.name = names[i];
    const std::string name = name_of(e, entries_.size() + i);
    if (!is_float(e.param.dtype()))
      fail("[optimizer] parameter ", name, " is ", e.param.dtype(),
           ": only floating point tensors can be optimized");
    if (!e.param.is_leaf())
      fail("[optimizer] parameter ", name, " is the result of an op: give the leaf it came from");
    for (auto* id : identities(e.param))
      if (id && !seen.insert(id).second)
        fail("[optimizer] parameter ", name, " is given twice, the second time in group ",
             num_groups_, ": each belongs to one group");
    if (!e.name.empty() && !given.insert(e.name).second)
      fail("[optimizer] two parameters are named ", name);
    added.push_back(std::move(e));
  }
  entries_.insert(entries_.end(), added.begin(), added.end());
  initial_lrs_.emplace_back();
  ++num_groups_;
}

Tensor Optimizer::make_state(const Tensor& like) {
  MemoryScope scope(MemoryCategory::kOptimizer);
  return zeros(like.sizes(), like.dtype(), like.device());
}

// ---- names
std::string Optimizer::name_of(const Entry& e) const {
  return name_of(e, size_t(&e - entries_.data()));
}
std::string Optimizer::name_of(const Entry& e, size_t position) {
  if (!e.name.empty()) return e.name;
  if (auto* meta = autograd::meta_of(e.param); meta && !meta->name.empty()) return meta->name;
  if (auto* shard = nn::shard_info(e.param)) return shard->name();
  return std::to_string(position);
}

std::vector<std::string> Optimizer::names() const {
  std::vector<std::string> result;
  std::unordered_map<std::string, int> uses;
  for (auto& e : entries_) ++uses[result.emplace_back(name_of(e))];
  for (size_t i = 0; i < result.size(); ++i)
    if (uses[result[i]] > 1) result[i] += concat("#", i);
  return result;
}

Optimizer::NamedTensors Optimizer::named_parameters() const {
  NamedTensors result;
  const auto all = names();
  for (size_t i = 0; i < all.size(); ++i) result.emplace_back(all[i], entries_[i].param);
  return result;
}

// ---- stepping
void Optimizer::check(const Entry& e, const Tensor& grad) const {
  const Dims& shape = e.param.sizes();
  if (!(grad.sizes() == shape)) {
    if (auto* shard = nn::shard_info(e.param); shard && grad.sizes() == shard->full_shape())
      fail("[", type(), "] the gradient of ", name_of(e), " is not reduced yet (shape ",
           grad.sizes(), ", this rank's piece is ", shape,
           "): the last backward ran under no_sync; run one without it before step()");
    fail("[", type(), "] the gradient of ", name_of(e), " has shape ", grad.sizes(),
         ", the parameter ", shape);
  }
  if (grad.device() != e.param.device())
    fail("[", type(), "] the gradient of ", name_of(e), " is on ", grad.device(),
         ", the parameter on ", e.param.device());
  if (!is_float(grad.dtype()))
    fail("[", type(), "] the gradient of ", name_of(e), " is ", grad.dtype(),
         ", expected a floating point dtype");
  if (is_expanded(e.param))
    fail("[", type(), "] parameter ", name_of(e), " is expanded, several of its elements lie in ",
         "one place: optimize the tensor that was expanded, or a contiguous() one");
  const DType dtype = state_dtype(e.param.dtype());
  for (auto& t : e.state.tensors) {
    if (t.defined() && !(t.sizes() == shape))
      fail("[", type(), "] optimizer state of ", name_of(e), " has shape ", t.sizes(),
           ", the parameter now ", shape,
           ": build the optimizer after wrapping, or wrap before the first step");
    if (t.defined() && t.dtype() != dtype)
      fail("[", type(), "] optimizer state of ", name_of(e), " is ", t.dtype(),
           ", and that of a parameter of ", e.param.dtype(), " is ", dtype,
           ": the parameter was converted after a step. optimizer.load_state_dict("
           "optimizer.state_dict()) converts the state too");
  }
}

void Optimizer::change(const Stepped& s, const Change& f) {
  const DType dtype = state_dtype(s.param.dtype());
  const Tensor values = contiguous_raw(to_raw(s.param, dtype));
  f(values, for_kernel(s.grad, dtype));
  if (values.storage() != s.param.storage()) copy_raw(s.param, values);
  s.param.bump_version();
}
void Optimizer::update_all(std::vector<Stepped>& stepped, const GradientScaling& scaling) {
  for (auto& s : stepped)
    change(s, [&](const Tensor& values, const Tensor& grad) {
      update(s.group, values, grad, *s.state, scaling);
    });
}

void Optimizer::step(const StepArguments& arguments) {
  for (auto* t : {&arguments.grad_scale, &arguments.found_inf})
    if (t->defined() && t->numel() != 1)
      fail("[", type(), "] grad_scale and found_inf have one element each, got shape ", t->sizes());
  for (size_t g = 0; g < num_groups_; ++g) check_options(g);
  std::vector<Stepped> todo;
  for (auto& e : entries_)
    if (Tensor grad = e.param.grad(); grad.defined()) {
      check(e, grad);
      todo.push_back({e.param, e.group, &e.state, std::move(grad)});
    }
  if (arguments.found_inf.defined() && arguments.found_inf.item() != 0) return;
  for (auto& s : todo) ++s.state->step;
  update_all(todo, {.scale = arguments.grad_scale});
  // [Note: steps of sharded parameters] What a rank holds of a parameter may be nothing, and then
  // has no gradient. That it was stepped is counted on every rank all the same: FSDP decides by
  // versions what to gather again, and all ranks must decide alike.
  for (auto& e : entries_)
    if (nn::shard_info(e.param)) e.param.bump_version();
}

void Optimizer::zero_grad(bool set_to_none) {
  for (auto& e : entries_) {
    const Tensor grad = e.param.grad();
    if (!grad.defined()) continue;
    if (set_to_none)
      e.param.set_grad({});
    else
      grad.detach().zero_();
  }
}

// ---- state
nn::StateDict Optimizer::state_dict() const {
  nn::StateDict result;
  const auto all = names();
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Entry& e = entries_[i];
    result.set(state_key(all[i], "group"), scalar(int64_t(e.group)));
    if (e.state.step == 0) continue;
    result.set(state_key(all[i], "step"), scalar(e.state.step));
    for (size_t k = 0; k < state_names().size(); ++k)
      if (e.state.tensors[k].defined())
        result.set(state_key(all[i], state_names()[k]), e.state.tensors[k].detach());
  }
  for (size_t g = 0; g < num_groups_; ++g) {
    for (auto& o : const_cast<Optimizer*>(this)->options(g))
      result.set(group_key(int64_t(g), o.name), option_tensor(o.value));
    if (initial_lrs_[g])
      result.set(group_key(int64_t(g), "initial_lr"), full({}, *initial_lrs_[g], kFloat64));
  }
  return result;
}

// For each group, the one of `state` with the same parameters; groups without any take what is left
// over, in order.
std::vector<int64_t> Optimizer::match_groups(const nn::StateDict& state,
                                             const std::vector<std::string>& names) const {
  std::vector<int64_t> match(num_groups_, -1);
  std::unordered_map<int64_t, size_t> taken;
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Tensor* stored = state.find(state_key(names[i], "group"));
    if (!stored || stored->numel() != 1) continue;
    const int64_t theirs = stored->item<int64_t>();
    const size_t ours = entries_[i].group;
    const auto [it, is_new] = taken.emplace(theirs, ours);
    if (match[ours] < 0 && is_new) match[ours] = theirs;
    if (match[ours] != theirs || it->second != ours)
      fail("[load_state_dict] parameter ", names[i], " is in group ", ours,
           " of the optimizer and in group ", theirs,
           " of the state, which do not hold the same parameters: build the groups alike");
  }
  int64_t next = 0;
  for (auto& m : match) {
    if (m >= 0) continue;
    while (taken.count(next)) ++next;
    m = next++;
  }
  return match;
}

void Optimizer::load_state_dict(const nn::StateDict& state) {
  const auto all = names();
  const std::vector<int64_t> match = match_groups(state, all);
  std::vector<nn::ExpectedTensor> expected, found;
  for (auto& [name, t] : state) found.push_back({name, t.sizes()});

  // Options first: they say which state tensors there must be. Put back if anything is wrong.
  std::vector<std::pair<Option, Tensor>> before;
  std::vector<std::optional<double>> initial_lrs = initial_lrs_;
  auto restore = [&] {
    for (auto& [option, value] : before) set_option(option.value, value);
  };
  try {
    for (size_t g = 0; g < num_groups_; ++g) {
      for (auto& o : options(g)) {
        const std::string key = group_key(match[g], o.name);
        const Tensor now = option_tensor(o.value);
        before.emplace_back(o, now);
        expected.push_back({key, now.sizes()});
        const Tensor* t = state.find(key);
        if (t && t->sizes() == now.sizes()) set_option(o.value, *t);
      }
      const std::string key = group_key(match[g], "initial_lr");
      if (const Tensor* t = state.find(key)) {
        expected.push_back({key, {}});
        if (t->numel() == 1) initial_lrs[g] = t->item();
      }
    }
    for (size_t i = 0; i < entries_.size(); ++i) {
      const Entry& e = entries_[i];
      expected.push_back({state_key(all[i], "group"), {}});
      const std::string step = state_key(all[i], "step");
      bool stepped = state.contains(step);
      for (size_t k = 0; k < state_names().size(); ++k) {
        const std::string key = state_key(all[i], state_names()[k]);
        const bool there = state.contains(key);
        stepped = stepped || there;
        // A rank that has no element of a sharded parameter may lack its tensors.
        if (there || (stepped && e.param.numel() > 0 && needs_state(e.group, k)))
          expected.push_back({key, e.param.sizes()});
      }
      if (stepped) expected.push_back({step, {}});
    }
    nn::check_state("load_state_dict", expected, found, true);
    for (size_t g = 0; g < num_groups_; ++g) check_options(g);
    for (auto& name : all)
      if (const Tensor* step = state.find(state_key(name, "step")))
        if (const double n = step->item(); !(n >= 0 && n < kMostSteps && n == std::floor(n)))
          fail("[load_state_dict] ", state_key(name, "step"), " is ", n,
               ": a number of steps is whole and not negative");
  } catch (...) {
    restore();
    throw;
  }

  initial_lrs_ = initial_lrs;
  for (size_t i = 0; i < entries_.size(); ++i) {
    Entry& e = entries_[i];
    const Tensor* step = state.find(state_key(all[i], "step"));
    e.state = {};
    if (!step) continue;
    e.state.step = step->item<int64_t>();
    for (size_t k = 0; k < state_names().size(); ++k) {
      const Tensor* t = state.find(state_key(all[i], state_names()[k]));
      if (!t) continue;
      MemoryScope scope(MemoryCategory::kOptimizer);
      // A declared parameter will get its values where the state is now.
      const Device device = e.param.device().is_meta() ? t->device() : e.param.device();
      e.state.tensors[k] = empty(e.param.sizes(), state_dtype(e.param.dtype()), device);
      copy_raw(e.state.tensors[k], *t);
    }
  }
}

// ---- groups
template <class T>
T* Optimizer::find_option(size_t group, const char* name) const {
  if (group >= num_groups_)
    fail("[", type(), "] there is no parameter group ", group, " among ", num_groups_);
  for (auto& o : const_cast<Optimizer*>(this)->options(group))
    if (std::string_view(o.name) == name)
      if (auto* p = std::get_if<T*>(&o.value)) return *p;
  return nullptr;
}
double Optimizer::lr(size_t group) const { return *find_option<double>(group, "lr"); }
void Optimizer::set_lr(size_t group, double lr) {
  check_range(type(), "lr", lr, 0);
  *find_option<double>(group, "lr") = lr;
}
double* Optimizer::momentum(size_t group) {
  if (auto* m = find_option<double>(group, "momentum")) return m;
  auto* betas = find_option<std::array<double, 2>>(group, "betas");
  return betas ? &(*betas)[0] : nullptr;
}
double Optimizer::initial_lr(size_t group) const {
  const double now = lr(group);
  return initial_lrs_[group].value_or(now);
}
void Optimizer::set_initial_lr(size_t group, double lr) {
  find_option<double>(group, "lr");
  initial_lrs_[group] = lr;
}
bool Optimizer::claim_schedule(const std::shared_ptr<void>& scheduler) {
  if (auto other = schedule_.lock(); other && other != scheduler) return false;
  schedule_ = scheduler;
  return true;
}

}  // namespace sherd::optim
