// Module: a named tree of parameters, buffers and child modules. A model is a class with members
// and a forward; no macro.
//
//     class Mlp : public nn::Module {
//      public:
//       Mlp(int64_t dim, int64_t hidden)
//           : up(add<nn::Linear>("up", dim, hidden)), down(add<nn::Linear>("down", hidden, dim)) {}
//       Tensor forward(const Tensor& x) { return down(relu(up(x))); }
//       nn::Child<nn::Linear> up, down;
//     };
//     Mlp mlp(16, 64);
//     Tensor y = nn::call(mlp, x);      // forward with hooks; a Child does this by operator()
//     for (auto& [name, p] : mlp.named_parameters()) ...      // "up.weight", "up.bias", ...
//
// Names, orders and state_dict are PyTorch's. Modules can be moved, not copied. Parameters get
// their values at first touch (see parameter.h).
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <typeinfo>
#include <utility>
#include <vector>

#include "autograd/checkpoint.h"
#include "nn/parameter.h"
#include "nn/state_dict.h"
#include "nn/visit_tensors.h"

namespace sherd::nn {

class Module;

// Applies a function to each tensor of a call's arguments or result; it may replace them.
using TensorVisitor = std::function<void(const std::function<void(Tensor&)>&)>;

// Run round each call of a module: pre in order of registration, post and unwind in reverse. FSDP
// attaches itself so.
class CallHooks {
 public:
  virtual ~CallHooks() = default;
  virtual void pre(Module&, const TensorVisitor& /*inputs*/) {}
  virtual void post(Module&, const TensorVisitor& /*outputs*/) {}
  virtual void unwind(Module&) noexcept {}  // instead of post, when forward (or a later pre) threw
};

struct ModuleState {
  ModuleState* parent = nullptr;
  std::string name;  // within the parent
  std::vector<std::unique_ptr<Slot>> slots;
  std::vector<std::pair<std::string, std::unique_ptr<Module>>> children;
  std::vector<std::shared_ptr<CallHooks>> hooks;
  bool training = true;
  bool checkpointed = false;  // see activation_checkpointing.h
};

// A handle on a child module: copies are the same module.
template <class M>
class Child {
 public:
  Child() = default;
  explicit Child(M* module) : module_(module) {}
  template <class... A>
  auto operator()(A&&... args) const;
  // The same for modules with a struct `Arguments`, so that it may be written in braces:
  // attention(x, x, x, {.is_causal = true}).
  template <class A, class T = M>
  auto operator()(A&& a, const typename T::Arguments& arguments) const;
  template <class A, class B, class C, class T = M>
  auto operator()(A&& a, B&& b, C&& c, const typename T::Arguments& arguments) const;
  M* operator->() const { return &**this; }
  M& operator*() const {
    if (!module_)
      fail(
          "[child] a child was used that its module does not have: it is made in the constructor, "
          "by add<...>(\"name\", ...)");
    return *module_;
  }
  M* get() const { return module_; }

 private:
  M* module_ = nullptr;
};

class Module {
 public:
  Module();
  Module(Module&&) noexcept = default;
  Module& operator=(Module&&) noexcept = default;
  virtual ~Module();

  using NamedTensors = std::vector<std::pair<std::string, Tensor>>;
  // Parameters and buffers below this module, in order of declaration, own ones first; tied ones
  // once. A declared parameter is on the meta device until it was touched.
  NamedTensors named_parameters(const std::string& prefix = "", bool recurse = true) const;
  std::vector<Tensor> parameters() const;
  NamedTensors named_buffers(const std::string& prefix = "", bool recurse = true) const;
  NamedTensors persistent_buffers() const;  // those in state_dict
  // This module (named `prefix`, "" by default) and all below, each once, parents first.
  std::vector<std::pair<std::string, Module*>> named_modules(const std::string& prefix = "");
  std::vector<std::pair<std::string, Module*>> named_children() const;
  // Slots below, in the order of named_parameters() and named_buffers(), tied ones too.
  std::vector<Slot*> slots(bool recurse = true) const;

  // Parameters and persistent buffers by full name; tied ones under each name. Of a sharded module:
  // use FSDP's.
  StateDict state_dict(const std::string& prefix = "") const;
  // Copies values in, converting dtypes. One Error lists all missing, unexpected and misshapen
  // names; strict = false only returns the first two.
  LoadResult load_state_dict(const StateDict& state, bool strict = true);

