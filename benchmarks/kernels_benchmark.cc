// The structured kernels at the sizes of a training step: 512 tokens, 512 channels, 8 heads, a
// vocabulary of 16384. One thread unless OMP_NUM_THREADS says otherwise.
//
//     ./bazelw run //benchmarks:kernels [-- --benchmark_filter=attention]
//
// `bytes_per_second` counts what the kernel must read and write; `items_per_second` are elements,
// and for attention multiply-adds times two.
#include <benchmark/benchmark.h>

#include <cstdlib>

#include "core/attention.h"
#include "core/column_sum.h"
#include "core/cross_entropy.h"
#include "core/dropout.h"
#include "core/embedding.h"
#include "core/layer_norm.h"
#include "core/optimizer_kernels.h"
#include "core/parallel_for.h"
#include "core/random.h"
#include "core/softmax.h"

namespace {

using namespace sherd;

constexpr int64_t kTokens = 512, kChannels = 512, kHeads = 8, kHead = 64, kTime = 256,
                  kVocabulary = 16384, kParameters = 32 << 20;  // more than caches hold

DType type(const benchmark::State& state) { return state.range(0) == 16 ? kBFloat16 : kFloat32; }
Tensor random(const Dims& sizes, DType dtype, uint64_t key = 1) {
  const Tensor t = empty(sizes, dtype);
  normal_kernel(kCPU, dtype)({key, 0}, 0, 0, 1, t);
  return t;
}
void count(benchmark::State& state, int64_t elements, int64_t bytes) {
  state.SetItemsProcessed(state.iterations() * elements);
  state.SetBytesProcessed(state.iterations() * bytes);
}

void layer_norm(benchmark::State& state) {
  const DType d = type(state);
  const Tensor x = random({kTokens, kChannels}, d), g = random({kTokens, kChannels}, d, 2),
               w = random({kChannels}, d), b = random({kChannels}, d), y = empty(x.sizes(), d),
               mean = empty({kTokens}), rstd = empty({kTokens}), dw = empty({kChannels}, d),
               db = empty({kChannels}, d);
  const bool backward = state.range(1);
  layer_norm_forward(kCPU, d)(x, w, b, 1e-5, y, mean, rstd);
  for (auto _ : state) {
    if (backward)
      layer_norm_backward(kCPU, d)(g, x, w, mean, rstd, y, dw, db);
    else
      layer_norm_forward(kCPU, d)(x, w, b, 1e-5, y, mean, rstd);
  }
  count(state, x.numel(), x.nbytes() * (backward ? 3 : 2));
}
BENCHMARK(layer_norm)->ArgsProduct({{32, 16}, {0, 1}})->ArgNames({"bits", "backward"});

void softmax(benchmark::State& state) {
  const DType d = type(state);
  const Tensor x = random({kTokens, kChannels}, d), g = random({kTokens, kChannels}, d, 2),
               y = empty(x.sizes(), d), dx = empty(x.sizes(), d);
  const bool backward = state.range(1);
  softmax_forward(kCPU, d)(x, y);
  for (auto _ : state) {
    if (backward)
      softmax_backward(kCPU, d)(g, y, dx);
    else
      softmax_forward(kCPU, d)(x, y);
  }
  count(state, x.numel(), x.nbytes() * (backward ? 3 : 2));
}
BENCHMARK(softmax)->ArgsProduct({{32, 16}, {0, 1}})->ArgNames({"bits", "backward"});

void cross_entropy(benchmark::State& state) {
  const DType d = type(state);
  const Tensor logits = random({kTokens, kVocabulary}, d), targets = zeros({kTokens}, kInt64),
               losses = empty({kTokens}), log_sums = empty({kTokens, 2}), sums = empty({2}),
               one = ones({}), dlogits = empty(logits.sizes(), d);
  const bool backward = state.range(1);
  cross_entropy_forward(kCPU, d)(logits, targets, {}, losses, log_sums, sums);
  for (auto _ : state) {
    if (backward)
      cross_entropy_backward(kCPU, d)(one, one, logits, targets, log_sums, {}, dlogits);
    else
      cross_entropy_forward(kCPU, d)(logits, targets, {}, losses, log_sums, sums);
  }
  count(state, logits.numel(), logits.nbytes() * (backward ? 2 : 1));
}
BENCHMARK(cross_entropy)->ArgsProduct({{32, 16}, {0, 1}})->ArgNames({"bits", "backward"});

void attention(benchmark::State& state) {
  const DType d = type(state);
  const int64_t batch = kTokens / kTime, C = kHeads * kHead;
  auto packed = [&](const Tensor& t, int64_t parts, int64_t part) {
    return t.as_strided_raw({batch, kHeads, kTime, kHead}, {kTime * parts * C, kHead, parts * C, 1},
                            part * C);
  };
  const Tensor in = random({kTokens, 3 * C}, d), gradient = empty(in.sizes(), d),
               y = packed(empty({kTokens, C}, d), 1, 0), g = packed(random({kTokens, C}, d), 1, 0),
               lse = empty({batch, kHeads, kTime});
  const Tensor q = packed(in, 3, 0), k = packed(in, 3, 1), v = packed(in, 3, 2);
  const AttentionOptions options{.causal = state.range(2) != 0, .scale = 0.125, .mask = {}};
  const bool backward = state.range(1);
  attention_forward(kCPU, d)(q, k, v, options, y, lse);
  for (auto _ : state) {
    if (backward)
      attention_backward(kCPU, d)(g, q, k, v, y, lse, options, packed(gradient, 3, 0),
                                  packed(gradient, 3, 1), packed(gradient, 3, 2));
    else
      attention_forward(kCPU, d)(q, k, v, options, y, lse);
  }
  const int64_t pairs = batch * kHeads * kTime * (options.causal ? kTime + 1 : 2 * kTime) / 2;
  count(state, pairs * kHead * 2 * (backward ? 5 : 2), in.nbytes() * (backward ? 3 : 1));
}
BENCHMARK(attention)
    ->ArgsProduct({{32, 16}, {0, 1}, {0, 1}})
    ->ArgNames({"bits", "backward", "causal"});

void embedding(benchmark::State& state) {
  const DType d = type(state);
  const Tensor table = random({kVocabulary, kChannels}, d), y = empty({kTokens, kChannels}, d),
               indices = empty({kTokens}, kInt64);
  for (int64_t i = 0; i < kTokens; ++i) indices.data<int64_t>()[i] = i * 7919 % kVocabulary;
  const bool backward = state.range(1);
  for (auto _ : state) {
    if (backward)
      embedding_backward(kCPU, d)(y, indices, -1, false, table);
    else
      embedding_forward(kCPU, d)(table, indices, y);
  }
  count(state, y.numel(), backward ? table.nbytes() : 2 * y.nbytes());
}
BENCHMARK(embedding)->ArgsProduct({{32, 16}, {0, 1}})->ArgNames({"bits", "backward"});

void column_sum(benchmark::State& state) {
  const DType d = type(state);
  const Tensor x = random({state.range(1), state.range(2)}, d), y = empty({state.range(2)}, d);
  for (auto _ : state) column_sum_kernel(kCPU, d)(x, y, false);
  count(state, x.numel(), x.nbytes());
}
BENCHMARK(column_sum)
    ->ArgsProduct({{32, 16}, {512}, {512, 16384}})
    ->Args({32, 100000, 64})
    ->ArgNames({"bits", "rows", "columns"});

void adamw(benchmark::State& state) {
  const Tensor p = random({kParameters}, kFloat32), g = random({kParameters}, type(state)),
               m = zeros({kParameters}), v = zeros({kParameters});
  for (auto _ : state)
    adam_kernel(kCPU, kFloat32)(p, g, m, v, {}, {.weight_decay = 0.01, .gradient = {}});
  count(state, kParameters, kParameters * 24 + g.nbytes());
}
BENCHMARK(adamw)->Arg(32)->Arg(16)->ArgName("bits");

void sgd(benchmark::State& state) {
  const Tensor p = random({kParameters}, kFloat32), g = random({kParameters}, type(state)),
               b = zeros({kParameters});
  for (auto _ : state) sgd_kernel(kCPU, kFloat32)(p, g, b, {.momentum = 0.9, .gradient = {}});
  count(state, kParameters, kParameters * 16 + g.nbytes());
}
BENCHMARK(sgd)->Arg(32)->ArgName("bits");

void dropout(benchmark::State& state) {
  const Tensor x = random({kTokens, kChannels}, type(state)), y = empty(x.sizes(), x.dtype());
  for (auto _ : state) dropout_kernel(kCPU, x.dtype())(x, 0.1, {1, 2}, y);
  count(state, x.numel(), 2 * x.nbytes());
}
BENCHMARK(dropout)->Arg(32)->Arg(16)->ArgName("bits");

void normal(benchmark::State& state) {
  const Tensor x = empty({kTokens, kChannels}, type(state));
  for (auto _ : state) normal_kernel(kCPU, x.dtype())({1, 2}, 0, 0, 1, x);
  count(state, x.numel(), x.nbytes());
}
BENCHMARK(normal)->Arg(32)->Arg(16)->ArgName("bits");

void uniform(benchmark::State& state) {
  const Tensor x = empty({kTokens, kChannels}, type(state));
  for (auto _ : state) uniform_kernel(kCPU, x.dtype())({1, 2}, 0, 0, 1, x);
  count(state, x.numel(), x.nbytes());
}
BENCHMARK(uniform)->Arg(32)->Arg(16)->ArgName("bits");

void trunc_normal(benchmark::State& state) {
  const Tensor x = empty({kTokens, kChannels}, type(state));
  for (auto _ : state) trunc_normal_kernel(kCPU, x.dtype())({1, 2}, 0, 0, 1, -2, 2, x);
  count(state, x.numel(), x.nbytes());
}
BENCHMARK(trunc_normal)->Arg(32)->ArgName("bits");

}  // namespace

int main(int argc, char** argv) {
  if (!std::getenv("OMP_NUM_THREADS")) set_num_threads(1);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
}
