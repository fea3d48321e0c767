#include "autograd/gradcheck.h"

#include <cmath>

#include "autograd/engine.h"
#include "autograd/grad_mode.h"
#include "core/philox.h"

namespace sherd {
namespace {

// Fixed weights in [0.5, 1.5): one sum of all outputs shows every derivative.
Tensor weights(const Dims& sizes, uint64_t key) {
  Tensor t = empty(sizes, kFloat64);
  for (int64_t i = 0; i < t.numel(); ++i) {
    const auto w = philox(key, 0, uint64_t(i));
    t.data<double>()[i] = 0.5 + uniform_double(w[0], w[1]);
  }
  return t;
}

std::vector<Tensor> leaves_of(const std::vector<Tensor>& inputs) {
  std::vector<Tensor> leaves;
  for (auto& t : inputs) {
    Tensor c = t.defined() ? t.detach().clone() : t;
    if (c.defined() && c.dtype() == kFloat64) c.requires_grad_();
    leaves.push_back(c);
  }
  return leaves;
}

Tensor weighted_sum(const std::vector<Tensor>& outputs) {
  Tensor total = zeros({}, kFloat64);
  for (size_t k = 0; k < outputs.size(); ++k)
    if (outputs[k].defined() && is_float(outputs[k].dtype()))
      total = total + (outputs[k] * weights(outputs[k].sizes(), k)).sum();
  return total;
}

}  // namespace

void gradcheck(const TensorsFunction& f, const std::vector<Tensor>& inputs,
               const GradcheckOptions& o) {
  const std::vector<Tensor> leaves = leaves_of(inputs);
  std::vector<Tensor> wanted;
  for (auto& t : leaves)
    if (t.defined() && t.requires_grad()) wanted.push_back(t);
  const Tensor y = weighted_sum(f(leaves));
  std::vector<Tensor> got(wanted.size());
  if (y.requires_grad())
    got = grad({y}, wanted, {}, {.create_graph = o.create_graph, .allow_unused = true});
  for (size_t k = 0, i = 0; i < leaves.size(); ++i) {
    if (!leaves[i].defined() || !leaves[i].requires_grad()) continue;
    const Tensor analytic = got[k++];
    const Tensor a =
        analytic.defined() ? contiguous_raw(analytic) : zeros(leaves[i].sizes(), kFloat64);
    if (!(a.sizes() == leaves[i].sizes()))
      fail("[gradcheck] the gradient of input ", i, " has shape ", a.sizes(), ", the input ",
           leaves[i].sizes());
    std::vector<Tensor> moved = leaves_of(inputs);
    const Tensor x =
        moved[i].is_contiguous() ? moved[i] : moved[i].detach().contiguous().set_requires_grad();
    moved[i] = x;
    for (int64_t e = 0; e < x.numel(); ++e) {
      double* p = x.data<double>() + e;
      const double v = *p;
      double side[2];
      for (int s : {0, 1}) {
        *p = v + (s ? o.eps : -o.eps);
        GradMode mode(true);  // functions that take gradients themselves need a tape
        side[s] = weighted_sum(f(moved)).item();
      }
      *p = v;
      const double numeric = (side[1] - side[0]) / (2 * o.eps), have = a.data<double>()[e];
      if (!(std::abs(have - numeric) <= o.atol + o.rtol * std::abs(numeric)))
        fail("[gradcheck] input ", i, ", element ", e, ": the derivative is ", have,
             ", by differences ", numeric);
    }
  }
}

void gradgradcheck(const TensorsFunction& f, const std::vector<Tensor>& inputs,
                   const GradcheckOptions& o) {
  const TensorsFunction derivative = [&f](const std::vector<Tensor>& in) {
    std::vector<Tensor> wanted;
    for (auto& t : in)
      if (t.defined() && t.requires_grad()) wanted.push_back(t);
    const Tensor y = weighted_sum(f(in));
    if (!y.requires_grad()) return std::vector<Tensor>{};
    std::vector<Tensor> g = grad({y}, wanted, {}, {.create_graph = true, .allow_unused = true});
    for (auto& t : g)
      if (t.defined()) t = t * t;  // so that constant derivatives are seen too
    return g;
  };
  gradcheck(derivative, inputs, o);
}

}  // namespace sherd