  // Fills all declared parameters below, from the seed of the context's generator (manual_seed)
  // unless one is given.
  void materialize();
  void materialize(uint64_t seed);

  void train(bool on = true);
  void eval() { train(false); }
  bool is_training() const { return state_->training; }
  Module& to(DType dtype);  // floating point parameters and buffers
  Module& to(Device device);
  Module& requires_grad_(bool on = true);
  void zero_grad();                                   // gradients become undefined
  void apply(const std::function<void(Module&)>& f);  // children first, as in PyTorch
  int64_t num_parameters() const;                     // elements, tied ones once

  // Called before forward with the module, and after; an exception in forward skips the second.
  void register_forward_pre_hook(std::function<void(Module&)> hook);
  void register_forward_hook(std::function<void(Module&)> hook);

  std::string type_name() const;  // of the class, such as "sherd::nn::Linear"
  // Has no forward of its own (ModuleList): never an FSDP unit.
  virtual bool is_container() const { return false; }
  // What stands in its parentheses when it is printed (print.h): "in_features=3, out_features=4".
  virtual std::string extra_repr() const { return {}; }
  std::string full_name() const;  // from the outermost module; "" for that
  ModuleState& state() const { return *state_; }

 protected:
  // Declares a parameter, buffer or child of this module. Error for a name that exists, is empty or
  // holds a dot.
  Parameter parameter(const std::string& name, const Dims& shape, Initializer init,
                      DType dtype = kFloat32);
  Buffer buffer(const std::string& name, const Tensor& value, bool persistent = true);
  template <class M, class... A>
  Child<M> add(const std::string& name, A&&... args) {
    return adopt(name, std::make_unique<M>(std::forward<A>(args)...));
  }
  template <class M>
  Child<M> adopt(const std::string& name, std::unique_ptr<M> module) {
    M* p = module.get();
    insert(name, std::move(module));
    return Child<M>(p);
  }

 private:
  void insert(const std::string& name, std::unique_ptr<Module> module);
  void check_name(const std::string& name) const;

