#include "nn/nan_check.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"

namespace sherd::nn {

std::string find_non_finite(const Tensor& x, bool infinities) {
  if (!x.defined() || !is_float(x.dtype()) || !x.device().is_cpu() || x.numel() == 0) return "";
  const Tensor values = to_raw(contiguous_raw(x), kFloat64);
  const double* p = values.data<double>();
  for (int64_t i = 0; i < values.numel(); ++i) {
    if (std::isfinite(p[i]) || (!infinities && std::isinf(p[i]))) continue;
    std::string at;
    int64_t rest = i;
    for (int64_t d = x.dim() - 1; d >= 0; rest /= x.size(d), --d)
      at = concat(rest % x.size(d), at.empty() ? "" : ", ", at);
    return concat(std::isnan(p[i]) ? "a NaN at [" : "an infinity at [", at, "]");
  }
  return "";
}

class NanCheck::Hooks : public CallHooks {
 public:
  Hooks(std::string name, const NanCheckOptions& options)
      : name_(std::move(name)), options_(options) {}

  void pre(Module& module, const TensorVisitor& inputs) override {
    if (options_.inputs) look(module, "an input", inputs);
    if (!options_.parameters) return;
    for (const auto& [name, p] : module.named_parameters("", false)) {
      const std::string found = find_non_finite(p, options_.infinities);
      if (!found.empty())
        fail("[nan_check] parameter '", name_.empty() ? name : name_ + "." + name, "' ", p.sizes(),
             " has ", found);
    }
  }
  void post(Module& module, const TensorVisitor& outputs) override {
    look(module, "the output", outputs);
  }

 private:
  void look(const Module& module, const char* what, const TensorVisitor& tensors) const {
    tensors([&](Tensor& t) {
      const std::string found = find_non_finite(t, options_.infinities);
      if (!found.empty())
        fail("[nan_check] ", what, " of module '", name_, "' (", module.type_name(), "), ",
             t.dtype(), " ", t.sizes(), ", has ", found);
    });
  }

  const std::string name_;
  const NanCheckOptions options_;
};

NanCheck::NanCheck(Module& model, const NanCheckOptions& options)
    : model_(model), options_(options) {
  // Innermost: a sharded module's parameters are there when it looks.
  for (const auto& [name, module] : model.named_modules())
    module->state().hooks.push_back(std::make_shared<Hooks>(name, options));
}

NanCheck::~NanCheck() {
  for (const auto& [name, module] : model_.named_modules())
    std::erase_if(module->state().hooks, [](const std::shared_ptr<CallHooks>& hooks) {
      return dynamic_cast<Hooks*>(hooks.get()) != nullptr;
    });
}

void NanCheck::gradients() const {
  for (const auto& [name, p] : model_.named_parameters()) {
    const std::string found = find_non_finite(p.grad(), options_.infinities);
    if (!found.empty())
      fail("[nan_check] the gradient of parameter '", name, "' ", p.sizes(), " has ", found);
  }
}

}  // namespace sherd::nn
