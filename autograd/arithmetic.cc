#include "core/ops/arithmetic.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "autograd/pointwise.h"

namespace sherd {
using autograd::Needs, autograd::record;

namespace {
// b's factor must be a number of the dtype that is computed in.
void check_alpha(const char* op, const Tensor& a, const Tensor& b, double alpha) {
  const Tensor* in[] = {&a, &b};
  const DType d = plan(op, in, -1, kNumbers, false).common;
  if (is_float(d)) return;
  if (alpha != std::trunc(alpha))
    fail("[", op, "] alpha ", alpha, " must be a whole number for ", d, " tensors");
  scalar_for(op, alpha, d == kBool ? kInt32 : d);
}
void check_sub(const Tensor& a, const Tensor& b) {
  if (a.dtype() == kBool && b.dtype() == kBool)
    fail("[sub] two bool tensors cannot be subtracted: use logical operators");
}
}  // namespace

Tensor add(const Tensor& a, const Tensor& b, double alpha) {
  if (alpha == 1) return call(Add{}, a, b);
  check_alpha("add", a, b, alpha);
  return call(AddScaled{alpha}, a, b);
}
Tensor sub(const Tensor& a, const Tensor& b, double alpha) {
  check_sub(a, b);
  if (alpha == 1) return call(Sub{}, a, b);
  check_alpha("sub", a, b, alpha);
  return call(AddScaled{-alpha}, a, b);
}
Tensor mul(const Tensor& a, const Tensor& b) { return call(Mul{}, a, b); }
Tensor div(const Tensor& a, const Tensor& b) { return call(Div{}, a, b); }
Tensor pow(const Tensor& a, const Tensor& b) {
  if (!is_float(a.dtype()) && !is_float(b.dtype()) && b.impl()->wrapped && b.item() < 0)
    fail("[pow] ", a.dtype(), " tensors have no power of ", b.item<int64_t>(),
         ": convert to a floating point dtype first");
  return call(Pow{}, a, b);
}
Tensor maximum(const Tensor& a, const Tensor& b) { return call(Maximum{}, a, b); }
Tensor minimum(const Tensor& a, const Tensor& b) { return call(Minimum{}, a, b); }
Tensor where(const Tensor& c, const Tensor& a, const Tensor& b) {
  if (c.dtype() != kBool) fail("[where] the condition must be bool, got ", c.dtype());
  return call(Where{}, c, a, b);
}
Tensor masked_fill(const Tensor& x, const Tensor& mask, double value) {
  if (mask.dtype() != kBool) fail("[masked_fill] the mask must be bool, got ", mask.dtype());
  return where(mask, scalar_for("masked_fill", value, x.dtype()), x).to(x.dtype());
}
Tensor neg(const Tensor& x) {
  if (x.dtype() == kBool) fail("[neg] a bool tensor has no negative: use logical operators");
  return call(Neg{}, x);
}
Tensor abs(const Tensor& x) { return call(Abs{}, x); }
Tensor clamp(const Tensor& x, double min, double max) {
  if (std::isnan(min) || std::isnan(max))  // as in PyTorch: NaN everywhere, gradients of 0
    return (is_float(x.dtype()) ? x : x.to(kFloat32)) * 0 + NAN;
  if (is_float(x.dtype()) || x.dtype() == kBool) return call(Clamp{min, max}, x);
  const auto is_whole = [](double v) { return std::isinf(v) || v == std::floor(v); };
  if (!is_whole(min) || !is_whole(max)) return call(Clamp{min, max}, x.to(kFloat32));
  // In whole numbers; a bound that no value of the dtype reaches is none.
  const auto [least, most] = range_of(x.dtype());
  const auto bound = [least, most](double v) {
    v = std::clamp(v, least, most);
    return Tensor(v == 0x1p63 ? INT64_MAX : int64_t(v));
  };
  Tensor y = x;
  if (min > least) y = maximum(y, bound(min));
  if (max < most) y = minimum(y, bound(max));
  return y.is_same(x) ? x.clone() : y;
}

Tensor operator+(const Tensor& a, const Tensor& b) { return add(a, b); }
Tensor operator-(const Tensor& a, const Tensor& b) { return sub(a, b); }
Tensor operator*(const Tensor& a, const Tensor& b) { return mul(a, b); }
Tensor operator/(const Tensor& a, const Tensor& b) { return div(a, b); }
Tensor operator-(const Tensor& a) { return neg(a); }
Tensor operator<(const Tensor& a, const Tensor& b) { return call(Less{}, a, b); }
Tensor operator>(const Tensor& a, const Tensor& b) { return call(Greater{}, a, b); }
Tensor operator<=(const Tensor& a, const Tensor& b) { return call(LessEqual{}, a, b); }
Tensor operator>=(const Tensor& a, const Tensor& b) { return call(GreaterEqual{}, a, b); }
Tensor operator==(const Tensor& a, const Tensor& b) { return call(Equal{}, a, b); }
Tensor operator!=(const Tensor& a, const Tensor& b) { return call(NotEqual{}, a, b); }
Tensor operator&(const Tensor& a, const Tensor& b) { return call(And{}, a, b); }
Tensor operator|(const Tensor& a, const Tensor& b) { return call(Or{}, a, b); }

// ---- in place
namespace autograd {
void check_in_place(const char* op, const Tensor& x, bool gives_history) {
  if (x.device().is_meta() && x.is_leaf() && x.requires_grad())
    fail(
        "[", op,
        "_] a leaf on the meta device has no values, and what is written to it would be lost: of a "
        "module's parameter, call materialize() on the module first");
  if (!grad_enabled() || !(x.requires_grad() || gives_history)) return;
  if (x.requires_grad() && x.is_leaf())
    fail("[", op,
         "_] a leaf that requires a gradient cannot be changed in place: do it under no_grad");
  if (x.impl()->is_view)
    fail("[", op,
         "_] an in-place change of a view that is to have a gradient is not supported: write ", op,
         "(..) and use its result");
  if (!x.requires_grad() && x.impl()->family && x.impl()->family->count > 1)
    fail("[", op,
         "_] an in-place change would give the tensor a gradient that other views of it do not "
         "have: "
         "make it on a clone");
}
}  // namespace autograd

Tensor& Tensor::add_(const Tensor& o, double alpha) {
  if (alpha == 1) return call_(Add{}, *this, o);
  check_alpha("add", *this, o, alpha);
  return call_(AddScaled{alpha}, *this, o);
}
Tensor& Tensor::sub_(const Tensor& o) {
  check_sub(*this, o);
  return call_(Sub{}, *this, o);
}
Tensor& Tensor::mul_(const Tensor& o) { return call_(Mul{}, *this, o); }
Tensor& Tensor::div_(const Tensor& o) { return call_(Div{}, *this, o); }

// ---- conversion
Tensor Tensor::to(DType d) const {
  if (d == dtype()) return *this;
  const Tensor* like[] = {this};
  Tensor y = output({sizes(), d, d, device()}, like);
  copy_raw(y, *this);
  if (!is_float(d)) return y;
  return record<1>("to", y, {this},
                   [from = dtype()](const Tensor& g, Needs) { return std::array{g.to(from)}; });
}
Tensor Tensor::to(Device d) const {
  if (d == device()) return *this;
  if (d.is_meta()) return empty(sizes(), dtype(), d);
  if (device().is_meta())
    fail("[to] a tensor on the meta device has no data to copy to ", d,
         ": materialize the module, or make a new one");
  fail("[to] this build has no CUDA: tensors live on the cpu or the meta device");
}
Tensor Tensor::clone() const {
  const Tensor* like[] = {this};
  Tensor y = output({sizes(), dtype(), dtype(), device()}, like);
  copy_raw(y, *this);
  return record<1>("clone", y, {this}, [](const Tensor& g, Needs) { return std::array{g}; });
}
Tensor Tensor::contiguous() const {
  if (is_contiguous()) return *this;
  Tensor y = empty(sizes(), dtype(), device());
  copy_raw(y, *this);
  return record<1>("contiguous", y, {this}, [](const Tensor& g, Needs) { return std::array{g}; });
}

namespace {
void copy_as(const char* name, Tensor& to, const Tensor& from) {
  check_no_overlap(name, to, from);
  autograd::check_in_place(name, to, from.requires_grad() && is_float(to.dtype()));
  copy_raw(to, from);
  to.bump_version();
  const Tensor* const inputs[] = {&to, &from};
  auto gradients = [](const Tensor& g, Needs needs) {
    std::array<Tensor, 2> r;  // what was there gets a gradient of 0
    if (needs[0]) r[0] = zeros(g.sizes(), g.dtype(), g.device());
    if (needs[1]) r[1] = g;
    return r;
  };
  if (Ref<autograd::Node> node = autograd::node_for(name, to, inputs, gradients, true))
    autograd::set_history(to, std::move(node));
}
}  // namespace

Tensor& Tensor::copy_(const Tensor& from) {
  check_not_expanded("copy", *this);  // fill_ and zero_ leave equal elements there
  copy_as("copy", *this, from);
  return *this;
}
Tensor& Tensor::fill_(double value) {
  copy_as("fill", *this, scalar_for("fill_", value, dtype()));
  return *this;
}
Tensor& Tensor::zero_() {
  copy_as("zero", *this, Tensor(0.0));
  return *this;
}

}  // namespace sherd
