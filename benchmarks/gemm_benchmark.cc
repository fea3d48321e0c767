// Rates of matrix products, as shares of the machine's FMA peak on one thread:
//
//     ./bazelw run //benchmarks:gemm [-- tokens]
//
// The shapes are those of a Transformer's linear layers for a batch of 512 tokens (or as many as
// given): forward x w^T, the input's gradient g w, the weight's gradient g^T x.
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "core/gemm.h"
#include "core/parallel_for.h"
#include "core/peak.h"

namespace {

using namespace sherd;

template <class F>
double best_seconds(F f) {
  f();
  double best = 1e9;
  const double start = thread_seconds();
  for (int i = 0; i < 200 && (i < 5 || thread_seconds() - start < 0.3); ++i) {
    const double t = thread_seconds();
    f();
    best = std::min(best, thread_seconds() - t);
  }
  return best;
}
Tensor transposed(const Tensor& t) {
  return t.as_strided_raw({t.size(1), t.size(0)}, {1, t.size(1)}, 0);
}

void measure(int64_t tokens, int64_t in, int64_t out, DType dtype) {
  const Tensor x = full({tokens, in}, 0.5, dtype), w = full({out, in}, 0.25, dtype),
               b = full({out}, 0.25, dtype), g = full({tokens, out}, 0.5, dtype),
               y = empty({tokens, out}, dtype), dx = empty({tokens, in}, dtype),
               dw = empty({out, in}, dtype), wide = zeros({out, in}, kFloat32);
  const double flops = 2e-9 * double(tokens) * double(in) * double(out), peak = fma_peak();
  std::printf("%-8s %5ld -> %-5ld", name_of(dtype), long(in), long(out));
  auto show = [&](const char* name, auto f) {
    const double t = best_seconds(f);
    std::printf("  %s %5.1f GFLOP/s %3.0f%%", name, flops / t, 100 * flops / t / peak);
  };
  show("x w^T", [&] { gemm(x, transposed(w), y); });
  show("+bias+relu",
       [&] { gemm(x, transposed(w), y, {.bias = b, .activation = Activation::kRelu}); });
  show("g w", [&] { gemm(g, w, dx); });
  show("g^T x", [&] { gemm(transposed(g), x, dw); });
  show("into float32", [&] { gemm(transposed(g), x, wide, {.accumulate = true}); });
  std::printf("\n");
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t tokens = argc > 1 ? std::atoll(argv[1]) : 512;
  if (tokens < 1) {
    std::fprintf(stderr, "usage: gemm_benchmark [tokens]\n");
    return 2;
  }
  set_num_threads(1);
  std::printf("FMA peak %.0f GFLOP/s, memory %.1f GB/s (one thread)\n", fma_peak(),
              read_bandwidth());
  const int64_t shapes[][2] = {{512, 512}, {512, 1536}, {512, 2048}, {2048, 512}, {512, 16384}};
  auto all = [&](const char* what, DType dtype) {
    std::printf("%s\n", what);
    for (auto [in, out] : shapes) measure(tokens, in, out, dtype);
  };
  all("oneDNN", kFloat32);
  std::printf("%s\n", describe_bf16_products().c_str());
  for (auto choice : {Bf16Products::kNative, Bf16Products::kConverted}) {
    try {
      set_bf16_products(choice);
    } catch (const Error& e) {
      std::printf("%s\n", e.what());
      continue;
    }
    all(name_of(choice), kBFloat16);
  }
  set_gemm_backend(GemmBackend::kEigen);
  all("Eigen", kFloat32);
}
