// Linear: y = x weight^T + bias.
#pragma once
#include "nn/module.h"

namespace sherd::nn {

struct LinearOptions {
  bool bias = true;
  DType dtype = kFloat32;
};

// weight [out_features, in_features], bias [out_features], both uniform in +-1 / sqrt(in_features),
// as PyTorch's.
class Linear : public Module {
 public:
  using Options = LinearOptions;
  Linear(int64_t in_features, int64_t out_features, const Options& options = {});
  Tensor forward(const Tensor& x);  // [.., in_features] -> [.., out_features]
  std::string extra_repr() const override;

  Parameter weight, bias;  // bias is not defined() without one

 private:
  int64_t in_features_, out_features_;
};

}  // namespace sherd::nn
