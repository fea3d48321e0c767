// Lane<T>: one element inside a kernel. An operator's formula is written once, over `auto`, and is
// compiled with
//   Lane<float>, Lane<double>, ..   the loop around it becomes AVX2 and AVX-512
//   Tensor                          by autograd, when a graph of the gradient is wanted
// So a formula may use: + - * /, comparisons, & | !, numbers of any type, where, and the functions
// below. Why a struct and not plain float: `0.5 * x` stays in float, and `exp(x)` is found by
// argument-dependent lookup for lanes and tensors.
#pragma once
#include <bit>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace sherd {

template <class T>
struct Lane {
  alignas(sizeof(T))
      T v;  // a vector of 64 bytes would be aligned to 32 in AVX2 code and to 64 in AVX-512 code
  constexpr Lane operator-() const { return {T(-v)}; }
};
template <class T>
constexpr Lane<T> lane(T v) {
  return {v};
}

template <class T>
concept Number = std::is_arithmetic_v<T>;
template <class T>
concept VectorRegister = requires(T v) {
  v[0];
};  // T may also be one of GCC's vector types: reductions use them
template <class T, class N>
constexpr Lane<T> spread(N n) {
  if constexpr (VectorRegister<T>)
    return {T{} + std::decay_t<decltype(T{}[0])>(n)};
  else
    return {T(n)};
}

// [Note: integer lanes] +, -, * wrap around as PyTorch's do, so they are computed unsigned.
template <class T, class F>
constexpr T wrapping(T a, T b, F f) {
  if constexpr (std::integral<T> && !std::same_as<T, bool>) {
    using U = std::common_type_t<std::make_unsigned_t<T>, unsigned>;
    return T(f(U(a), U(b)));
  } else {
    return T(f(a, b));
  }
}
template <class T>
constexpr Lane<T> operator+(Lane<T> a, Lane<T> b) {
  return {wrapping(a.v, b.v, [](auto x, auto y) { return x + y; })};
}
template <class T>
constexpr Lane<T> operator-(Lane<T> a, Lane<T> b) {
  return {wrapping(a.v, b.v, [](auto x, auto y) { return x - y; })};
}
template <class T>
constexpr Lane<T> operator*(Lane<T> a, Lane<T> b) {
  return {wrapping(a.v, b.v, [](auto x, auto y) { return x * y; })};
}
template <class T>
constexpr Lane<T> operator/(Lane<T> a, Lane<T> b) {
  return {a.v / b.v};
}
template <class T>
constexpr auto operator<(Lane<T> a, Lane<T> b) {
  return lane(a.v < b.v);
}
template <class T>
constexpr auto operator>(Lane<T> a, Lane<T> b) {
  return lane(a.v > b.v);
}
template <class T>
constexpr auto operator<=(Lane<T> a, Lane<T> b) {
  return lane(a.v <= b.v);
}
template <class T>
constexpr auto operator>=(Lane<T> a, Lane<T> b) {
  return lane(a.v >= b.v);
}
template <class T>
constexpr auto operator==(Lane<T> a, Lane<T> b) {
  return lane(a.v == b.v);
}
template <class T>
constexpr auto operator!=(Lane<T> a, Lane<T> b) {
  return lane(a.v != b.v);
}
template <class M>
constexpr Lane<M> operator&(Lane<M> a, Lane<M> b) {
  return {M(a.v & b.v)};
}
template <class M>
constexpr Lane<M> operator|(Lane<M> a, Lane<M> b) {
  return {M(a.v | b.v)};
}

