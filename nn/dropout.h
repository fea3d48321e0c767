// Dropout: in training, zeroes elements with probability p and scales the others by 1 / (1 - p).
// The mask follows from the context's generator: seeded alike, the same run drops the same
// elements.
#pragma once
#include "nn/functional.h"
#include "nn/print.h"

namespace sherd::nn {

class Dropout : public Module {
 public:
  explicit Dropout(double p = 0.5) : p_(p) {
    if (p < 0 || p > 1) fail("[Dropout] p must be in [0, 1], got ", p);
  }
  Tensor forward(const Tensor& x) { return F::dropout(x, p_, is_training()); }
  std::string extra_repr() const override { return "p=" + repr(p_) + ", inplace=False"; }

 private:
  double p_;
};

}  // namespace sherd::nn