  std::unique_ptr<ModuleState> state_;
};

// How a call with hooks holds an argument: hooks may replace tensors, so what holds tensors is
// copied (a reference each); another object that forward takes by reference stays that object.
template <class A>
using KeptArgument = std::conditional_t<
    std::is_lvalue_reference_v<A> && !std::is_const_v<std::remove_reference_t<A>> &&
        std::is_class_v<std::remove_reference_t<A>> && !std::is_same_v<std::decay_t<A>, Tensor> &&
        !std::ranges::range<std::decay_t<A>> && !visit_detail::OptionalLike<std::decay_t<A>> &&
        !visit_detail::TupleLike<std::decay_t<A>>,
    A, std::decay_t<A>>;

// In a handler of `error`: throws it on, with the place in its text if it has none yet. Errors of
// other types, which say what to do with them, stay as they are.
[[noreturn]] void throw_from(const Module& module, const Error& error);

// Runs `f` as a forward of `module`, with its hooks (FSDP gathers the module's parameters round
// it). So another method than forward is made callable on a sharded module:
//
//     Tensor features(const Tensor& x) {
//       return nn::as_forward(this, [&](const Tensor& x) { ...; }, x);
//     }
template <class F, class... A>
auto as_forward(Module* module, const F& f, A&&... args) {
  // Kept alive for the call: a hook may be removed in it.
  const std::vector<std::shared_ptr<CallHooks>> hooks = module->state().hooks;
  if (hooks.empty()) return f(std::forward<A>(args)...);
  std::tuple<KeptArgument<A>...> inputs(std::forward<A>(args)...);
  const TensorVisitor visit_inputs = [&](const std::function<void(Tensor&)>& g) {
    visit_tensors(inputs, g);
  };
  size_t entered = 0;
  struct Unwind {
    const std::vector<std::shared_ptr<CallHooks>>& hooks;
    size_t& entered;
    Module& module;
    ~Unwind() {
      while (entered > 0) hooks[--entered]->unwind(module);
    }
  } unwind{hooks, entered, *module};
  // A hook's error is no module's: it says itself where it was.
  const auto run_hook = [](const auto& hook) {
    try {
      hook();
    } catch (const Error& e) {
      if (typeid(e) != typeid(Error)) throw;
      throw e.at("");
    }
  };
  for (auto& h : hooks) {
    ++entered;
    run_hook([&] { h->pre(*module, visit_inputs); });
  }
  using Result = decltype(std::apply(f, inputs));
  if constexpr (std::is_void_v<Result>) {
    std::apply(f, inputs);
    const TensorVisitor nothing = [](const std::function<void(Tensor&)>&) {};
    while (entered > 0) run_hook([&] { hooks[entered - 1]->post(*module, nothing); }), --entered;
  } else {
    std::decay_t<Result> result = std::apply(f, inputs);
    const TensorVisitor visit_outputs = [&](const std::function<void(Tensor&)>& g) {
      visit_tensors(result, g);
    };
    while (entered > 0)
      run_hook([&] { hooks[entered - 1]->post(*module, visit_outputs); }), --entered;
    return result;
  }
}

// Errors of its forward say in which module they happened.
template <class M, class... A>
auto call_once(M& module, A&&... args) {
  return as_forward(
      &module,
      [&module](auto&&... a) {
        try {
          return module.forward(std::forward<decltype(a)>(a)...);
        } catch (const Error& e) {
          throw_from(module, e);
        }
      },
      std::forward<A>(args)...);
}

// call_once() as a region of checkpoint(): the tensors in the arguments are its inputs, those in
// the result its outputs; other arguments are copied for the second time.
template <class M, class... A>
auto call_checkpointed(M& module, A&&... args) {
  using Arguments = std::tuple<std::decay_t<A>...>;
  using Result = decltype(call_once(module, std::declval<std::decay_t<A>&>()...));
  Arguments arguments(std::forward<A>(args)...);
  std::vector<Tensor> inputs;
  visit_tensors(arguments, [&](Tensor& t) {
    inputs.push_back(t);
    t = t.detach();  // marks its place
  });
  auto first = std::make_shared<std::optional<Result>>();
  const std::weak_ptr<std::optional<Result>> weak = first;  // gone in the recomputation
  const auto region = [&module, arguments, weak](const std::vector<Tensor>& in) {
    Arguments now = arguments;
    size_t k = 0;
    visit_tensors(now, [&](Tensor& t) { t = in[k++]; });
    Result result = std::apply([&](auto&... a) { return call_once(module, a...); }, now);
    std::vector<Tensor> out;
    visit_tensors(result, [&](Tensor& t) { out.push_back(t); });
    if (const auto keep = weak.lock()) *keep = std::move(result);
    return out;
  };
  const std::vector<Tensor> outputs = checkpoint(region, inputs);
  Result result = std::move(**first);
  size_t k = 0;
  visit_tensors(result, [&](Tensor& t) { t = outputs[k++]; });
  return result;
}

// module.forward(args...), with the module's hooks.
template <class M, class... A>
auto call(M& module, A&&... args) {
  if (module.state().checkpointed) [[unlikely]] {
    using Result = decltype(call_once(module, std::forward<A>(args)...));
    if constexpr (!std::is_void_v<Result> && (std::is_copy_constructible_v<std::decay_t<A>> && ...))
      return call_checkpointed(module, std::forward<A>(args)...);
    else
      fail("[checkpoint] module ", module.full_name(),
           " cannot be checkpointed: its forward takes what cannot be copied, or returns nothing");
  }
  return call_once(module, std::forward<A>(args)...);
}

template <class M>
template <class... A>
auto Child<M>::operator()(A&&... args) const {
  return call(**this, std::forward<A>(args)...);
}
template <class M>
template <class A, class T>
auto Child<M>::operator()(A&& a, const typename T::Arguments& arguments) const {
  return call(**this, std::forward<A>(a), arguments);
}
template <class M>
template <class A, class B, class C, class T>
auto Child<M>::operator()(A&& a, B&& b, C&& c, const typename T::Arguments& arguments) const {
  return call(**this, std::forward<A>(a), std::forward<B>(b), std::forward<C>(c), arguments);
}

}  // namespace sherd::nn