template <class T, Number N>
constexpr Lane<T> operator+(Lane<T> a, N b) {
  return a + spread<T>(b);
}
template <class T, Number N>
constexpr Lane<T> operator-(Lane<T> a, N b) {
  return a - spread<T>(b);
}
template <class T, Number N>
constexpr Lane<T> operator*(Lane<T> a, N b) {
  return a * spread<T>(b);
}
template <class T, Number N>
constexpr Lane<T> operator/(Lane<T> a, N b) {
  return a / spread<T>(b);
}
template <class T, Number N>
constexpr Lane<T> operator+(N a, Lane<T> b) {
  return spread<T>(a) + b;
}
template <class T, Number N>
constexpr Lane<T> operator-(N a, Lane<T> b) {
  return spread<T>(a) - b;
}
template <class T, Number N>
constexpr Lane<T> operator*(N a, Lane<T> b) {
  return spread<T>(a) * b;
}
template <class T, Number N>
constexpr Lane<T> operator/(N a, Lane<T> b) {
  return spread<T>(a) / b;
}
template <class T, Number N>
constexpr auto operator<(Lane<T> a, N b) {
  return a < spread<T>(b);
}
template <class T, Number N>
constexpr auto operator>(Lane<T> a, N b) {
  return a > spread<T>(b);
}
template <class T, Number N>
constexpr auto operator<=(Lane<T> a, N b) {
  return a <= spread<T>(b);
}
template <class T, Number N>
constexpr auto operator>=(Lane<T> a, N b) {
  return a >= spread<T>(b);
}
template <class T, Number N>
constexpr auto operator==(Lane<T> a, N b) {
  return a == spread<T>(b);
}
template <class T, Number N>
constexpr auto operator!=(Lane<T> a, N b) {
  return a != spread<T>(b);
}

template <class M, class T>
constexpr Lane<T> where(Lane<M> c, Lane<T> a, Lane<T> b) {
  return {c.v ? a.v : b.v};
}
template <class M, class T, Number N>
constexpr Lane<T> where(Lane<M> c, Lane<T> a, N b) {
  return where(c, a, spread<T>(b));
}
template <class M, class T, Number N>
constexpr Lane<T> where(Lane<M> c, N a, Lane<T> b) {
  return where(c, spread<T>(a), b);
}

// The mathematical functions. float: branch-free polynomials of our own, so that the loop
// vectorises, every element has the same bits wherever it lies in the array, and AVX2 and AVX-512
// agree bit by bit. double: libm, for it serves gradient checks. On CUDA: the device's own
// functions. (coefficients: tools/fit.py)
namespace lane_math {

constexpr float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
template <class... C>
constexpr float poly(float x, float c0, C... c) {  // c0 + c1 x + c2 x^2 ...
  if constexpr (sizeof...(C) == 0)
    return c0;
  else
    return fma(x, poly(x, c...), c0);
}
constexpr float power_of_two(int32_t n) { return std::bit_cast<float>((n + 127) << 23); }

struct Split {
  float p;
  int32_t k;
};  // e^x = p 2^k
constexpr Split split_exp(float x) {
  float shifted = fma(x, 1.44269504f, 12582912.f), n = shifted - 12582912.f;
  float r = fma(n, 1.90465430e-9f, fma(n, -0.693147182f, x));
  float p = fma(r * r,
                poly(r, 4.999999335e-01f, 1.666651913e-01f, 4.166840577e-02f, 8.368898874e-03f,
                     1.381421977e-03f),
                r) +
            1.f;
  return {p, std::bit_cast<int32_t>(shifted) - 0x4b400000};
}
constexpr float exp(float x) {
  x = x < -104.f ? -104.f : x;
  x = x > 89.f ? 89.f : x;  // a NaN passes both
  auto [p, k] = split_exp(x);
  int32_t half = k >> 1;  // 2^k in two steps: it may overflow, or give a subnormal number
  return p * power_of_two(half) * power_of_two(k - half);
}
constexpr float exp_inside(float x) {  // for |x| <= 87, no NaN
  auto [p, k] = split_exp(x);
  return std::bit_cast<float>(std::bit_cast<int32_t>(p) + (k << 23));
}
constexpr float tanh(float x) {
  float a = __builtin_fabsf(x), s = x * x;
  float small = fma(a * s,
                    poly(s, -3.333328392e-01f, 1.333149125e-01f, -5.374349526e-02f,
                         2.065057899e-02f, -5.717036548e-03f),
                    a);
  float t = a > 10.f ? 10.f : a, large = 1.f - 2.f / (exp_inside(t + t) + 1.f);
  return __builtin_copysignf(a >= 0.625f ? large : small, x);  // a NaN takes `small`
}
constexpr float erf(float x) {
  float a = __builtin_fabsf(x), s = x * x, t = a > 4.f ? 4.f : a;
  float small = fma(a,
                    fma(s,
                        poly(s, -3.761262714e-01f, 1.128360018e-01f, -2.685444458e-02f,
                             5.189535325e-03f, -8.020841169e-04f, 7.889119190e-05f),
                        0.128379167f),
                    a);
  float large = 1.f - exp_inside(poly(t, -3.415125756e-04f, -1.127089234e+00f, -6.381447581e-01f,
                                      -1.031068215e-01f, 2.183809702e-02f, -2.947666809e-03f,
                                      1.863800856e-04f));
  return __builtin_copysignf(a >= 1.f ? large : small, x);
}
constexpr float log(float x) {
  bool tiny = x < 1.17549435e-38f;
  float y = tiny ? x * 8388608.f : x;
  // y = 2^k m, m in [sqrt(1/2), sqrt(2)); the bits of a negative y wrap around.
  int32_t bits = int32_t(std::bit_cast<uint32_t>(y) - 0x3f3504f3u), k = bits >> 23;
  float r = std::bit_cast<float>((bits & 0x7fffff) + 0x3f3504f3) - 1.f,
        n = float(k) - (tiny ? 23.f : 0.f);
  float q = poly(r, 3.333333171e-01f, -2.500082117e-01f, 2.000122714e-01f, -1.662335259e-01f,
                 1.420174798e-01f, -1.316022037e-01f, 1.276167260e-01f, -7.634518288e-02f);
  float m = fma(n, -2.12194440e-4f, fma(r * r, fma(r, q, -0.5f), r));
  m = fma(n, 0.693359375f, m);
  m = x == 0.f ? -std::numeric_limits<float>::infinity() : m;
  m = x < 0.f ? std::numeric_limits<float>::quiet_NaN() : m;
  return x == std::numeric_limits<float>::infinity() || x != x ? x : m;
}

}  // namespace lane_math

