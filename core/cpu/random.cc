#include "core/random.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "core/cpu/convert.h"
#include "core/cpu/isa.h"
#include "core/cpu/philox_lanes.h"
#include "core/lane.h"
#include "core/parallel_for.h"

namespace sherd::cpu {
namespace {

// Distributions: make(words, out) turns the 64 words of a group into as many floats, or half as
// many doubles.

[[gnu::always_inline]] inline float unit(uint32_t word) {
  return float(int32_t(word >> 8)) * 0x1p-24f;
}

struct Uniform {
  double low, high;
  [[gnu::always_inline]] void make(const uint32_t* __restrict words, float* __restrict out) const {
    const float lo = float(low), range = float(high - low), hi = float(high),
                below = std::nextafter(hi, lo);  // the product may round up to high
    for (int i = 0; i < kGroup; ++i) {
      const float v = lo + range * unit(words[i]);
      out[i] = v < hi ? v : below;
    }
  }
  void make(const uint32_t* words, double* out) const {
    const double below = std::nextafter(high, low);
    for (int i = 0; i < kGroup / 2; ++i) {
      const int w = i / kCounters * 2 * kCounters + i % kCounters;
      const double v = low + (high - low) * uniform_double(words[w], words[w + kCounters]);
      out[i] = v < high ? v : below;
    }
  }
};

// sine and cosine of a turn's fraction u in [0, 1)
[[gnu::always_inline]] inline void sin_cos_of_turn(float u, float& sine, float& cosine) {
  const int32_t quarter = int32_t(u * 4.f + 0.5f);
  const float x = (u - float(quarter) * 0.25f) * 6.28318531f, s = x * x;  // |x| <= pi / 4
  const float sin_x = lane_math::fma(
      x * s, lane_math::poly(s, -1.6666654611e-1f, 8.3321608736e-3f, -1.9515295891e-4f), x);
  const float cos_x = lane_math::fma(
      s * s,
      lane_math::poly(s, 4.166664568298827e-2f, -1.388731625493765e-3f, 2.443315711809948e-5f),
      lane_math::fma(s, -0.5f, 1.f));
  const float a = quarter & 1 ? cos_x : sin_x, b = quarter & 1 ? sin_x : cos_x;
  sine = quarter & 2 ? -a : a;
  cosine = (quarter + 1) & 2 ? -b : b;
}

struct Normal {
  double mean, std;
  [[gnu::always_inline]] void make(const uint32_t* __restrict words, float* __restrict out) const {
    const float m = float(mean), s = float(std);
    for (int half = 0; half < kGroup; half += kGroup / 2)
      for (int l = 0; l < kCounters; ++l) {
        const int i = half + l, j = i + kCounters;
        const float radius = s * std::sqrt(-2.f * lane_math::log(1.f - unit(words[i])));
        float sine, cosine;
        sin_cos_of_turn(unit(words[j]), sine, cosine);
        out[i] = m + radius * cosine, out[j] = m + radius * sine;
      }
  }
  void make(const uint32_t* words, double* out) const {
    for (int l = 0; l < kCounters; ++l) {
      auto number = [&](int w) { return uniform_double(words[w + l], words[w + kCounters + l]); };
      const double radius = std * std::sqrt(-2 * std::log1p(-number(0))),
                   angle = 2 * M_PI * number(2 * kCounters);
      out[l] = mean + radius * std::cos(angle),
      out[l + kCounters] = mean + radius * std::sin(angle);
    }
  }
};

// Giles: Approximating the erfinv function. GPU Computing Gems 2 (2011), its single precision form.
[[gnu::always_inline]] inline float erf_inverse(float x) {
  const float w = -lane_math::log((1.f - x) * (1.f + x)), a = w - 2.5f, b = std::sqrt(w) - 3.f;
  const float near = lane_math::poly(a, 1.50140941f, 0.246640727f, -0.00417768164f, -0.00125372503f,
                                     0.00021858087f, -4.39150654e-06f, -3.5233877e-06f,
                                     3.43273939e-07f, 2.81022636e-08f);
  const float far =
      lane_math::poly(b, 2.83297682f, 1.00167406f, 0.00943887047f, -0.0076224613f, 0.00573950773f,
                      -0.00367342844f, 0.00134934322f, 0.000100950558f, -0.000200214257f);
  return (w < 5.f ? near : far) * x;
}
inline double erf_inverse(double y) {
  double x = erf_inverse(float(std::clamp(y, -1 + 0x1p-24, 1 - 0x1p-24)));
  for (int i = 0; i < 3; ++i)  // Newton; erfc keeps its digits in the tails
    x += (y > 0 ? std::erfc(x) - (1 - y) : (1 + y) - std::erfc(-x)) * std::exp(x * x) *
         0.8862269254527580;
  return x;
}

struct TruncNormal {
  double mean, scale, low, high;  // scale: sqrt(2) std
  double from = std::erf((low - mean) / scale), range = std::erf((high - mean) / scale) - from;
  template <class T>
  [[gnu::always_inline]] T value(T u) const {
    T y = T(from) + T(range) * u;
    constexpr T kInside = T(1) - std::numeric_limits<T>::epsilon();
    y = y < -kInside ? -kInside : y > kInside ? kInside : y;
    const T v = T(mean) + T(scale) * erf_inverse(y);
    return v < T(low) ? T(low) : v > T(high) ? T(high) : v;
  }
  [[gnu::always_inline]] void make(const uint32_t* __restrict words, float* __restrict out) const {
    for (int i = 0; i < kGroup; ++i) out[i] = value(unit(words[i]));
  }
  void make(const uint32_t* words, double* out) const {
    for (int i = 0; i < kGroup / 2; ++i) {
      const int w = i / kCounters * 2 * kCounters + i % kCounters;
      out[i] = value(uniform_double(words[w], words[w + kCounters]));
    }
  }
};

// Numbers [first, first + kRun) into `out`; a double takes two words, so its groups are half as
// long.
template <class D, class T>
[[gnu::always_inline]] inline void run_body(const D& d, const Generator::Draw& draw, int64_t first,
                                            T* __restrict out) {
  constexpr int64_t kNumbers = std::is_same_v<T, double> ? kGroup / 2 : kGroup;
  uint32_t words[kGroup];
  for (int64_t i = 0; i < kRun; i += kNumbers) {
    philox_group(draw, (first + i) / kNumbers, words);
    d.make(words, out + i);
  }
}
template <class D, class T>
SHERD_AVX2 void run_avx2(const D& d, const Generator::Draw& draw, int64_t first, T* out) {
  run_body(d, draw, first, out);
}
template <class D, class T>
SHERD_AVX512 void run_avx512(const D& d, const Generator::Draw& draw, int64_t first, T* out) {
  run_body(d, draw, first, out);
}

template <class D>
void fill(const D& d, const Generator::Draw& draw, int64_t begin, const Tensor& y) {
  const int64_t n = y.numel(), size = size_of(y.dtype());
  char* to = y.bytes();
  auto go = [&]<class T>(Type<T>) {
    const Convert store = convert(y.dtype(), dtype_of<T>);
    auto run = has_avx512() ? run_avx512<D, T> : run_avx2<D, T>;
    parallel_for(n, 32768, [&](int64_t from, int64_t until) {
      for_runs_of_groups(begin + from, begin + until, [&](int64_t first, int64_t a, int64_t b) {
        T block[kRun];
        run(d, draw, first, block);
        store(to + (a - begin) * size, size, reinterpret_cast<const char*>(block + (a - first)),
              sizeof(T), b - a);
      });
    });
  };
  y.dtype() == kFloat64 ? go(Type<double>{}) : go(Type<float>{});
}

void uniform(const Stream&, Generator::Draw draw, int64_t begin, double low, double high,
             const Tensor& y) {
  fill(Uniform{low, high}, draw, begin, y);
}
void normal(const Stream&, Generator::Draw draw, int64_t begin, double mean, double std,
            const Tensor& y) {
  fill(Normal{mean, std}, draw, begin, y);
}
void trunc_normal(const Stream&, Generator::Draw draw, int64_t begin, double mean, double std,
                  double low, double high, const Tensor& y) {
  fill(TruncNormal{mean, std * std::sqrt(2.0), low, high}, draw, begin, y);
}

const Register u{uniform_kernel, DeviceType::kCPU, uniform},
    n{normal_kernel, DeviceType::kCPU, normal},
    t{trunc_normal_kernel, DeviceType::kCPU, trunc_normal};

}  // namespace
}  // namespace sherd::cpu
