#include "core/softmax.h"

#include "autograd/ops.h"
#include "autograd/record.h"

namespace sherd {
using autograd::kOutput, autograd::Needs, autograd::record, autograd::Saved;
namespace {

void check(const char* op, const Tensor& x) {
  if (!is_float(x.dtype())) fail("[", op, "] needs a floating point tensor, not ", x.dtype());
}

// x with dimension k and the last exchanged.
Tensor turned(const Tensor& x, int k) {
  if (x.dim() == 0) return x.detach();
  Dims sizes = x.sizes(), strides = x.strides();
  std::swap(sizes[k], sizes[x.dim() - 1]), std::swap(strides[k], strides[x.dim() - 1]);
  return x.as_strided_raw(sizes, strides, x.storage_offset());
}
// Rows along the last dimension, [N, C] contiguous.
Tensor rows_of(const Tensor& x) {
  const Tensor c = contiguous_raw(x);
  const int64_t n = x.dim() ? x.size(-1) : 1;
  return c.as_strided_raw({n ? x.numel() / n : 0, n}, {n, 1}, c.storage_offset());
}
// A contiguous tensor like x, of which f(rows) writes the rows along dimension k.
template <class F>
Tensor written(const Tensor& x, int k, F f) {
  const Tensor y = empty(x.sizes(), x.dtype(), x.device());
  if (y.numel() == 0) return y;
  const Tensor to = turned(y, k);
  if (to.is_contiguous()) {
    f(rows_of(to));
  } else {
    const Tensor rows = empty(to.sizes(), to.dtype(), to.device());
    f(rows_of(rows));
    copy_raw(to, rows);
  }
  return y;
}

using Forward = Kernel<void(const Tensor&, const Tensor&)>;
using Backward = Kernel<void(const Tensor&, const Tensor&, const Tensor&)>;

Tensor by_rows(const char* op, const Tensor& x, int64_t dim, const Forward& forward,
               const Backward& backward,
               Tensor (*composed)(const Tensor& g, const Tensor& y, const Dims& dims)) {
  check(op, x);
  const int k = wrap_dim(op, dim, x.dim());
  const Tensor y = written(x, k, [&](const Tensor& rows) {
    forward(x.device(), x.dtype())(rows_of(turned(x, k)), rows);
  });
  return record<1>(
      op, y, {&x}, [y = Saved(y, kOutput), &backward, composed, k](const Tensor& g, Needs) {
        const Tensor v = y.get();
        if (grad_enabled()) return std::array{composed(g, v, v.dim() ? Dims{k} : Dims{})};
        return std::array{written(v, k, [&](const Tensor& rows) {
          backward(v.device(), v.dtype())(rows_of(turned(g, k)), rows_of(turned(v, k)), rows);
        })};
      });
}

}  // namespace

Tensor softmax(const Tensor& x, int64_t dim) {
  return by_rows("softmax", x, dim, softmax_forward, softmax_backward,
                 [](const Tensor& g, const Tensor& y, const Dims& dims) {
                   return y * (g - sum(g * y, dims, true));
                 });
}
Tensor log_softmax(const Tensor& x, int64_t dim) {
  return by_rows("log_softmax", x, dim, log_softmax_forward, log_softmax_backward,
                 [](const Tensor& g, const Tensor& y, const Dims& dims) {
                   return g - exp(y) * sum(g, dims, true);
                 });
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