// libm's name for double and for the device, our own for float on the host.
#if defined(__CUDA_ARCH__)
constexpr Lane<float> exp(Lane<float> x) { return {::expf(x.v)}; }
constexpr Lane<float> tanh(Lane<float> x) { return {::tanhf(x.v)}; }
constexpr Lane<float> erf(Lane<float> x) { return {::erff(x.v)}; }
constexpr Lane<float> log(Lane<float> x) { return {::logf(x.v)}; }
#else
constexpr Lane<float> exp(Lane<float> x) { return {lane_math::exp(x.v)}; }
constexpr Lane<float> tanh(Lane<float> x) { return {lane_math::tanh(x.v)}; }
constexpr Lane<float> erf(Lane<float> x) { return {lane_math::erf(x.v)}; }
constexpr Lane<float> log(Lane<float> x) { return {lane_math::log(x.v)}; }
#endif
template <class T>
constexpr Lane<T> exp(Lane<T> x) {
  return {std::exp(x.v)};
}
template <class T>
constexpr Lane<T> tanh(Lane<T> x) {
  return {std::tanh(x.v)};
}
template <class T>
constexpr Lane<T> erf(Lane<T> x) {
  return {std::erf(x.v)};
}
template <class T>
constexpr Lane<T> log(Lane<T> x) {
  return {std::log(x.v)};
}
template <class T>
constexpr Lane<T> sqrt(Lane<T> x) {
  return {std::sqrt(x.v)};
}
template <class T>
constexpr Lane<T> pow(Lane<T> x, Lane<T> y) {
  if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
    // In the integers, modulo their range; 1 / x is 0 unless x is 1 or -1.
    if (y.v < 0) return {T(x.v == 1 ? 1 : x.v == T(-1) ? (y.v % 2 ? -1 : 1) : 0)};
    uint64_t result = 1, base = uint64_t(x.v);
    for (uint64_t n = uint64_t(y.v); n; n >>= 1, base *= base)
      if (n & 1) result *= base;
    return {T(result)};
  } else {
    return {T(std::pow(x.v, y.v))};
  }
}
template <class T>
constexpr Lane<T> abs(Lane<T> x) {
  return {x.v < 0 ? T(-x.v) : x.v};
}
template <class T>
constexpr Lane<T> sigmoid(Lane<T> x) {
  return 1 / (1 + exp(-x));
}

}  // namespace sherd
