// Dropout and the creation ops: statistics, determinism, dtypes.
#include <cmath>

#include "autograd/engine.h"
#include "autograd/gradcheck.h"
#include "autograd/ops.h"
#include "core/generator.h"
#include "tests/core/support.h"

namespace sherd {
namespace {

using namespace test;

TEST(Dropout, KeepsTheRightShareAndScales) {
  for (DType d : {kFloat64, kFloat32, kBFloat16, kFloat16})
    for (double p : {0.1, 0.5, 0.8}) {
      manual_seed(3);
      const auto v = values(dropout(full({200, 300}, 3, d), p));
      double kept = 0;
      for (double x : v) {
        if (x == 0) continue;
        ++kept;
        EXPECT_NEAR(x, 3 / (1 - p), 3 / (1 - p) * epsilon(d));
      }
      EXPECT_NEAR(kept / 60000, 1 - p, 5 * std::sqrt(p * (1 - p) / 60000)) << name_of(d);
    }
}

TEST(Dropout, BackwardUsesTheSameMask) {
  for (DType d : {kFloat64, kFloat32, kBFloat16}) {
    manual_seed(3);
    const Tensor x = random_tensor({50, 70}, 1, d, 1, 2).set_requires_grad();
    const Tensor y = dropout(x, 0.4), g = ones({50, 70}, d);
    const Tensor fused = grad({y}, {x}, {g}, {.retain_graph = true})[0];
    const Tensor composed = grad({y}, {x}, {g}, {.create_graph = true})[0];
    EXPECT_TRUE(same_bits(fused, composed.detach()));
    const auto a = values(y.detach()), b = values(fused);
    for (size_t i = 0; i < a.size(); ++i) EXPECT_EQ(a[i] == 0, b[i] == 0);
  }
  const TensorsFunction f = [](const std::vector<Tensor>& in) {
    manual_seed(9);
    return std::vector<Tensor>{dropout(in[0], 0.3)};
  };
  const Tensor x = random_tensor({4, 5}, 1, kFloat64);
  gradcheck(f, {x});
  gradcheck(f, {x}, {.create_graph = true});
}

TEST(Dropout, FollowsFromSeedAndDrawAlone) {
  auto two = [](uint64_t seed) {
    manual_seed(seed);
    const Tensor x = ones({33, 65});
    return std::pair{dropout(x, 0.5), dropout(x, 0.5)};
  };
  const auto [a, b] = two(1);
  const auto [c, d] = two(1);
  const auto [e, f] = two(2);
  EXPECT_TRUE(same_bits(a, c) && same_bits(b, d));
  EXPECT_FALSE(same_bits(a, b));
  EXPECT_FALSE(same_bits(a, e) || same_bits(b, f));
  // The mask goes by place in row-major order, whatever the layout, threads and instructions.
  manual_seed(1);
  EXPECT_TRUE(same_bits(dropout(transposed_layout(ones({33, 65})), 0.5), a));
  expect_same_bits_everywhere([] {
    manual_seed(1);
    return std::vector<Tensor>{dropout(ones({300, 700}), 0.5)};
  });
}

TEST(Dropout, Edges) {
  const Tensor x = random_tensor({3, 4}, 1);
  EXPECT_TRUE(dropout(x, 0.5, false).is_same(x));
  EXPECT_TRUE(dropout(x, 0).is_same(x));
  EXPECT_EQ(values(dropout(x, 1)), std::vector<double>(12, 0));
  EXPECT_EQ(dropout(empty({0, 3}), 0.5).sizes(), (Dims{0, 3}));
  EXPECT_EQ(dropout(ones({}), 0.5).sizes(), Dims{});
  EXPECT_EQ(dropout(empty({2, 3}, kFloat32, kMeta), 0.5).sizes(), (Dims{2, 3}));
  EXPECT_THROW(dropout(x, -0.1), Error);
  EXPECT_THROW(dropout(x, NAN), Error);
  EXPECT_THROW(dropout(tensor<int64_t>({1}), 0.5), Error);
}

TEST(Attention, DropoutHasTheRightMean) {
  manual_seed(1);
  const Tensor q = random_tensor({1, 1, 2, 4}, 1), k = random_tensor({1, 1, 6, 4}, 2);
  const Tensor v = random_tensor({1, 1, 6, 3}, 3), want = scaled_dot_product_attention(q, k, v);
  Tensor sum = zeros(want.sizes());
  constexpr int kTimes = 4000;
  for (int i = 0; i < kTimes; ++i)
    sum.add_(scaled_dot_product_attention(q, k, v, {.dropout_p = 0.2}));
  // Each weight's share varies by sqrt(p / (1 - p)) of itself, and values are below 1.
  expect_close(values(sum / double(kTimes)), values(want), 0, 5 * 0.5 / std::sqrt(kTimes));
}

TEST(Creation, Arange) {
  EXPECT_EQ(values(arange(4)), (std::vector<double>{0, 1, 2, 3}));
  EXPECT_EQ(arange(4).dtype(), kInt64);
  EXPECT_EQ(arange(0).sizes(), Dims{0});
  EXPECT_EQ(arange(2, 7, 2).dtype(), kInt64);
  EXPECT_EQ(values(arange(2, 7, 2)), (std::vector<double>{2, 4, 6}));
  EXPECT_EQ(values(arange(3, 0, -1)), (std::vector<double>{3, 2, 1}));
  EXPECT_EQ(arange(0.0, 1.0, 0.25).dtype(), kFloat32);
  EXPECT_EQ(values(arange(0.0, 1.0, 0.25)), (std::vector<double>{0, 0.25, 0.5, 0.75}));
  EXPECT_EQ(arange(1.0, 1.0).sizes(), Dims{0});
  EXPECT_THROW(arange(-1), Error);
  EXPECT_THROW(arange(0, 3, 0), Error);
  EXPECT_THROW(arange(0, 3, -1), Error);
  EXPECT_THROW(arange(0.0, double(INFINITY)), Error);
  EXPECT_THROW(arange(0.0, 1.0, double(NAN)), Error);
}

TEST(Creation, RandomNumbers) {
  manual_seed(4);
  const Tensor u = rand({100, 300}), n = randn({100, 300}), i = randint(-3, 4, {100, 300});
  double mean = 0, squares = 0;
  for (double x : values(u)) {
    EXPECT_TRUE(x >= 0 && x < 1);
    mean += x / 30000;
  }
  EXPECT_NEAR(mean, 0.5, 5 / std::sqrt(12 * 30000.0));
  mean = 0;
  for (double x : values(n)) mean += x / 30000, squares += x * x / 30000;
  EXPECT_NEAR(mean, 0, 5 / std::sqrt(30000.0));
  EXPECT_NEAR(squares, 1, 5 * std::sqrt(2 / 30000.0));
  std::vector<double> counts(7);
  for (double x : values(i)) ++counts.at(size_t(x + 3));
  for (double c : counts) EXPECT_NEAR(c, 30000 / 7.0, 5 * std::sqrt(30000 / 7.0));
  EXPECT_EQ(i.dtype(), kInt64);
  EXPECT_FALSE(same_bits(u, rand({100, 300})));
  manual_seed(4);
  EXPECT_TRUE(same_bits(u, rand({100, 300})));
  for (DType d : {kFloat64, kBFloat16, kFloat16}) {
    EXPECT_EQ(rand({3}, d).dtype(), d);
    EXPECT_EQ(randn({0}, d).dtype(), d);
  }
  EXPECT_THROW(randint(3, 3, {1}), Error);
  EXPECT_THROW(rand({3}, kInt64), Error);
  EXPECT_THROW(rand({-1}), Error);
}

TEST(Creation, FilledTensors) {
  EXPECT_EQ(values(full({2}, 2.5)), (std::vector<double>{2.5, 2.5}));
  EXPECT_EQ(values(full({2}, 1, kBool)), (std::vector<double>{1, 1}));
  EXPECT_EQ(full({}, int64_t(1) << 53, kInt64).item<int64_t>(), int64_t(1) << 53);
  for (int d = 0; d < kDTypes; ++d) {
    EXPECT_EQ(values(ones({2, 2}, DType(d))), std::vector<double>(4, 1)) << name_of(DType(d));
    EXPECT_EQ(values(zeros({3}, DType(d))), std::vector<double>(3, 0));
  }
  const auto mask = values(causal_mask(3));
  EXPECT_EQ(mask, (std::vector<double>{0, -INFINITY, -INFINITY, 0, 0, -INFINITY, 0, 0, 0}));
}

}  // namespace
}  // namespace sherd
