#include "nn/layer_norm.h"

#include "nn/functional.h"

namespace sherd::nn {

LayerNorm::LayerNorm(const Dims& normalized_shape, const Options& options)
    : shape_(normalized_shape), eps_(options.eps) {
  if (!options.elementwise_affine) return;
  weight = parameter("weight", shape_, init::ones(), options.dtype);
  if (options.bias) bias = parameter("bias", shape_, init::zeros(), options.dtype);
}

Tensor LayerNorm::forward(const Tensor& x) {
  return F::layer_norm(x, shape_, weight.defined() ? weight.get() : Tensor(),
                       bias.defined() ? bias.get() : Tensor(), eps_);
}

}  // namespace sherd::nn
