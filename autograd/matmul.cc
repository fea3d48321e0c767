#include "autograd/ops.h"
#include "autograd/pointwise.h"
#include "autograd/record.h"
#include "core/column_sum.h"
#include "core/gemm.h"

namespace sherd {
using autograd::Needs, autograd::record, autograd::Saved;
namespace {

// The gradient for input i: made by `write(to, accumulate)`, straight into a sink's buffer where it
// offers one.
template <class F>
Tensor write_gradient(const Needs& needs, int i, const Dims& sizes, DType dtype, Device device,
                      F write) {
  autograd::GradSink::Destination d = needs.destination(i, dtype);
  if (!d.tensor.defined()) d = {empty(sizes, dtype, device), false};
  write(d.tensor, d.accumulate);
  return d.tensor;
}

// [.., M, K] as [M', K], if the leading dimensions lie as one; undefined otherwise.
Tensor fold(const Tensor& x) {
  if (x.dim() == 2) return x.detach();
  if (!x.is_contiguous()) return {};
  int64_t rows = 1;
  for (int i = 0; i + 1 < x.dim(); ++i) rows *= x.size(i);
  return x.as_strided_raw({rows, x.size(-1)}, {x.size(-1), 1}, x.storage_offset());
}

// [.., M, K] x [.., K, N] -> [.., M, N], not recorded.
Tensor product(const Tensor& a, const Tensor& b) {
  NoGrad off;
  Dims batch = broadcast(Dims(std::span(a.sizes().d, a.dim() - 2)),
                         Dims(std::span(b.sizes().d, b.dim() - 2)), "matmul");
  Dims sy = batch;
  sy.push(a.size(-2)), sy.push(b.size(-1));
  Tensor y = empty(sy, a.dtype(), a.device());
  if (y.numel() == 0) return y;
  if (b.dim() == 2) {
    if (Tensor a2 = fold(a.contiguous()); a2.defined() && (a.dim() > 2 || a.is_contiguous())) {
      gemm(a2, b.detach(), fold(y));
      return y;
    }
    if (a.dim() == 2) {
      gemm(a.detach(), b.detach(), y);
      return y;
    }
  }
  auto three = [&](const Tensor& t) {  // without a copy where the strides allow it
    if (t.dim() == 2)
      return t.as_strided_raw({batch.numel(), t.size(0), t.size(1)}, {0, t.stride(0), t.stride(1)},
                              t.storage_offset());
    Dims s = batch;
    s.push(t.size(-2)), s.push(t.size(-1));
    return t.detach().expand(s).reshape({batch.numel(), t.size(-2), t.size(-1)}).detach();
  };
  gemm(three(a), three(b), three(y));
  return y;
}

Tensor recorded_product(const Tensor& a, const Tensor& b) {
  return record<2>("matmul", product(a, b), {&a, &b},
                   [a = Saved(a), b = Saved(b)](const Tensor& g, Needs needs) {
                     const Tensor x = a.get(), w = b.get();
                     std::array<Tensor, 2> r;
                     if (grad_enabled()) {
                       if (needs[0])
                         r[0] = sum_to(recorded_product(g, w.transpose(-1, -2)), x.sizes());
                       if (needs[1])
                         r[1] = sum_to(recorded_product(x.transpose(-1, -2), g), w.sizes());
                       return r;
                     }
                     if (needs[0]) r[0] = sum_to(product(g, w.transpose(-1, -2)), x.sizes());
                     if (needs[1]) {
                       const Tensor x2 = w.dim() == 2 ? fold(x) : Tensor(),
                                    g2 = w.dim() == 2 ? fold(g.contiguous()) : Tensor();
                       if (x2.defined() && g2.defined())
                         r[1] = write_gradient(needs, 1, w.sizes(), x.dtype(), x.device(),
                                               [&](const Tensor& to, bool accumulate) {
                                                 gemm(x2.transpose(0, 1), g2, to,
                                                      {.accumulate = accumulate});
                                               });
                       else
                         r[1] = sum_to(product(x.transpose(-1, -2), g), w.sizes());
                     }
                     return r;
                   });
}

}  // namespace

Tensor matmul(const Tensor& a, const Tensor& b) {
  for (auto* t : {&a, &b}) autograd::refuse_placeholder("matmul", *t);
  if (a.dim() == 0 || b.dim() == 0)
    fail("[matmul] both inputs need at least one dimension, got shapes ", a.sizes(), " and ",
         b.sizes());
  if (a.dtype() != b.dtype())
    fail("[matmul] dtypes differ: ", a.dtype(), " and ", b.dtype(), ": convert one with to()");
  if (a.size(-1) != b.size(b.dim() == 1 ? 0 : -2))
    fail("[matmul] shapes ", a.sizes(), " and ", b.sizes(), " do not fit: the inner sizes differ");
  Tensor y = recorded_product(a.dim() == 1 ? a.unsqueeze(0) : a, b.dim() == 1 ? b.unsqueeze(1) : b);
  if (b.dim() == 1) y = y.squeeze(-1);
  if (a.dim() == 1) y = y.squeeze(b.dim() == 1 ? -1 : -2);
  return y;
}
Tensor Tensor::matmul(const Tensor& o) const { return sherd::matmul(*this, o); }

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  autograd::refuse_placeholder("linear", weight);
  if (weight.dim() == 1) {  // one output feature, without its dimension
    const Tensor y = sherd::matmul(x, weight);
    return bias.defined() ? y + bias : y;
  }
  if (weight.dim() != 2 || x.dim() < 1 || x.size(-1) != weight.size(1))
    fail("[linear] input ", x.sizes(), " does not fit weight ", weight.sizes(),
         ": expected an input [.., in_features] and a weight [out_features, in_features]");
  if (bias.defined()) {
    autograd::refuse_placeholder("linear", bias);
    if (bias.dim() != 1 || bias.size(0) != weight.size(0))
      fail("[linear] bias ", bias.sizes(), " does not fit weight ", weight.sizes(), ": expected [",
           weight.size(0), "]");
  }
  if (x.dtype() != weight.dtype() || (bias.defined() && bias.dtype() != weight.dtype()))
    fail("[linear] dtypes differ: input ", x.dtype(), ", weight ", weight.dtype(),
         bias.defined() ? concat(", bias ", bias.dtype()) : std::string());
  const Tensor xc = x.contiguous();
  Dims sizes = x.sizes();
  sizes[sizes.n - 1] = weight.size(0);
  Tensor y = empty(sizes, x.dtype(), x.device());
  const int64_t in = weight.size(1), out = weight.size(0),
                rows = in ? x.numel() / in : y.numel() / std::max<int64_t>(1, out);
  auto flat = [rows](const Tensor& t, int64_t columns) {
    return t.as_strided_raw({rows, columns}, {columns, 1}, t.storage_offset());
  };
  if (y.numel())
    gemm(flat(xc, in), weight.detach().transpose(0, 1).detach(), flat(y, out),
         {.bias = bias.defined() ? contiguous_raw(bias) : Tensor()});
  return record<3>(
      "linear", y, {&xc, &weight, &bias},
      [x = Saved(xc), w = Saved(weight), in, out, rows, flat](const Tensor& g, Needs needs) {
        std::array<Tensor, 3> r;
        const Tensor xv = x.get(), wv = w.get();
        if (grad_enabled()) {
          const Tensor g2 = g.reshape({rows, out}), x2 = xv.reshape({rows, in});
          if (needs[0]) r[0] = sherd::matmul(g, wv);
          if (needs[1]) r[1] = sherd::matmul(g2.transpose(0, 1), x2);
          if (needs[2]) r[2] = sum(g2, {0});
          return r;
        }
        const Tensor gc = contiguous_raw(g), g2 = flat(gc, out);
        if (needs[0]) {
          r[0] = empty(xv.sizes(), xv.dtype(), xv.device());
          if (r[0].numel()) gemm(g2, wv.detach(), flat(r[0], in));
        }
        if (needs[1])
          r[1] = write_gradient(needs, 1, wv.sizes(), wv.dtype(), wv.device(),
                                [&](const Tensor& to, bool accumulate) {
                                  gemm(g2.transpose(0, 1).detach(), flat(xv, in), to,
                                       {.accumulate = accumulate});
                                });
        if (needs[2])
          r[2] = write_gradient(needs, 2, {out}, wv.dtype(), wv.device(),
                                [&](const Tensor& to, bool accumulate) {
                                  if (out)
                                    column_sum_kernel(g2.device(), g2.dtype())(g2, to, accumulate);
                                });
        return r;
      });
}

}  // namespace sherd
