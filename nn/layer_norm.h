// LayerNorm: y = (x - mean) / sqrt(var + eps) * weight + bias over the trailing dimensions.
// Ba, Kiros, Hinton: Layer Normalization. arXiv 1607.06450.
#pragma once
#include "nn/module.h"

namespace sherd::nn {

struct LayerNormOptions {
  double eps = 1e-5;
  bool elementwise_affine = true;
  bool bias = true;
  DType dtype = kFloat32;
};

// weight and bias [normalized_shape], ones and zeros.
class LayerNorm : public Module {
 public:
  using Options = LayerNormOptions;
  explicit LayerNorm(int64_t dim, const Options& options = {}) : LayerNorm(Dims{dim}, options) {}
  explicit LayerNorm(const Dims& normalized_shape, const Options& options = {});
  Tensor forward(const Tensor& x);
  std::string extra_repr() const override;

  Parameter weight, bias;

 private:
  Dims shape_;
  double eps_;
};

}  // namespace sherd::nn
