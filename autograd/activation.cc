#include "core/ops/activation.h"

#include "autograd/pointwise.h"

namespace sherd {

Tensor exp(const Tensor& x) { return call(Exp{}, x); }
Tensor log(const Tensor& x) { return call(Log{}, x); }
Tensor sqrt(const Tensor& x) { return call(Sqrt{}, x); }
Tensor tanh(const Tensor& x) { return call(Tanh{}, x); }
Tensor erf(const Tensor& x) { return call(Erf{}, x); }
Tensor sigmoid(const Tensor& x) { return call(Sigmoid{}, x); }
Tensor relu(const Tensor& x) { return call(Relu{}, x); }
Tensor leaky_relu(const Tensor& x, double slope) { return call(LeakyRelu{slope}, x); }
Tensor silu(const Tensor& x) { return call(Silu{}, x); }
Tensor gelu(const Tensor& x, const std::string& approximate) {
  if (approximate != "none" && approximate != "tanh")
    fail("[gelu] approximate must be none or tanh, not ", approximate);
  return approximate == "tanh" ? call(GeluTanh{}, x) : call(Gelu{}, x);
}

}  // namespace sherd
