// Maxima and exponentials over a row. To be inlined into functions of either instruction set.
#pragma once
#include "core/cpu/rows.h"
#include "core/lane.h"

namespace sherd::cpu {

// The largest element; NaNs are passed over (the exponential brings them back).
template <class T>
[[gnu::always_inline]] inline T max_of(const T* x, int64_t n) {
  return fold_of<T>(
      n, -std::numeric_limits<T>::infinity(), [=](int64_t i) { return x[i]; },
      [](T a, T b) { return b > a ? b : a; });
}

// e^x for x <= 0 or NaN. float: results below 2^-125 are 0, which spares the care for subnormal
// ones.
[[gnu::always_inline]] inline float exp_nonpositive(float x) {
  const float y = lane_math::exp_inside(x < -86.5f ? -86.5f : x);
  return x != x ? x : x < -86.5f ? 0.f : y;
}
[[gnu::always_inline]] inline double exp_nonpositive(double x) { return std::exp(x); }

// sum of e^(x - m)
template <class T>
[[gnu::always_inline]] inline T exp_sum(const T* x, T m, int64_t n) {
  return sum_of<T>(n, [=](int64_t i) { return exp_nonpositive(x[i] - m); });
}
// The same, and y = e^(x - m); y may be x.
template <class T>
[[gnu::always_inline]] inline T exp_sum(const T* x, T m, T* y, int64_t n) {
  T lane[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
#pragma GCC ivdep
    for (int l = 0; l < kLanes; ++l) lane[l] += y[i + l] = exp_nonpositive(x[i + l] - m);
#pragma GCC ivdep
  for (int l = 0; l < n - i; ++l) lane[l] += y[i + l] = exp_nonpositive(x[i + l] - m);
  for (int k = kLanes / 2; k; k /= 2)
    for (int l = 0; l < k; ++l) lane[l] += lane[l + k];
  return lane[0];
}

// log(sum of e^x) of a row as max + rest. Their sum would lose the digits of the rest, and with
// them a probability's, where all of the row is large.
template <class T>
struct LogSum {
  T max, rest;
  [[gnu::always_inline]] T log_probability(T x) const { return (x - max) - rest; }
  [[gnu::always_inline]] T loss(T x) const { return (max - x) + rest; }  // its negative, never -0
};
template <class T>
[[gnu::always_inline]] inline LogSum<T> log_sum(const T* x, int64_t n) {
  const T m = max_of(x, n);
  return {m, log(Lane<T>{exp_sum(x, m, n)}).v};
}

}  // namespace sherd::cpu
