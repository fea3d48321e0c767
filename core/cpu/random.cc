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

// Distributions: make(words, out) turns the words of a group into kGroup floats, or half as many
// doubles.

[[gnu::always_inline]] inline float unit(uint32_t word) {
  return float(int32_t(word >> 8)) * 0x1p-24f;
}
// The i-th of a group's doubles: words 0 and 1 make the first half, words 2 and 3 the second.
inline double unit(const RandomWords& words, int64_t i) {
  const int64_t w = i / kCounters * 2, c = i % kCounters;
  return uniform_double(words.word[w][c], words.word[w + 1][c]);
}

struct Uniform {
  double low, high;
  [[gnu::always_inline]] void make(const RandomWords& words, float* __restrict out) const {
    const float lo = float(low), range = float(high - low), hi = float(high),
                below = std::nextafter(hi, lo);  // the product may round up to high
    const uint32_t* word = words.word[0];
    for (int64_t i = 0; i < kGroup; ++i) {
      const float v = lo + range * unit(word[i]);
      out[i] = v < hi ? v : below;
    }
  }
  void make(const RandomWords& words, double* out) const {
    const double below = std::nextafter(high, low);
    for (int64_t i = 0; i < kGroup / 2; ++i) {
      const double v = low + (high - low) * unit(words, i);
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
  [[gnu::always_inline]] void make(const RandomWords& words, float* __restrict out) const {
    const float m = float(mean), s = float(std);
    for (int w = 0; w < 4; w += 2) {
      float *first = out + w * kCounters, *second = first + kCounters;
#pragma GCC ivdep
      for (int64_t c = 0; c < kCounters; ++c) {
        const float radius = s * std::sqrt(-2.f * lane_math::log(1.f - unit(words.word[w][c])));
        float sine, cosine;
        sin_cos_of_turn(unit(words.word[w + 1][c]), sine, cosine);
        first[c] = m + radius * cosine, second[c] = m + radius * sine;
      }
    }
  }
  void make(const RandomWords& words, double* out) const {
    for (int64_t c = 0; c < kCounters; ++c) {
      const double radius = std * std::sqrt(-2 * std::log1p(-unit(words, c))),
                   angle = 2 * M_PI * unit(words, kCounters + c);
      out[c] = mean + radius * std::cos(angle);
      out[kCounters + c] = mean + radius * std::sin(angle);
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
  [[gnu::always_inline]] void make(const RandomWords& words, float* __restrict out) const {
    const float m = float(mean), s = float(scale), lo = float(low), hi = float(high),
                first = float(from), width = float(range);
    const uint32_t* word = words.word[0];
    for (int64_t i = 0; i < kGroup; ++i) {
      // 1 - 2^-23 keeps the ends apart from the poles of the inverse.
      float v = m + s * erf_inverse((first + width * unit(word[i])) * (1.f - 0x1p-23f));
      v = v < lo ? lo : v;
      out[i] = v > hi ? hi : v;
    }
  }
  void make(const RandomWords& words, double* out) const {
    for (int64_t i = 0; i < kGroup / 2; ++i) {
      constexpr double kInside = 1 - 0x1p-52;
      const double y = std::clamp(from + range * unit(words, i), -kInside, kInside);
      out[i] = std::clamp(mean + scale * erf_inverse(y), low, high);
    }
  }
};

template <class D, class T>
SHERD_AVX2 void make_avx2(const D& d, const Generator::Draw& draw, int64_t group, T* out) {
  RandomWords words;
  make_words(draw, group, words);
  d.make(words, out);
}
template <class D, class T>
SHERD_AVX512 void make_avx512(const D& d, const Generator::Draw& draw, int64_t group, T* out) {
  RandomWords words;
  make_words(draw, group, words);
  d.make(words, out);
}

template <class D>
void fill(const D& d, const Generator::Draw& draw, int64_t begin, const Tensor& y) {
  const int64_t n = y.numel(), size = size_of(y.dtype());
  char* to = y.bytes();
  auto go = [&]<class T>(Type<T>) {
    constexpr int64_t kNumbers = std::is_same_v<T, double> ? kGroup / 2 : kGroup;
    const Convert store = convert(y.dtype(), dtype_of<T>);
    auto make = has_avx512() ? make_avx512<D, T> : make_avx2<D, T>;
    parallel_for(n, 32768, [&](int64_t from, int64_t until) {
      for_groups(begin + from, begin + until, kNumbers,
                 [&](int64_t group, int64_t first, int64_t a, int64_t b) {
                   T block[kNumbers];
                   make(d, draw, group, block);
                   store(to + (a - begin) * size, size,
                         reinterpret_cast<const char*>(block + (a - first)), sizeof(T), b - a);
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
