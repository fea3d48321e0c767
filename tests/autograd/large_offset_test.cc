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

}  // namespace
}  // namespace sherd
