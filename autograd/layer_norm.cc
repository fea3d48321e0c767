#include "core/layer_norm.h"

#include "autograd/engine.h"
#include "autograd/ops.h"
#include "autograd/record.h"

namespace sherd {
using autograd::alias, autograd::Needs, autograd::record, autograd::Saved;

Tensor layer_norm_composed(const Tensor& x, const Dims& shape, const Tensor& weight,
                           const Tensor& bias, double eps) {
  Dims dims;
  for (int i = x.dim() - shape.n; i < x.dim(); ++i) dims.push(i);
  const Tensor c = x - mean(x, dims, true);
  Tensor y = c / sqrt(mean(c * c, dims, true) + eps);
  if (weight.defined()) y = y * weight;
  return bias.defined() ? y + bias : y;
}

Tensor layer_norm(const Tensor& x, const Dims& shape, const Tensor& weight, const Tensor& bias,
                  double eps) {
  for (auto* p : {&weight, &bias}) autograd::refuse_placeholder("layer_norm", *p);
  if (!is_float(x.dtype())) fail("[layer_norm] needs a floating point tensor, not ", x.dtype());
  if (shape.n == 0 || shape.n > x.dim() ||
      !std::equal(shape.begin(), shape.end(), x.sizes().end() - shape.n))
    fail("[layer_norm] shape ", shape, " does not end the input's shape ", x.sizes());
  for (auto* p : {&weight, &bias})
    if (p->defined() && !(p->sizes() == shape))
      fail("[layer_norm] weight and bias must have shape ", shape, ", not ", p->sizes());
    else if (p->defined() && !is_float(p->dtype()))
      fail("[layer_norm] weight and bias must be floating point, not ", p->dtype());
  const int64_t d = shape.numel(), rows = d ? x.numel() / d : 0;
  const DType statistics = x.dtype() == kFloat64 ? kFloat64 : kFloat32;
  Tensor mean = empty({rows}, statistics, x.device()), rstd = empty({rows}, statistics, x.device()),
         y = empty(x.sizes(), x.dtype(), x.device());
  auto matrix = [rows, d](const Tensor& t) {
    return t.as_strided_raw({rows, d}, {d, 1}, t.storage_offset());
  };
  auto vector = [d](const Tensor& t) {
    if (!t.defined()) return Tensor();
    const Tensor c = contiguous_raw(t);
    return c.as_strided_raw({d}, {1}, c.storage_offset());
  };
  const Tensor xc = x.contiguous();
  if (x.numel())
    layer_norm_forward(x.device(), x.dtype())(matrix(xc), vector(weight), vector(bias), eps,
                                              matrix(y), mean, rstd);
  return record<3>(
      "layer_norm", y, {&xc, &weight, &bias},
      [x = Saved(xc), weight = Saved(weight), bias = Saved(bias), mean, rstd, shape, eps, matrix,
       vector](const Tensor& g, Needs needs) {
        std::array<Tensor, 3> r;
        const Tensor in[3] = {x.get(), weight.get(), bias.get()};
        if (grad_enabled()) {  // composed: can be differentiated again
          const Tensor own[3] = {alias(in[0]), alias(in[1]), alias(in[2])};
          const Tensor y = layer_norm_composed(own[0], shape, own[1], own[2], eps);
          std::vector<Tensor> inputs;
          for (int i = 0; i < 3; ++i)
            if (needs[i]) inputs.push_back(own[i]);
          auto grads = grad({y}, inputs, {g}, {.create_graph = true});
          for (int i = 0, k = 0; i < 3; ++i)
            if (needs[i]) r[i] = grads[k++];
          return r;
        }
        // The kernel writes; where a sink wants the sum with what it has, that is added after.
        for (int i = 0; i < 3; ++i) {
          if (!needs[i]) continue;
          if (i > 0)
            if (autograd::GradSink::Destination to = needs.destination(i, in[i].dtype());
                to.tensor.defined() && !to.accumulate) {
              r[i] = to.tensor;
              continue;
            }
          r[i] = empty(in[i].sizes(), in[i].dtype(), g.device());
        }
        if (in[0].numel())
          layer_norm_backward(g.device(), in[0].dtype())(
              matrix(contiguous_raw(g)), matrix(in[0]), vector(in[1]), mean, rstd,
              r[0].defined() ? matrix(r[0]) : Tensor(), vector(r[1]), vector(r[2]));
        else
          for (int i = 1; i < 3; ++i)
            if (r[i].defined()) copy_raw(r[i], Tensor(0));
        return r;
      });
}

}  // namespace sherd
