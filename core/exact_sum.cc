#include "core/exact_sum.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

namespace sherd {
namespace {

// mantissa * 2^exponent, with an even exponent: the sum of squares may exceed a double.
struct Scaled {
  double mantissa = 0;
  int exponent = 0;
};

using Limbs = std::array<int64_t, ExactSum::kLimbs>;

// The number that carried limbs stand for, rounded to nearest even.
Scaled round_to_double(const Limbs& limbs) {
  int top = ExactSum::kLimbs - 1;
  while (top > 0 && !limbs[top]) --top;
  // Three limbs hold at least 81 significant bits; what lies below can only break a tie.
  const int low = std::max(0, top - 2);
  unsigned __int128 v = 0;
  for (int k = top; k >= low; --k) v = (v << ExactSum::kBits) + uint64_t(limbs[k]);
  if (std::any_of(limbs.begin(), limbs.begin() + low, [](int64_t d) { return d != 0; })) v |= 1;
  return {double(v), ExactSum::kLowest + ExactSum::kBits * low};
}

// The sum, or {NaN or infinity, 0}.
Scaled total(const Tensor& state) {
  const int64_t* s = state.data<int64_t>();
  if (s[ExactSum::kNaNs]) return {std::numeric_limits<double>::quiet_NaN(), 0};
  if (s[ExactSum::kInfs]) return {ExactSum::kInfinity, 0};
  Limbs limbs;
  std::copy_n(s, ExactSum::kLimbs, limbs.begin());
  ExactSum::carry(limbs.data());
  return round_to_double(limbs);
}

}  // namespace

void ExactSum::carry(int64_t* limbs) {
  for (int k = 0; k + 1 < kLimbs; ++k) {
    const int64_t up = limbs[k] >> kBits;
    limbs[k] -= up * (int64_t(1) << kBits);
    limbs[k + 1] += up;
  }
}

ExactSum::ExactSum(double p, Device device) : p_(p) {
  if (!(p > 0)) fail("[exact_sum] p must be above 0 (or infinity), got ", p);
  state_ = zeros({merges_by_max() ? 1 : kStateSize}, kInt64, device);
}

void ExactSum::add(const Tensor& x) {
  if (!is_float(x.dtype())) fail("[exact_sum] needs a floating dtype, got ", x.dtype());
  if (x.device() != state_.device())
    fail("[exact_sum] the sum is on ", state_.device(), ", the tensor on ", x.device());
  if (x.numel() == 0) return;
  exact_sum_kernel(x.device(), x.dtype())(contiguous_raw(x), p_, state_);
}

void ExactSum::merge(const ExactSum& other) {
  if (p_ != other.p_) fail("[exact_sum] cannot merge p = ", other.p_, " into p = ", p_);
  int64_t* to = state_.data<int64_t>();
  const int64_t* from = other.state_.data<int64_t>();
  if (merges_by_max()) {
    to[0] = std::max(to[0], from[0]);
    return;
  }
  for (int i = 0; i < kStateSize; ++i) to[i] += from[i];
  carry(to);
}

double ExactSum::sum() const {
  if (merges_by_max()) return std::bit_cast<double>(state_.data<int64_t>()[0]);
  const Scaled t = total(state_);
  return std::ldexp(t.mantissa, t.exponent);
}

double ExactSum::norm() const {
  if (merges_by_max() || p_ == 1) return sum();
  if (p_ != 2) return std::pow(sum(), 1 / p_);
  const Scaled t = total(state_);
  return std::ldexp(std::sqrt(t.mantissa), t.exponent / 2);
}

}  // namespace sherd
