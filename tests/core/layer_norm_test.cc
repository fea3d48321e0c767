#include "core/layer_norm.h"

#include "tests/core/support.h"

namespace sherd {
namespace {

using namespace test;

struct Forward {
  std::vector<double> y, mean, rstd;
};
Forward reference(const Tensor& x, const Tensor& w, const Tensor& b, double eps) {
  const int64_t rows = x.size(0), n = x.size(1);
  const auto v = values(x);
  const std::vector<double> ws = w.defined() ? values(w) : std::vector<double>(n, 1),
                            bs = b.defined() ? values(b) : std::vector<double>(n, 0);
  Forward f;
  f.y.resize(v.size());
  for (int64_t i = 0; i < rows; ++i) {
    double mean = 0, var = 0;
    for (int64_t j = 0; j < n; ++j) mean += v[i * n + j] / double(n);
    for (int64_t j = 0; j < n; ++j)
      var += (v[i * n + j] - mean) * (v[i * n + j] - mean) / double(n);
    const double rstd = 1 / std::sqrt(var + eps);
    for (int64_t j = 0; j < n; ++j) f.y[i * n + j] = (v[i * n + j] - mean) * rstd * ws[j] + bs[j];
    f.mean.push_back(mean), f.rstd.push_back(rstd);
  }
  return f;
}

DType statistics(DType d) { return d == kFloat64 ? kFloat64 : kFloat32; }

struct Case {
  int64_t rows, n;
};
const Case kCases[] = {{1, 1}, {3, 7}, {11, 53}, {53, 101}, {200, 64}, {130, 517}};

TEST(LayerNorm, ForwardIsTheReference) {
  for (auto [rows, n] : kCases)
    for (DType d : {kFloat32, kFloat64, kBFloat16, kFloat16})
      for (bool affine : {true, false}) {
        const Tensor x = random_tensor({rows, n}, 1, d, -3, 5),
                     w = affine ? random_tensor({n}, 2, kFloat32) : Tensor(),
                     b = affine ? random_tensor({n}, 3, d) : Tensor(), y = empty({rows, n}, d),
                     mean = empty({rows}, statistics(d)), rstd = empty({rows}, statistics(d));
        layer_norm_forward(kCPU, d)(x, w, b, 1e-5, y, mean, rstd);
        const Forward f = reference(x, w, b, 1e-5);
        // A row of one element, or of few that are nearly equal, divides by a small deviation.
        const double t = n == 1 ? 1e-2 : 30 * epsilon(statistics(d));
        expect_close(y, f.y, t + epsilon(d), t + epsilon(d), name_of(d));
        expect_close(mean, f.mean, t, t);
        expect_close(rstd, f.rstd, 1e2 * t, t);
      }
}

// The loss is sum(c y); its derivative by finite differences of the reference.
TEST(LayerNorm, BackwardIsTheDerivative) {
  for (auto [rows, n] : {Case{3, 7}, Case{5, 53}, Case{40, 11}}) {
    const Tensor x = random_tensor({rows, n}, 1, kFloat64), w = random_tensor({n}, 2, kFloat64),
                 b = random_tensor({n}, 3, kFloat64), g = random_tensor({rows, n}, 4, kFloat64);
    const auto c = values(g);
    auto loss = [&] {
      const auto y = reference(x, w, b, 1e-5).y;
      double s = 0;
      for (size_t i = 0; i < y.size(); ++i) s += c[i] * y[i];
      return s;
    };
    auto numeric = [&](const Tensor& t) {
      std::vector<double> r;
      for (int64_t i = 0; i < t.numel(); ++i) {
        double& p = t.data<double>()[i];
        const double before = p, h = 1e-5;
        p = before + h;
        const double up = loss();
        p = before - h;
        r.push_back((up - loss()) / (2 * h));
        p = before;
      }
      return r;
    };
    const Tensor y = empty({rows, n}, kFloat64), mean = empty({rows}, kFloat64),
                 rstd = empty({rows}, kFloat64);
    layer_norm_forward(kCPU, kFloat64)(x, w, b, 1e-5, y, mean, rstd);
    const Tensor dx = empty({rows, n}, kFloat64), dw = empty({n}, kFloat64),
                 db = empty({n}, kFloat64);
    layer_norm_backward(kCPU, kFloat64)(g, x, w, mean, rstd, dx, dw, db);
    expect_close(dx, numeric(x), 1e-6, 1e-7);
    expect_close(dw, numeric(w), 1e-6, 1e-7);
    expect_close(db, numeric(b), 1e-6, 1e-7);
  }
}

TEST(LayerNorm, BackwardInOtherTypesIsNearFloat64) {
  for (auto [rows, n] : kCases)
    for (DType d : {kFloat32, kBFloat16}) {
      if (n == 1) continue;
      const Tensor x = random_tensor({rows, n}, 1, d), w = random_tensor({n}, 2, d),
                   g = random_tensor({rows, n}, 4, d);
      auto run = [&](DType t) {
        const Tensor xs = to_raw(x, t), y = empty({rows, n}, t),
                     mean = empty({rows}, statistics(t)), rstd = empty({rows}, statistics(t)),
                     dx = empty({rows, n}, t), dw = empty({n}, t == kBFloat16 ? kFloat32 : t),
                     db = empty({n}, t);
        layer_norm_forward(kCPU, t)(xs, to_raw(w, t), {}, 1e-5, y, mean, rstd);
        layer_norm_backward(kCPU, t)(to_raw(g, t), xs, to_raw(w, t), mean, rstd, dx, dw, db);
        return std::vector<Tensor>{dx, dw, db};
      };
      const auto got = run(d), want = run(kFloat64);
      const double t = 200 * epsilon(kFloat32);
      expect_close(got[0], values(want[0]), t + epsilon(d), t + epsilon(d), "dx");
      expect_close(got[1], values(want[1]), t, t * double(rows), "dweight");
      expect_close(got[2], values(want[2]), t + epsilon(d), t * double(rows), "dbias");
    }
}

TEST(LayerNorm, OnlyWhatIsAskedFor) {
  const Tensor x = random_tensor({6, 9}, 1), g = random_tensor({6, 9}, 2), y = empty({6, 9}),
               mean = empty({6}), rstd = empty({6});
  layer_norm_forward(kCPU, kFloat32)(x, {}, {}, 1e-5, y, mean, rstd);
  const Tensor dx = empty({6, 9}), dw = empty({9}), db = empty({9}), alone_dx = empty({6, 9}),
               alone_dw = empty({9}), alone_db = empty({9});
  auto backward = layer_norm_backward(kCPU, kFloat32);
  backward(g, x, {}, mean, rstd, dx, dw, db);
  backward(g, x, {}, mean, rstd, alone_dx, {}, {});
  backward(g, x, {}, mean, rstd, {}, alone_dw, {});
  backward(g, x, {}, mean, rstd, {}, {}, alone_db);
  EXPECT_TRUE(same_bits(dx, alone_dx) && same_bits(dw, alone_dw) && same_bits(db, alone_db));
  const Tensor in_place = random_tensor({6, 9}, 2);
  backward(in_place, x, {}, mean, rstd, in_place, {}, {});
  EXPECT_TRUE(same_bits(dx, in_place));
}

TEST(LayerNorm, SameBitsEverywhere) {
  for (auto [rows, n] : {Case{300, 517}, Case{1000, 33}, Case{5, 4096}})
    for (DType d : {kFloat32, kBFloat16}) {
      auto run = [rows = rows, n = n, d](bool shift) {
        auto place = [&](const Tensor& t) { return shift ? shifted(t) : t; };
        const Tensor x = place(random_tensor({rows, n}, 1, d)), w = place(random_tensor({n}, 2)),
                     b = place(random_tensor({n}, 3)), g = place(random_tensor({rows, n}, 4, d)),
                     y = place(empty({rows, n}, d)), mean = empty({rows}), rstd = empty({rows}),
                     dx = place(empty({rows, n}, d)), dw = place(empty({n})),
                     db = place(empty({n}));
        layer_norm_forward(kCPU, d)(x, w, b, 1e-5, y, mean, rstd);
        layer_norm_backward(kCPU, d)(g, x, w, mean, rstd, dx, dw, db);
        return std::vector<Tensor>{y, mean, rstd, dx, dw, db};
      };
      expect_same_bits_everywhere([&] { return run(false); }, name_of(d));
      const auto a = run(false), b = run(true);
      for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(same_bits(a[i], b[i])) << "shifted " << i;
    }
}

TEST(LayerNorm, SpecialValuesStayInTheirRow) {
  const double inf = INFINITY, nan = std::nan("");
  const Tensor x = from_values({1, 2, 4, 1, inf, 2, 3, nan, 1}, {3, 3}, kFloat32),
               y = empty({3, 3}), mean = empty({3}), rstd = empty({3});
  layer_norm_forward(kCPU, kFloat32)(x, {}, {}, 1e-5, y, mean, rstd);
  const auto v = values(y);
  for (int i = 0; i < 9; ++i) EXPECT_EQ(std::isnan(v[i]), i >= 3) << i;
}

TEST(LayerNorm, Empty) {
  const Tensor none = empty({0, 5}), w = ones({5}), statistics = empty({0});
  layer_norm_forward(kCPU, kFloat32)(none, w, w, 1e-5, none, statistics, statistics);
  const Tensor dw = ones({5}), db = ones({5});
  layer_norm_backward(kCPU, kFloat32)(none, none, w, statistics, statistics, none, dw, db);
  expect_close(dw, {0, 0, 0, 0, 0}, 0, 0);
  expect_close(db, {0, 0, 0, 0, 0}, 0, 0);
}

}  // namespace
}  // namespace sherd
