// Activations as modules.
#pragma once
#include "nn/functional.h"
#include "nn/module.h"

namespace sherd::nn {

class ReLU : public Module {
 public:
  Tensor forward(const Tensor& x) { return F::relu(x); }
};

// approximate "none" (by the error function) or "tanh".
class GELU : public Module {
 public:
  explicit GELU(std::string approximate = "none") : approximate_(std::move(approximate)) {
    if (approximate_ != "none" && approximate_ != "tanh")
      fail("[GELU] approximate must be none or tanh, not ", approximate_);
  }
  Tensor forward(const Tensor& x) { return F::gelu(x, approximate_); }
  std::string extra_repr() const override { return "approximate='" + approximate_ + "'"; }

 private:
  std::string approximate_;
};

}  // namespace sherd::nn
