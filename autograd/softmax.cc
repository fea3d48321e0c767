#include "core/softmax.h"

#include "autograd/ops.h"
#include "autograd/record.h"

namespace sherd {
using autograd::kOutput, autograd::Needs, autograd::record, autograd::Saved;
namespace {

void check(const char* op, const Tensor& x) {
  if (!is_float(x.dtype())) fail("[", op, "] needs a floating point tensor, not ", x.dtype());
}

// Rows along the last dimension, [N, C] contiguous.
Tensor rows_of(const Tensor& x) {
  const Tensor c = contiguous_raw(x);
  const int64_t n = x.dim() ? x.size(-1) : 1;
  return c.as_strided_raw({n ? x.numel() / n : 0, n}, {n, 1}, c.storage_offset());
}

using Forward = Kernel<void(const Tensor&, const Tensor&)>;
using Backward = Kernel<void(const Tensor&, const Tensor&, const Tensor&)>;

Tensor by_rows(const char* op, const Tensor& x, int64_t dim, const Forward& forward,
               const Backward& backward, Tensor (*composed)(const Tensor& g, const Tensor& y)) {
  check(op, x);
  const int k = wrap_dim(op, dim, x.dim());
  if (x.dim() && k != x.dim() - 1)
    return by_rows(op, x.transpose(k, -1), -1, forward, backward, composed).transpose(k, -1);
  Tensor y = empty(x.sizes(), x.dtype(), x.device());
  if (y.numel()) forward(x.device(), x.dtype())(rows_of(x), rows_of(y));
  return record<1>(op, y, {&x},
                   [y = Saved(y, kOutput), &backward, composed](const Tensor& g, Needs) {
                     const Tensor v = y.get();
                     if (grad_enabled()) return std::array{composed(g, v)};
                     Tensor dx = empty(v.sizes(), v.dtype(), v.device());
                     if (dx.numel())
                       backward(v.device(), v.dtype())(rows_of(g), rows_of(v), rows_of(dx));
                     return std::array{dx};
                   });
}

Dims last(const Tensor& x) { return x.dim() ? Dims{-1} : Dims{}; }

}  // namespace

Tensor softmax(const Tensor& x, int64_t dim) {
  return by_rows(
      "softmax", x, dim, softmax_forward, softmax_backward,
      [](const Tensor& g, const Tensor& y) { return y * (g - sum(g * y, last(y), true)); });
}
Tensor log_softmax(const Tensor& x, int64_t dim) {
  return by_rows(
      "log_softmax", x, dim, log_softmax_forward, log_softmax_backward,
      [](const Tensor& g, const Tensor& y) { return g - exp(y) * sum(g, last(y), true); });
}

Tensor softmax_composed(const Tensor& x, int64_t dim) {
  const Dims d = x.dim() ? Dims{dim} : Dims{};
  check("softmax", x);
  const Tensor e = exp(x - amax(x, d, true).detach());
  return e / sum(e, d, true);
}
Tensor log_softmax_composed(const Tensor& x, int64_t dim) {
  const Dims d = x.dim() ? Dims{dim} : Dims{};
  check("log_softmax", x);
  const Tensor c = x - amax(x, d, true).detach();
  return c - log(sum(exp(c), d, true));
}

}  // namespace sherd
