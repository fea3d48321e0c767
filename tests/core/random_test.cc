#include "core/random.h"

#include "core/dropout.h"
#include "core/philox.h"
#include "tests/core/support.h"

namespace sherd {
namespace {

using namespace test;

const Generator::Draw kDraw{0x123456789abcdef, 5};

enum Distribution { kUniform, kNormal, kTruncNormal };
Tensor draw(Distribution d, Generator::Draw key, int64_t begin, int64_t n, DType t) {
  const Tensor y = empty({n}, t);
  if (d == kUniform) uniform_kernel(kCPU, t)(key, begin, -2, 3, y);
  if (d == kNormal) normal_kernel(kCPU, t)(key, begin, 1, 2, y);
  if (d == kTruncNormal) trunc_normal_kernel(kCPU, t)(key, begin, 1, 2, 0, 4, y);
  return y;
}

// The draws are of 200,000 numbers; the largest distance of the empirical from the true
// distribution function is below 1.95 / sqrt(n) in 999 of 1,000 samples (Kolmogorov, Smirnov).
template <class F>
void expect_distribution(std::vector<double> v, F cdf) {
  std::sort(v.begin(), v.end());
  double worst = 0;
  const double n = double(v.size());
  for (size_t i = 0; i < v.size(); ++i)
    worst = std::max(
        {worst, std::abs(cdf(v[i]) - double(i) / n), std::abs(cdf(v[i]) - double(i + 1) / n)});
  EXPECT_LT(worst, 1.95 / std::sqrt(n));
}
double phi(double z) { return 0.5 * std::erfc(-z / std::sqrt(2)); }

TEST(Random, Distributions) {
  for (DType d : {kFloat32, kFloat64}) {
    const auto u = values(draw(kUniform, kDraw, 0, 200000, d));
    expect_distribution(u, [](double x) { return (x + 2) / 5; });
    for (double x : u) ASSERT_TRUE(x >= -2 && x < 3);
    expect_distribution(values(draw(kNormal, kDraw, 0, 200000, d)),
                        [](double x) { return phi((x - 1) / 2); });
    const auto t = values(draw(kTruncNormal, kDraw, 0, 200000, d));
    const double low = phi(-0.5), high = phi(1.5);
    expect_distribution(t, [&](double x) { return (phi((x - 1) / 2) - low) / (high - low); });
    for (double x : t) ASSERT_TRUE(x >= 0 && x <= 4);
  }
}

TEST(Random, NeighboursAndStreamsAreIndependent) {
  auto correlation = [](const std::vector<double>& a, const std::vector<double>& b, size_t lag) {
    double s = 0;
    const size_t n = a.size() - lag;
    for (size_t i = 0; i < n; ++i) s += (a[i] - 1) * (b[i + lag] - 1) / 4;
    return s / double(n);
  };
  const auto a = values(draw(kNormal, kDraw, 0, 100000, kFloat32)),
             b = values(draw(kNormal, {kDraw.key, kDraw.number + 1}, 0, 100000, kFloat32)),
             c = values(draw(kNormal, {kDraw.key + 1, kDraw.number}, 0, 100000, kFloat32));
  for (size_t lag : {1, 2, 256, 512, 1024})
    EXPECT_LT(std::abs(correlation(a, a, lag)), 0.016) << lag;
  EXPECT_LT(std::abs(correlation(a, b, 0)), 0.016);
  EXPECT_LT(std::abs(correlation(a, c, 0)), 0.016);
}

// An element's value follows from (draw, its place) alone.
TEST(Random, AnyCutGivesTheSameWhole) {
  for (Distribution d : {kUniform, kNormal, kTruncNormal})
    for (DType t : {kFloat32, kFloat64, kBFloat16}) {
      const int64_t n = 70001;
      const Tensor whole = draw(d, kDraw, 0, n, t);
      for (auto [begin, end] : {std::pair<int64_t, int64_t>{0, 1},
                                {1, 64},
                                {63, 65},
                                {1023, 1025},
                                {777, 40000},
                                {40000, n},
                                {5, 5}}) {
        const Tensor part = draw(d, kDraw, begin, end - begin, t);
        EXPECT_TRUE(same_bits(part, whole.as_strided_raw({end - begin}, {1}, begin)))
            << d << " " << name_of(t) << " " << begin;
      }
      expect_same_bits_everywhere([&] { return std::vector<Tensor>{draw(d, kDraw, 33, n, t)}; },
                                  name_of(t));
    }
}

TEST(Random, SixteenBitsAreTheRoundedFloat) {
  for (Distribution d : {kUniform, kNormal, kTruncNormal})
    EXPECT_TRUE(same_bits(draw(d, kDraw, 3, 5000, kBFloat16),
                          to_raw(draw(d, kDraw, 3, 5000, kFloat32), kBFloat16)));
}

// The words are Philox's, in the order that the note in philox_lanes.h says.
TEST(Random, WordsArePhilox) {
  const Tensor y = empty({2500});
  uniform_kernel(kCPU, kFloat32)(kDraw, 0, 0, 1, y);
  for (int64_t i = 0; i < 2500; ++i) {
    const auto words = philox(kDraw.key, kDraw.number, uint64_t(i / 1024 * 256 + i % 256));
    ASSERT_EQ(y.data<float>()[i], uniform_float(words[size_t(i % 1024 / 256)])) << i;
  }
}

TEST(Random, FarPlaces) {
  const int64_t far = int64_t(1) << 40;
  const Tensor a = draw(kUniform, kDraw, far, 100, kFloat32),
               b = draw(kUniform, kDraw, 0, 100, kFloat32);
  EXPECT_FALSE(same_bits(a, b));
  EXPECT_TRUE(
      same_bits(a, draw(kUniform, kDraw, far, 200, kFloat32).as_strided_raw({100}, {1}, 0)));
}

TEST(Random, UniformStaysBelowHigh) {
  const Tensor y = empty({100000});
  uniform_kernel(kCPU, kFloat32)(kDraw, 0, 1, 1.0000002, y);  // two floats wide: products round up
  for (float v : values(y)) ASSERT_LT(v, 1.0000002f);
  uniform_kernel(kCPU, kFloat32)(kDraw, 0, 3, 3, y);
  for (double v : values(y)) ASSERT_EQ(v, 3);
}

Tensor dropped(const Tensor& x, double p, Generator::Draw key = kDraw) {
  const Tensor y = empty(x.sizes(), x.dtype());
  dropout_kernel(kCPU, x.dtype())(x, p, key, y);
  return y;
}

TEST(Dropout, KeepsTheRightShareAndScale) {
  for (DType d : {kFloat32, kFloat64, kBFloat16})
    for (double p : {0.0, 0.1, 0.5, 0.9, 1.0}) {
      const int64_t n = 100000;
      const Tensor x = random_tensor({n}, 1, d, 1, 2);
      const auto in = values(x), out = values(dropped(x, p));
      int64_t kept = 0;
      for (int64_t i = 0; i < n; ++i) {
        if (out[i] == 0) continue;
        ++kept;
        ASSERT_NEAR(out[i], in[i] / (1 - p), out[i] * 2 * epsilon(d == kFloat64 ? kFloat32 : d));
      }
      // Five standard deviations.
      EXPECT_NEAR(double(kept), double(n) * (1 - p), 5 * std::sqrt(double(n) * p * (1 - p)) + 1e-9);
    }
}

TEST(Dropout, TheMaskFollowsFromPlaceAlone) {
  const Tensor x = random_tensor({37, 53}, 1, kFloat32, 1, 2), y = dropped(x, 0.3);
  EXPECT_TRUE(same_bits(y, dropped(transposed_layout(x), 0.3)));
  EXPECT_TRUE(same_bits(y, dropped(shifted(x), 0.3)));
  EXPECT_TRUE(same_bits(y, dropped(x, 0.3)));
  EXPECT_FALSE(same_bits(y, dropped(x, 0.3, {kDraw.key, kDraw.number + 1})));
  const Tensor out = transposed_layout(zeros({37, 53}));
  dropout_kernel(kCPU, kFloat32)(x, 0.3, kDraw, out);
  EXPECT_TRUE(same_bits(y, out));
  // float64 and bfloat16 drop the same elements.
  for (DType d : {kFloat64, kBFloat16}) {
    const auto a = values(y), b = values(dropped(to_raw(x, d), 0.3));
    for (size_t i = 0; i < a.size(); ++i) ASSERT_EQ(a[i] == 0, b[i] == 0) << i;
  }
  const Tensor in_place = to_raw(to_raw(x, kFloat64), kFloat32);
  dropout_kernel(kCPU, kFloat32)(in_place, 0.3, kDraw, in_place);
  EXPECT_TRUE(same_bits(y, in_place));
  expect_same_bits_everywhere(
      [&] { return std::vector<Tensor>{dropped(random_tensor({70001}, 2), 0.3)}; });
}

TEST(Dropout, Empty) { dropped(empty({0, 3}), 0.5); }

}  // namespace
}  // namespace sherd
