// Values whose differences are small beside what they have in common: no op may lose the
// differences' digits in a rounded intermediate.
#include <cmath>

#include "autograd/engine.h"
#include "autograd/ops.h"
#include "tests/core/support.h"

namespace sherd {
namespace {

using namespace test;

constexpr double kOffsets[] = {0, 1e3, 1e4, -1e4, 1e5, 1e7};

// Whole numbers, so that float32 holds them exactly whatever is added.
Tensor logits(const Dims& sizes, double offset) {
  Tensor x = empty(sizes, kFloat64);
  for (int64_t i = 0; i < x.numel(); ++i)
    x.data<double>()[i] = offset + double(i * i * 7919 % 23) - 11;
  return to_raw(x, kFloat32);
}

TEST(LargeOffset, CrossEntropyAndLogSoftmaxDoNotSeeIt) {
  for (double offset : kOffsets)
    for (int64_t n : {3, 100})
      for (double smoothing : {0.0, 0.2}) {
        const Tensor t = random_indices(5, n, 1);
        auto run = [&](double c) {
          const Tensor x = logits({5, n}, c).set_requires_grad();
          const Tensor loss =
              cross_entropy(x, t, {.reduction = Reduction::kNone, .label_smoothing = smoothing});
          const Tensor l = log_softmax(x, 1);
          return std::vector<Tensor>{loss.detach(), grad({loss.sum()}, {x})[0], l.detach(),
                                     grad({(l * l).sum()}, {x})[0]};
        };
        const auto want = run(0), got = run(offset);
        for (size_t i = 0; i < want.size(); ++i)
          EXPECT_TRUE(same_bits(want[i], got[i])) << "offset " << offset << ", result " << i;
      }
}

TEST(LargeOffset, KnownLosses) {
  const Tensor x = from_values({1e4 + 10, 1e4, 1e4 - 5}, {1, 3}, kFloat32),
               equal = full({1, 3}, 1e7).set_requires_grad(), t = tensor<int64_t>({0});
  const double want = std::log1p(std::exp(-10.0) + std::exp(-15.0));
  EXPECT_NEAR(cross_entropy(x, t).item(), want, epsilon(kFloat32));  // of a sum that is near 1
  EXPECT_NEAR(-log_softmax(x, 1).select(1, 0).item(), want, epsilon(kFloat32));
  cross_entropy(equal, t).backward();
  expect_close(equal.grad(), {-2 / 3., 1 / 3., 1 / 3.}, 4 * epsilon(kFloat32), 0);
}

// 1.1 % was the error of float32 sums at 1e4.
TEST(LargeOffset, VarianceKeepsItsDigits) {
  for (double offset : kOffsets)
    for (DType d : {kFloat32, kBFloat16, kFloat64})
      for (auto [n, m] : {std::pair<int64_t, int64_t>{1000, 3}, {3, 1000}, {70, 200}}) {
        Tensor x = empty({n, m}, kFloat64);
        for (int64_t i = 0; i < n * m; ++i) x.data<double>()[i] = offset + 0.001 * double(i % 1000);
        x = to_raw(x, d);
        const auto v = values(x);
        auto want = [&](const std::vector<double>& of) {
          double mean = 0, squares = 0;
          for (double a : of) mean += (a - of[0]) / double(of.size());
          for (double a : of) squares += (a - of[0] - mean) * (a - of[0] - mean);
          return squares / double(of.size() - 1);
        };
        std::vector<double> rows, columns;
        for (int64_t i = 0; i < n; ++i) rows.push_back(want({&v[i * m], &v[i * m] + m}));
        for (int64_t j = 0; j < m; ++j) {
          std::vector<double> column;
          for (int64_t i = 0; i < n; ++i) column.push_back(v[i * m + j]);
          columns.push_back(want(column));
        }
        // A mean in float64 is rounded, and the deviations are below 1.
        const double t = 2 * epsilon(d), s = 2 * epsilon(kFloat64) * (1 + std::abs(offset));
        const std::string what = concat("offset ", offset, ", ", d, " ", Dims{n, m});
        expect_close(var(x, {1}), rows, t, s, what);
        expect_close(var(x, {0}), columns, t, s, what);
        expect_close(var(x, {}), {want(v)}, t, s, what);
      }
}

}  // namespace
}  // namespace sherd
