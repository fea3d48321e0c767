#include "core/cpu/convert.h"

#include <immintrin.h>

#include <bit>

#include "core/cpu/isa.h"

namespace sherd::cpu {

static float widen(BFloat16 x) { return std::bit_cast<float>(uint32_t(x.bits) << 16); }
static float widen(Float16 x) { return _cvtsh_ss(x.bits); }
template <class T>
static T widen(T x) {
  return x;
}

template <class T, class F>
static T narrow(F x) {
  if constexpr (std::is_same_v<T, BFloat16>) {  // to nearest even, NaN stays NaN
    uint32_t b = std::bit_cast<uint32_t>(float(x)), r = (b + 0x7fff + (b >> 16 & 1)) >> 16;
    return {uint16_t((b & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : r)};
  } else if constexpr (std::is_same_v<T, Float16>) {
    return {uint16_t(_cvtss_sh(float(x), _MM_FROUND_TO_NEAREST_INT))};
  } else if constexpr (std::is_same_v<T, bool>) {
    return x != 0;
  } else if constexpr (std::is_same_v<T, uint8_t> && std::is_floating_point_v<F>) {
    return uint8_t(int32_t(x));
  } else {
    return T(x);
  }
}
template <class To, class From>
[[gnu::always_inline]] static inline void body(char* __restrict to, int64_t ts,
                                               const char* __restrict from, int64_t fs, int64_t n) {
  auto* t = reinterpret_cast<To*>(to);
  auto* f = reinterpret_cast<const From*>(from);
  if (ts == sizeof(To) && fs == 0) {
    To v = narrow<To>(widen(*f));
    for (int64_t i = 0; i < n; ++i) t[i] = v;
  } else if (ts == sizeof(To) && fs == sizeof(From)) {
    int64_t i = 0;
    if constexpr (std::is_same_v<To, float> && std::is_same_v<From, Float16>)
      for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(t + i,
                         _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(f + i))));
    if constexpr (std::is_same_v<To, Float16> && std::is_same_v<From, float>)
      for (; i + 8 <= n; i += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(t + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(f + i), 0));
    for (; i < n; ++i) t[i] = narrow<To>(widen(f[i]));
  } else {
    for (int64_t i = 0; i < n; ++i)
      *reinterpret_cast<To*>(to + i * ts) =
          narrow<To>(widen(*reinterpret_cast<const From*>(from + i * fs)));
  }
}
template <class To, class From>
SHERD_AVX2 static void copy_avx2(char* t, int64_t ts, const char* f, int64_t fs, int64_t n) {
  body<To, From>(t, ts, f, fs, n);
}
template <class To, class From>
SHERD_AVX512 static void copy_avx512(char* t, int64_t ts, const char* f, int64_t fs, int64_t n) {
  body<To, From>(t, ts, f, fs, n);
}
Convert convert(DType to, DType from) {
  const bool wide = has_avx512();
  return visit(to, [&]<class To>(Type<To>) {
    return visit(from, [&]<class From>(Type<From>) -> Convert {
      return wide ? copy_avx512<To, From> : copy_avx2<To, From>;
    });
  });
}

}  // namespace sherd::cpu
