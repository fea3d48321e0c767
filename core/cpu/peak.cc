#include "core/peak.h"

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <ctime>
#include <vector>

#include "core/cpu/isa.h"

namespace sherd {

double thread_seconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

namespace {

template <class F>
double best_seconds(F f) {
  double best = 1e9;
  for (int i = 0; i < 10; ++i) {
    const double start = thread_seconds();
    f();
    best = std::min(best, thread_seconds() - start);
  }
  return best;
}

constexpr int kChains = 12;  // enough to hide the latency of two units

SHERD_AVX2 float fma_loop_avx2(int64_t n) {
  __m256 a[kChains], b = _mm256_set1_ps(0.999f);
  for (auto& x : a) x = _mm256_set1_ps(1);
  for (int64_t i = 0; i < n; ++i)
#pragma GCC unroll 12
    for (int k = 0; k < kChains; ++k) a[k] = _mm256_fmadd_ps(a[k], b, b);
  float sum = 0;
  for (auto& x : a) sum += _mm256_cvtss_f32(x);
  return sum;
}
SHERD_AVX512 float fma_loop_avx512(int64_t n) {
  __m512 a[kChains], b = _mm512_set1_ps(0.999f);
  for (auto& x : a) x = _mm512_set1_ps(1);
  for (int64_t i = 0; i < n; ++i)
#pragma GCC unroll 12
    for (int k = 0; k < kChains; ++k) a[k] = _mm512_fmadd_ps(a[k], b, b);
  float sum = 0;
  for (auto& x : a) sum += _mm512_cvtss_f32(x);
  return sum;
}

// From four places at once, as kernels read: one alone is bound by the latency of memory.
[[gnu::always_inline]] inline uint64_t sum(const uint64_t* p, int64_t n) {
  uint64_t s = 0;
  const int64_t q = n / 4;
  for (int64_t i = 0; i < q; ++i) s += p[i] + p[q + i] + p[2 * q + i] + p[3 * q + i];
  return s;
}
SHERD_AVX2 uint64_t sum_avx2(const uint64_t* p, int64_t n) { return sum(p, n); }
SHERD_AVX512 uint64_t sum_avx512(const uint64_t* p, int64_t n) { return sum(p, n); }

volatile double sink;

}  // namespace

double fma_peak() {
  const bool wide = cpu::has_avx512();
  constexpr int64_t n = 200'000;
  const double t = best_seconds([&] { sink = wide ? fma_loop_avx512(n) : fma_loop_avx2(n); });
  return 2e-9 * double(n) * kChains * (wide ? 16 : 8) / t;
}
double read_bandwidth() {
  const std::vector<uint64_t> memory(size_t(64) << 20, 1);
  const auto sum = cpu::has_avx512() ? sum_avx512 : sum_avx2;
  return 1e-9 * double(memory.size() * 8) /
         best_seconds([&] { sink = double(sum(memory.data(), int64_t(memory.size()))); });
}

}  // namespace sherd
