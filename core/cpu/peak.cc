#include "core/peak.h"

#include <algorithm>
#include <chrono>

#include "core/cpu/isa.h"

namespace sherd {
namespace {

typedef float Vector __attribute__((vector_size(64)));
constexpr int kChains = 12, kRounds = 20000;

// Independent chains of multiply-adds, enough to hide their latency.
[[gnu::always_inline]] inline float chains() {
  Vector x[kChains];
  for (int i = 0; i < kChains; ++i) x[i] = Vector{} + float(i);
  const Vector a = Vector{} + 0.999f, b = Vector{} + 0.001f;
  for (int r = 0; r < kRounds; ++r)
    for (int i = 0; i < kChains; ++i)
      for (int l = 0; l < 16; ++l) x[i][l] = __builtin_fmaf(x[i][l], a[l], b[l]);
  Vector sum{};
  for (int i = 0; i < kChains; ++i) sum += x[i];
  return sum[0];
}
SHERD_AVX2 float chains_avx2() { return chains(); }
SHERD_AVX512 float chains_avx512() { return chains(); }

double measure() {
  volatile float sink = 0;
  double best = 1e9;
  for (int i = 0; i < 5; ++i) {
    const auto start = std::chrono::steady_clock::now();
    sink = cpu::has_avx512() ? chains_avx512() : chains_avx2();
    best = std::min(
        best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  (void)sink;
  return 2.0 * 16 * kChains * kRounds / best;
}

}  // namespace

double peak_flops() {
  static const double rate = measure();
  return rate;
}

}  // namespace sherd
