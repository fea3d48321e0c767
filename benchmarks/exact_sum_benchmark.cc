// Time of an exact sum of squares, an element: ./bazelw run //benchmarks:exact_sum
#include <benchmark/benchmark.h>

#include <random>

#include "core/exact_sum.h"
#include "core/parallel_for.h"

namespace sherd {
namespace {

// Normal values, or with exponents spread over 2^-60 to 1 (no block ends in the first three grids).
Tensor values(int64_t n, bool spread, DType dtype) {
  Tensor x = empty({n});
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < n; ++i)
    x.data<float>()[i] = normal(random) * (spread ? std::ldexp(1.f, -int(random() % 60)) : 1.f);
  return to_raw(x, dtype);
}

void squares(benchmark::State& state, DType dtype, bool spread) {
  set_num_threads(1);
  const int64_t n = state.range(0);
  const Tensor x = values(n, spread, dtype);
  for (auto _ : state) {
    ExactSum s(2);
    s.add(x);
    benchmark::DoNotOptimize(s.norm());
  }
  state.counters["ns/element"] =
      benchmark::Counter(1e-9 * double(n), benchmark::Counter::kIsIterationInvariantRate |
                                               benchmark::Counter::kInvert);
}
// What it costs at least: a plain sum of squares in double.
void plain(benchmark::State& state) {
  const int64_t n = state.range(0);
  const Tensor x = values(n, false, kFloat32);
  const float* v = x.data<float>();
  for (auto _ : state) {
    double s[16] = {};
    for (int64_t i = 0; i + 16 <= n; i += 16)
      for (int k = 0; k < 16; ++k) s[k] += double(v[i + k]) * v[i + k];
    benchmark::DoNotOptimize(s);
  }
  state.counters["ns/element"] =
      benchmark::Counter(1e-9 * double(n), benchmark::Counter::kIsIterationInvariantRate |
                                               benchmark::Counter::kInvert);
}

constexpr int64_t kInCache = 4096, kInMemory = 1 << 24;
BENCHMARK(plain)->Arg(kInCache)->Arg(kInMemory);
BENCHMARK_CAPTURE(squares, float32, kFloat32, false)->Arg(kInCache)->Arg(kInMemory);
BENCHMARK_CAPTURE(squares, float32_spread, kFloat32, true)->Arg(kInMemory);
BENCHMARK_CAPTURE(squares, bfloat16, kBFloat16, false)->Arg(kInMemory);
BENCHMARK_CAPTURE(squares, float64, kFloat64, false)->Arg(kInMemory);

}  // namespace
}  // namespace sherd

BENCHMARK_MAIN();
