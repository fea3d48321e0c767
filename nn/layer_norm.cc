#include "nn/layer_norm.h"

#include "nn/functional.h"
#include "nn/print.h"

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

std::string LayerNorm::extra_repr() const {
  std::string shape;
  for (int64_t size : shape_) shape += concat(shape.empty() ? "" : " ", size, ",");
  if (shape_.n != 1 && !shape.empty()) shape.pop_back();  // a tuple of one keeps its comma
  return concat("(", shape, "), eps=", repr(eps_), ", elementwise_affine=", repr(weight.defined()),
                ", bias=", repr(bias.defined()));
}

}  // namespace sherd::nn
