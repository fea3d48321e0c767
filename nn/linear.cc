#include "nn/linear.h"

#include "nn/functional.h"
#include "nn/print.h"

namespace sherd::nn {

Linear::Linear(int64_t in_features, int64_t out_features, const Options& options)
    : in_features_(in_features), out_features_(out_features) {
  if (in_features < 0 || out_features < 0)
    fail("[Linear] in_features ", in_features, " and out_features ", out_features,
         " must not be negative");
  weight = parameter("weight", {out_features, in_features}, init::kaiming_uniform(in_features),
                     options.dtype);
  if (options.bias)
    bias = parameter("bias", {out_features}, init::kaiming_uniform(in_features), options.dtype);
}

Tensor Linear::forward(const Tensor& x) {
  return F::linear(x, weight, bias.defined() ? bias.get() : Tensor());
}

std::string Linear::extra_repr() const {
  return concat("in_features=", in_features_, ", out_features=", out_features_,
                ", bias=", repr(bias.defined()));
}

}  // namespace sherd::nn
