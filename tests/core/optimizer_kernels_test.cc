#include "core/optimizer_kernels.h"

#include "tests/core/support.h"

namespace sherd {
namespace {

using namespace test;

// PyTorch's formulas in float64, an element at a time.
struct AdamState {
  double p, m, v, most;
};
AdamState adam(AdamState x, double g, const AdamStep& s, bool amsgrad, double scale) {
  g *= scale * s.gradient.factor * (s.gradient.maximize ? -1 : 1);
  if (s.decoupled)
    x.p *= 1 - s.lr * s.weight_decay;
  else
    g += s.weight_decay * x.p;
  x.m += (1 - s.beta1) * (g - x.m);
  x.v = s.beta2 * x.v + (1 - s.beta2) * g * g;
  x.most = std::max(x.most, x.v);
  x.p -= s.lr / s.bias_correction1 * x.m /
         (std::sqrt(amsgrad ? x.most : x.v) / std::sqrt(s.bias_correction2) + s.eps);
  return x;
}

TEST(Adam, IsPyTorchsFormula) {
  const int64_t n = 101;
  for (DType d : {kFloat32, kFloat64})
    for (DType grad_type : {d, kBFloat16})
      for (bool decoupled : {true, false})
        for (bool amsgrad : {false, true})
          for (bool scaled : {false, true}) {
            const Tensor p = random_tensor({n}, 1, d), m = zeros({n}, d), v = zeros({n}, d),
                         most = amsgrad ? zeros({n}, d) : Tensor();
            std::vector<AdamState> want(n);
            for (int64_t i = 0; i < n; ++i) want[i] = {values(p)[i], 0, 0, 0};
            for (int t = 1; t <= 4; ++t) {
              const Tensor g = random_tensor({n}, uint64_t(10 + t), grad_type);
              AdamStep s{.lr = 0.1,
                         .weight_decay = 0.3,
                         .decoupled = decoupled,
                         .bias_correction1 = 1 - std::pow(0.9, t),
                         .bias_correction2 = 1 - std::pow(0.999, t),
                         .gradient = {}};
              if (scaled)
                s.gradient = {.factor = 2,
                              .scale = tensor<float>({0.25f}),
                              .found_inf = tensor<float>({0}),
                              .maximize = true};
              adam_kernel(kCPU, d)(p, g, m, v, most, s);
              for (int64_t i = 0; i < n; ++i)
                want[i] = adam(want[i], values(g)[i], s, amsgrad, scaled ? 0.25 : 1);
            }
            std::vector<double> wp, wm, wv, wmost;
            for (auto& x : want)
              wp.push_back(x.p), wm.push_back(x.m), wv.push_back(x.v), wmost.push_back(x.most);
            const double e = epsilon(d);
            expect_close(m, wm, 20 * e, 10 * e);
            expect_close(v, wv, 20 * e, 10 * e);
            if (amsgrad) expect_close(most, wmost, 20 * e, 10 * e);
            expect_close(p, wp, 100 * e, 100 * e);
          }
}

TEST(Sgd, IsPyTorchsFormula) {
  const int64_t n = 53;
  for (DType d : {kFloat32, kFloat64})
    for (double momentum : {0.0, 0.9})
      for (double dampening : {0.0, 0.4})
        for (bool nesterov : {false, true})
          for (bool maximize : {false, true}) {
            const Tensor p = random_tensor({n}, 1, d),
                         buffer = momentum ? full({n}, std::nan(""), d) : Tensor();
            std::vector<double> want = values(p), b(n);
            for (int t = 1; t <= 4; ++t) {
              const Tensor g = random_tensor({n}, uint64_t(10 + t), d);
              sgd_kernel(kCPU, d)(
                  p, g, buffer,
                  {.lr = 0.1,
                   .momentum = momentum,
                   .dampening = dampening,
                   .weight_decay = 0.2,
                   .nesterov = nesterov,
                   .first = t == 1,
                   .gradient = {.factor = 1, .scale = {}, .found_inf = {}, .maximize = maximize}});
              const auto gs = values(g);
              for (int64_t i = 0; i < n; ++i) {
                double x = (maximize ? -gs[i] : gs[i]) + 0.2 * want[i];
                if (momentum != 0) {
                  b[i] = t == 1 ? x : momentum * b[i] + (1 - dampening) * x;
                  x = nesterov ? x + momentum * b[i] : b[i];
                }
                want[i] -= 0.1 * x;
              }
            }
            expect_close(p, want, 50 * epsilon(d), 50 * epsilon(d));
            if (momentum != 0) expect_close(buffer, b, 50 * epsilon(d), 50 * epsilon(d));
          }
}

TEST(Optimizers, FoundInfChangesNothing) {
  const Tensor p = random_tensor({9}, 1), m = ones({9}), v = ones({9}),
               before = to_raw(to_raw(p, kFloat64), kFloat32), g = full({9}, INFINITY);
  const GradientScaling found{.factor = 1, .scale = {}, .found_inf = tensor<float>({1})};
  adam_kernel(kCPU, kFloat32)(p, g, m, v, {}, {.gradient = found});
  sgd_kernel(kCPU, kFloat32)(p, g, {}, {.gradient = found});
  EXPECT_TRUE(same_bits(p, before));
  expect_close(m, std::vector<double>(9, 1.0), 0, 0);
}

// An element's bits follow from its own values: any cut of a run gives the same, on both
// instruction sets, at any alignment.
TEST(Optimizers, SameBitsForAnyCut) {
  const int64_t n = 40011;
  auto run = [&](std::vector<int64_t> cuts, int64_t shift, DType grad_type) {
    auto place = [&](const Tensor& t) {
      const Tensor memory = empty({n + shift}, t.dtype());
      const Tensor y = over_storage(memory.storage(), {n}, t.dtype(), shift);
      copy_raw(y, t);
      return y;
    };
    const Tensor p = place(random_tensor({n}, 1)), g = place(random_tensor({n}, 2, grad_type)),
                 m = place(random_tensor({n}, 3)), v = place(random_tensor({n}, 4, kFloat32, 0, 1)),
                 most = place(random_tensor({n}, 5, kFloat32, 0, 1)),
                 b = place(random_tensor({n}, 6)), q = place(random_tensor({n}, 7));
    cuts.push_back(n);
    int64_t from = 0;
    for (int64_t to : cuts) {
      auto part = [&](const Tensor& t) {
        return t.as_strided_raw({to - from}, {1}, t.storage_offset() + from);
      };
      adam_kernel(kCPU, kFloat32)(part(p), part(g), part(m), part(v), part(most),
                                  {.lr = 0.01, .weight_decay = 0.1, .gradient = {}});
      sgd_kernel(kCPU, kFloat32)(part(q), part(g), part(b),
                                 {.lr = 0.01, .momentum = 0.9, .nesterov = true, .gradient = {}});
      from = to;
    }
    return std::vector<Tensor>{p, m, v, most, q, b};
  };
  for (DType grad_type : {kFloat32, kBFloat16}) {
    expect_same_bits_everywhere([&] { return run({}, 0, grad_type); });
    const auto whole = run({}, 0, grad_type);
    for (const auto& cuts : {std::vector<int64_t>{1, 8, 23, 1000, 33333}, {n - 1}, {17}})
      for (int64_t shift : {0, 1, 3}) {
        const auto cut = run(cuts, shift, grad_type);
        for (size_t i = 0; i < cut.size(); ++i) EXPECT_TRUE(same_bits(whole[i], cut[i])) << i;
      }
  }
}

TEST(Optimizers, RefuseSixteenBitParameters) {
  const Tensor p = zeros({3}, kBFloat16);
  EXPECT_THROW(adam_kernel(kCPU, kBFloat16)(p, p, p, p, {}, {}), Error);
  EXPECT_THROW(sgd_kernel(kCPU, kBFloat16)(p, p, {}, {}), Error);
}

}  // namespace
}  // namespace sherd
