// Sequential: modules one after another, named "0", "1", ... Each takes and gives one Tensor.
//
//     nn::Sequential(nn::Linear(dim, ff_dim), nn::ReLU(), nn::Linear(ff_dim, dim))
#pragma once
#include "nn/module.h"

namespace sherd::nn {

class Sequential : public Module {
 public:
  template <class... M>
  requires(std::is_base_of_v<Module, std::decay_t<M>>&&...) explicit Sequential(M&&... modules) {
    (append(std::forward<M>(modules)), ...);
  }

  template <class M>
  void append(M&& module) {
    using T = std::decay_t<M>;
    static_assert(std::is_rvalue_reference_v<M&&>,
                  "modules are moved into a Sequential, not copied");
    steps_.push_back(
        {adopt(std::to_string(steps_.size()), std::make_unique<T>(std::move(module))).get(),
         [](Module& m, const Tensor& x) -> Tensor { return call(static_cast<T&>(m), x); }});
  }
  Tensor forward(const Tensor& x) {
    Tensor y = x;
    for (auto& s : steps_) y = s.call(*s.module, y);
    return y;
  }
  int64_t size() const { return int64_t(steps_.size()); }
  Module& operator[](int64_t i) const {
    if (i < 0 || i >= size()) fail("[Sequential] there is no module ", i, " of ", size());
    return *steps_[size_t(i)].module;
  }

 private:
  struct Step {
    Module* module;
    Tensor (*call)(Module&, const Tensor&);
  };
  std::vector<Step> steps_;
};

}  // namespace sherd::nn
