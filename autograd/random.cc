#include "core/random.h"

#include <cmath>
#include <limits>

#include "autograd/ops.h"
#include "autograd/record.h"
#include "core/dropout.h"
#include "core/philox.h"

namespace sherd {
using autograd::Needs, autograd::record;

Tensor dropout(const Tensor& x, double p, bool training) {
  if (!(p >= 0 && p <= 1)) fail("[dropout] p must be in [0, 1], got ", p);
  if (!is_float(x.dtype())) fail("[dropout] needs a floating point tensor, not ", x.dtype());
  if (!training || p == 0) return x;
  const Generator::Draw draw = default_generator().next();
  Tensor y = empty(x.sizes(), x.dtype(), x.device());
  if (y.numel()) dropout_kernel(x.device(), x.dtype())(x.detach(), p, draw, y);
  return record<1>("dropout", y, {&x}, [p, draw](const Tensor& g, Needs) {
    // The derivative of a dropout is the same dropout of the gradient; written so that it can be
    // differentiated again.
    const Tensor one = ones(g.sizes(), g.dtype(), g.device());
    if (grad_enabled()) {
      Tensor mask = empty(g.sizes(), g.dtype(), g.device());
      if (mask.numel()) dropout_kernel(g.device(), g.dtype())(one, p, draw, mask);
      return std::array{g * mask};
    }
    Tensor dx = empty(g.sizes(), g.dtype(), g.device());
    if (dx.numel()) dropout_kernel(g.device(), g.dtype())(g, p, draw, dx);
    return std::array{dx};
  });
}

Tensor arange(int64_t end) {
  if (end < 0) fail("[arange] the end ", end, " is negative");
  Tensor t = empty({end}, kInt64);
  for (int64_t i = 0; i < end; ++i) t.data<int64_t>()[i] = i;
  return t;
}
Tensor arange(double start, double end, double step, DType dtype) {
  if (!std::isfinite(start) || !std::isfinite(end) || !std::isfinite(step) || step == 0 ||
      (end - start) / step < 0)
    fail("[arange] step ", step, " does not lead from ", start, " to ", end);
  const double count = std::ceil((end - start) / step);
  if (!(count < 0x1p60))  // as float64, it would not fit an address
    fail("[arange] from ", start, " to ", end, " in steps of ", step, " are ", count,
         " elements, more than memory can hold");
  const int64_t n = int64_t(count);
  Tensor t = empty({n}, kFloat64);
  for (int64_t i = 0; i < n; ++i) t.data<double>()[i] = start + double(i) * step;
  return to_raw(t, dtype);
}
namespace {
void check_real(const char* op, DType dtype) {
  if (!is_float(dtype)) fail("[", op, "] gives floating point numbers, not ", dtype);
}
}  // namespace

Tensor rand(const Dims& sizes, DType dtype) {
  check_real("rand", dtype);
  Tensor t = empty(sizes, dtype);
  if (t.numel()) uniform_kernel(kCPU, dtype)(default_generator().next(), 0, 0.0, 1.0, t);
  return t;
}
Tensor randn(const Dims& sizes, DType dtype) {
  check_real("randn", dtype);
  Tensor t = empty(sizes, dtype);
  if (t.numel()) normal_kernel(kCPU, dtype)(default_generator().next(), 0, 0.0, 1.0, t);
  return t;
}
Tensor randint(int64_t low, int64_t high, const Dims& sizes) {
  if (low >= high) fail("[randint] low ", low, " must be below high ", high);
  Tensor t = empty(sizes, kInt64);
  const Generator::Draw draw = default_generator().next();
  for (int64_t i = 0; i < t.numel(); ++i) {
    const auto words = philox(draw.key, draw.number, uint64_t(i));
    t.data<int64_t>()[i] =
        low + int64_t((uint64_t(words[0]) << 32 | words[1]) % uint64_t(high - low));
  }
  return t;
}
Tensor causal_mask(int64_t t, DType dtype) {
  Tensor m = zeros({t, t}, kFloat64);
  for (int64_t i = 0; i < t; ++i)
    for (int64_t j = i + 1; j < t; ++j)
      m.data<double>()[i * t + j] = -std::numeric_limits<double>::infinity();
  return to_raw(m, dtype);
}

}  // namespace sherd
