#include "core/softmax.h"

#include "tests/core/support.h"

namespace sherd {
namespace {

using namespace test;

std::vector<double> reference(const Tensor& x, bool logarithm) {
  const int64_t n = x.size(1);
  auto v = values(x);
  for (size_t row = 0; row < v.size(); row += size_t(n)) {
    double top = v[row], sum = 0;
    for (int64_t j = 0; j < n; ++j) top = std::max(top, v[row + j]);
    for (int64_t j = 0; j < n; ++j) sum += std::exp(v[row + j] - top);
    for (int64_t j = 0; j < n; ++j) {
      const double y = v[row + j] - top - std::log(sum);
      v[row + j] = logarithm ? y : std::exp(y);
    }
  }
  return v;
}
std::vector<double> backward_reference(const Tensor& x, const Tensor& g, bool logarithm) {
  const int64_t n = x.size(1);
  const auto y = reference(x, logarithm), up = values(g);
  std::vector<double> dx(y.size());
  for (size_t row = 0; row < y.size(); row += size_t(n)) {
    double s = 0;
    for (int64_t j = 0; j < n; ++j) s += up[row + j] * (logarithm ? 1 : y[row + j]);
    for (int64_t j = 0; j < n; ++j)
      dx[row + j] =
          logarithm ? up[row + j] - std::exp(y[row + j]) * s : y[row + j] * (up[row + j] - s);
  }
  return dx;
}

auto forward(bool logarithm, DType d) {
  return logarithm ? log_softmax_forward(kCPU, d) : softmax_forward(kCPU, d);
}
auto backward(bool logarithm, DType d) {
  return logarithm ? log_softmax_backward(kCPU, d) : softmax_backward(kCPU, d);
}

struct Case {
  int64_t rows, n;
};
const Case kCases[] = {{1, 1}, {3, 7}, {11, 53}, {40, 101}, {200, 64}, {7, 1500}};

TEST(Softmax, IsTheReference) {
  for (auto [rows, n] : kCases)
    for (bool logarithm : {false, true})
      for (DType d : {kFloat32, kFloat64, kBFloat16, kFloat16}) {
        const Tensor x = random_tensor({rows, n}, 1, d, -20, 20), y = empty({rows, n}, d),
                     g = random_tensor({rows, n}, 2, d), dx = empty({rows, n}, d);
        forward(logarithm, d)(x, y);
        const DType compute = d == kFloat64 ? kFloat64 : kFloat32;
        const double t = 64 * epsilon(compute) + epsilon(d);
        expect_close(y, reference(x, logarithm), t, d == kFloat16 && !logarithm ? 1e-7 : t,
                     name_of(d));
        // From the exact output, so that what backward adds is seen alone.
        const Tensor exact = from_values(reference(x, logarithm), {rows, n}, compute);
        backward(logarithm, d)(g, exact, dx);
        expect_close(dx, backward_reference(x, g, logarithm), t, t * std::sqrt(double(n)),
                     name_of(d));
      }
}

TEST(Softmax, MixedTypes) {
  const Tensor x = random_tensor({5, 33}, 1, kBFloat16), y = empty({5, 33}), z = empty({5, 33}),
               wide = to_raw(x, kFloat32);
  softmax_forward(kCPU, kBFloat16)(x, y);
  softmax_forward(kCPU, kFloat32)(wide, z);
  EXPECT_TRUE(same_bits(y, z));
}

TEST(Softmax, SpecialValues) {
  const double inf = INFINITY, nan = std::nan("");
  const Tensor x = from_values({-inf, 0, 0, -inf, -inf, -inf, inf, 0, 1, nan, 0, 1, -200, 0, 0,
                                3e38, -3e38, 3e38},
                               {6, 3}, kFloat32),
               y = empty({6, 3});
  softmax_forward(kCPU, kFloat32)(x, y);
  expect_close(y, {0, .5, .5, nan, nan, nan, nan, nan, nan, nan, nan, nan, 0, .5, .5, .5, 0, .5}, 0,
               1e-7);
  log_softmax_forward(kCPU, kFloat32)(x, y);
  const double l = -std::log(2);
  const auto v = values(y);
  expect_close({v.begin(), v.begin() + 3}, {-inf, l, l}, 1e-6, 0);
  for (int i = 3; i < 12; ++i) EXPECT_TRUE(std::isnan(v[i]) || (i == 7 || i == 8)) << i;
  expect_close({v.begin() + 12, v.begin() + 15}, {-200 + l, l, l}, 1e-6, 0);
}

TEST(Softmax, InPlace) {
  for (bool logarithm : {false, true}) {
    const Tensor x = random_tensor({6, 77}, 1), y = empty({6, 77}), g = random_tensor({6, 77}, 2),
                 dx = empty({6, 77});
    forward(logarithm, kFloat32)(x, y);
    backward(logarithm, kFloat32)(g, y, dx);
    forward(logarithm, kFloat32)(x, x);
    EXPECT_TRUE(same_bits(x, y));
    backward(logarithm, kFloat32)(g, y, g);
    EXPECT_TRUE(same_bits(g, dx));
  }
}

TEST(Softmax, SameBitsEverywhere) {
  for (bool logarithm : {false, true})
    for (DType d : {kFloat32, kBFloat16}) {
      auto run = [&](bool shift) {
        auto place = [&](const Tensor& t) { return shift ? shifted(t) : t; };
        const Tensor x = place(random_tensor({500, 309}, 1, d, -9, 9)),
                     y = place(empty({500, 309}, d)), g = place(random_tensor({500, 309}, 2, d)),
                     dx = place(empty({500, 309}, d));
        forward(logarithm, d)(x, y);
        backward(logarithm, d)(g, y, dx);
        return std::vector<Tensor>{y, dx};
      };
      expect_same_bits_everywhere([&] { return run(false); }, name_of(d));
      const auto a = run(false), b = run(true);
      EXPECT_TRUE(same_bits(a[0], b[0]) && same_bits(a[1], b[1])) << "shifted";
    }
}

TEST(Softmax, Empty) {
  const Tensor a = empty({0, 3}), b = empty({3, 0});
  softmax_forward(kCPU, kFloat32)(a, a);
  softmax_forward(kCPU, kFloat32)(b, b);
  log_softmax_backward(kCPU, kFloat32)(b, b, b);
}

}  // namespace
}  // namespace sherd
