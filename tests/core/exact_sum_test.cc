#include "core/exact_sum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cfloat>
#include <cmath>
#include <random>
#include <vector>

#include "core/parallel_for.h"

namespace sherd {
namespace {

// A number of 5,120 bits in units of 2^-2240: the reference, a bit at a time.
class BigFixed {
 public:
  static constexpr int kUnit = -2240, kWords = 160;
  static BigFixed square_of(double x) {
    const auto [m, e] = split(x);
    return product(m, m, 2 * e);
  }
  static BigFixed magnitude_of(double x) {
    const auto [m, e] = split(x);
    return product(m, 1, e);
  }
  BigFixed& operator+=(const BigFixed& o) {
    uint64_t c = 0;
    for (int i = 0; i < kWords; ++i) {
      c += uint64_t(words_[i]) + o.words_[i];
      words_[i] = uint32_t(c);
      c >>= 32;
    }
    return *this;
  }
  bool operator<=(const BigFixed& o) const {
    for (int i = kWords - 1; i >= 0; --i)
      if (words_[i] != o.words_[i]) return words_[i] < o.words_[i];
    return true;
  }
  bool operator==(const BigFixed&) const = default;
  // The number that carried limbs stand for.
  static BigFixed from_state(const Tensor& state) {
    BigFixed r;
    for (int k = 0; k < ExactSum::kLimbs; ++k) {
      const int64_t digit = state.data<int64_t>()[k];
      EXPECT_GE(digit, 0);
      EXPECT_LT(digit, int64_t(1) << ExactSum::kBits);
      r += product(uint64_t(digit), 1, ExactSum::kLowest + ExactSum::kBits * k);
    }
    return r;
  }

 private:
  static std::pair<uint64_t, int> split(double x) {
    int e;
    const double f = std::frexp(std::fabs(x), &e);
    return {uint64_t(std::ldexp(f, 53)), e - 53};
  }
  static BigFixed product(uint64_t a, uint64_t b, int exponent) {
    BigFixed r;
    const unsigned __int128 p = (unsigned __int128)(a)*b;
    for (int i = 0; i < 128; ++i)
      if (p >> i & 1) {
        const int at = exponent + i - kUnit;
        r.words_.at(at / 32) |= 1u << at % 32;
      }
    return r;
  }
  std::array<uint32_t, kWords> words_{};
};

BigFixed reference(const std::vector<double>& x, double p) {
  BigFixed r;
  for (double v : x) r += p == 2 ? BigFixed::square_of(v) : BigFixed::magnitude_of(v);
  return r;
}

template <class T>
std::vector<double> doubles(const std::vector<T>& x) {
  return {x.begin(), x.end()};
}

ExactSum sum_of(const Tensor& x, double p) {
  ExactSum s(p);
  s.add(x);
  return s;
}

// Exponents uniform over the whole range, signs and mantissas too, some zeros.
std::vector<float> any_floats(int n, std::mt19937& random, int lowest = 0, int highest = 254) {
  std::uniform_int_distribution<uint32_t> exponent(lowest, highest), bits;
  std::vector<float> x(n);
  for (float& v : x)
    v = bits(random) % 16 == 0
            ? 0.f
            : std::bit_cast<float>((bits(random) & 0x807fffff) | exponent(random) << 23);
  return x;
}
std::vector<float> normal_floats(int n, std::mt19937& random, float scale = 1) {
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> x(n);
  for (float& v : x) v = normal(random);
  return x;
}

// Within one unit in the last place of the root of `sum`.
void expect_root(double norm, const BigFixed& sum) {
  EXPECT_TRUE(BigFixed::square_of(std::nextafter(norm, 0)) <= sum);
  EXPECT_TRUE(sum <= BigFixed::square_of(std::nextafter(norm, INFINITY)));
}

TEST(ExactSum, EqualsIntegerArithmeticOverTheWholeRange) {
  std::mt19937 random(1);
  std::vector<std::vector<float>> cases = {
      {0.f},
      {FLT_TRUE_MIN},
      {FLT_MAX},
      {-FLT_MAX, FLT_TRUE_MIN},
      std::vector<float>(5000, FLT_MAX),
      std::vector<float>(5000, FLT_TRUE_MIN),
      any_floats(4999, random),            // every exponent in one block: the long way
      any_floats(2048, random, 0, 2),      // subnormal and the smallest normal
      any_floats(2049, random, 250, 254),  // the largest
      normal_floats(6001, random),
      normal_floats(2048, random, 1e-30f),
      normal_floats(2047, random, 1e30f),
  };
  for (int e = 0; e < 255; ++e) cases.push_back(any_floats(17, random, e, e));
  for (const auto& x : cases) {
    for (double p : {1.0, 2.0}) {
      const ExactSum s = sum_of(tensor<float>(x), p);
      const BigFixed exact = reference(doubles(x), p);
      ASSERT_EQ(BigFixed::from_state(s.state()), exact) << "p = " << p << ", first " << x[0];
      if (p == 2) expect_root(s.norm(), exact);
    }
  }
}

TEST(ExactSum, OneValueIsItsOwnNorm) {
  for (float v : {FLT_TRUE_MIN, FLT_MIN, 0.1f, 1.f, -3.f, FLT_MAX})
    for (double p : {1.0, 2.0, ExactSum::kInfinity})
      EXPECT_EQ(sum_of(tensor<float>({v}), p).norm(), std::fabs(double(v))) << p;
}

TEST(ExactSum, SumIsRoundedToTheNearestDouble) {
  // 1 + 2^-53 is a tie, to even: 1. The smallest value that exists breaks it.
  const float tiny = std::ldexp(1.f, -53);
  EXPECT_EQ(sum_of(tensor<float>({1.f, tiny}), 1).sum(), 1.0);
  EXPECT_EQ(sum_of(tensor<float>({1.f, tiny, FLT_TRUE_MIN}), 1).sum(), 1 + DBL_EPSILON);
  EXPECT_EQ(sum_of(tensor<double>({1, tiny, DBL_TRUE_MIN}), 1).sum(), 1 + DBL_EPSILON);
}

TEST(ExactSum, DependsOnTheValuesAlone) {
  std::mt19937 random(2);
  std::vector<float> x = any_floats(300'000, random);
  for (double p : {1.0, 2.0, 3.0, 0.5, ExactSum::kInfinity}) {
    const int before = num_threads();
    set_num_threads(1);
    const ExactSum whole = sum_of(tensor<float>(x), p);
    set_num_threads(before);
    const auto same_bits = [&](const ExactSum& s) {
      const int64_t *a = s.state().data<int64_t>(), *b = whole.state().data<int64_t>();
      return std::equal(a, a + s.state().numel(), b) &&
             std::bit_cast<int64_t>(s.norm()) == std::bit_cast<int64_t>(whole.norm());
    };
    for (int threads : {1, 2, 3, 8}) {
      set_num_threads(threads);
      EXPECT_TRUE(same_bits(sum_of(tensor<float>(x), p))) << p << " with threads " << threads;
    }
    set_num_threads(before);

    // Random cuts at any alignment, each piece into one of four sums, shuffled, merged.
    const Tensor all = tensor<float>(x);
    std::vector<Tensor> pieces;
    for (int64_t at = 0; at < all.numel();) {
      const int64_t n = std::min<int64_t>(all.numel() - at, random() % 20'000);
      pieces.push_back(all.as_strided_raw({n}, {1}, at));
      at += n;
    }
    std::shuffle(pieces.begin(), pieces.end(), random);
    std::vector<ExactSum> ranks(4, ExactSum(1));
    for (ExactSum& r : ranks) r = ExactSum(p);
    for (size_t i = 0; i < pieces.size(); ++i) ranks[i % 4].add(pieces[i]);
    for (int r = 1; r < 4; ++r) ranks[0].merge(ranks[r]);
    EXPECT_TRUE(same_bits(ranks[0])) << p;

    std::vector<float> shuffled = x;
    std::shuffle(shuffled.begin(), shuffled.end(), random);
    EXPECT_TRUE(same_bits(sum_of(tensor<float>(shuffled), p))) << p;
  }
}

TEST(ExactSum, StatesAddedElementByElementAreTheStateOfTheUnion) {
  std::mt19937 random(3);
  for (double p : {1.0, 2.0, 3.0, ExactSum::kInfinity}) {
    ExactSum all(p), gathered(p);
    int64_t* to = gathered.state().data<int64_t>();
    for (int rank = 0; rank < 5; ++rank) {
      const Tensor x = tensor<float>(any_floats(3000, random));
      all.add(x);
      const ExactSum own = sum_of(x, p);
      const int64_t* from = own.state().data<int64_t>();
      for (int64_t i = 0; i < own.state().numel(); ++i)  // what an all-reduce does
        to[i] = gathered.merges_by_max() ? std::max(to[i], from[i]) : to[i] + from[i];
    }
    EXPECT_EQ(gathered.norm(), all.norm()) << p;
    gathered.add(tensor<float>({0.f}));  // carries
    const int64_t* want = all.state().data<int64_t>();
    EXPECT_TRUE(std::equal(want, want + all.state().numel(), to)) << p;
  }
}

TEST(ExactSum, ZerosAddNothing) {
  std::mt19937 random(4);
  const std::vector<float> x = normal_floats(2500, random);
  std::vector<float> padded = x;
  padded.insert(padded.begin() + 700, 3000, -0.f);
  padded.resize(9000, 0.f);
  for (double p : {1.0, 2.0, 3.0, ExactSum::kInfinity})
    EXPECT_EQ(sum_of(tensor<float>(x), p).norm(), sum_of(tensor<float>(padded), p).norm());
  EXPECT_EQ(ExactSum(2).norm(), 0);
  EXPECT_EQ(sum_of(empty({0, 3}), 2).norm(), 0);
}

TEST(ExactSum, HalfPrecisionInputsAreWidened) {
  std::mt19937 random(5);
  for (DType dtype : {kBFloat16, kFloat16}) {
    Tensor low = empty({70, 61}, dtype);
    // All 16-bit patterns that are finite come up.
    for (int64_t i = 0; i < low.numel(); ++i) {
      const uint16_t inf = dtype == kBFloat16 ? 0x7f80 : 0x7c00;
      uint16_t bits = uint16_t(random());
      if ((bits & inf) == inf) bits &= ~inf;
      reinterpret_cast<uint16_t*>(low.bytes())[i] = bits;
    }
    const Tensor wide = to_raw(low, kFloat32), flat = wide.as_strided_raw({low.numel()}, {1}, 0);
    for (double p : {1.0, 2.0, 3.0, ExactSum::kInfinity})
      EXPECT_EQ(sum_of(low, p).norm(), sum_of(wide, p).norm()) << p << " " << name_of(dtype);
    const float* v = flat.data<float>();
    EXPECT_EQ(BigFixed::from_state(sum_of(low, 2).state()), reference({v, v + low.numel()}, 2));
  }
}

TEST(ExactSum, Float64OverTheWholeRange) {
  std::mt19937_64 random(6);
  std::vector<double> x = {DBL_TRUE_MIN, DBL_MIN, DBL_MAX, -DBL_MAX, 0, 1, -0.1};
  for (int i = 0; i < 3000; ++i) {
    const uint64_t bits = random();
    if ((bits >> 52 & 0x7ff) != 0x7ff) x.push_back(std::bit_cast<double>(bits));
  }
  for (double p : {1.0, 2.0})
    EXPECT_EQ(BigFixed::from_state(sum_of(tensor<double>(x), p).state()), reference(x, p)) << p;
  // The sum of squares exceeds every double, its root does not.
  EXPECT_EQ(sum_of(tensor<double>({DBL_MAX / 2, -DBL_MAX / 2, DBL_MAX / 2, DBL_MAX / 2}), 2).norm(),
            DBL_MAX);
  EXPECT_EQ(sum_of(tensor<double>({DBL_TRUE_MIN}), 2).norm(), DBL_TRUE_MIN);
  EXPECT_EQ(sum_of(tensor<double>(x), ExactSum::kInfinity).norm(), DBL_MAX);

  // float32 and float64 of the same values, in one sum.
  std::mt19937 narrow(7);
  const std::vector<float> f = any_floats(1000, narrow);
  EXPECT_EQ(sum_of(tensor<float>(f), 2).norm(), sum_of(tensor<double>(doubles(f)), 2).norm());
  ExactSum both(2);
  both.add(tensor<float>(f));
  both.add(tensor<double>(x));
  std::vector<double> joined = doubles(f);
  joined.insert(joined.end(), x.begin(), x.end());
  EXPECT_EQ(BigFixed::from_state(both.state()), reference(joined, 2));
}

TEST(ExactSum, OtherPowersAgreeWithPlainSums) {
  std::mt19937 random(8);
  const std::vector<float> x = normal_floats(5000, random);
  for (double p : {0.5, 1.5, 3.0, 4.0}) {
    long double plain = 0;
    for (float v : x) plain += std::pow(std::fabs((long double)(v)), (long double)(p));
    const double want = double(std::pow(plain, 1 / (long double)(p)));
    EXPECT_NEAR(sum_of(tensor<float>(x), p).norm(), want, 8 * DBL_EPSILON * want) << p;
  }
}

TEST(ExactSum, NaNAndInfinityAnywhere) {
  std::mt19937 random(9);
  const float inf = INFINITY, nan = NAN;
  for (int n : {1, 16, 17, 2048, 5000})
    for (double p : {1.0, 2.0, 3.0, ExactSum::kInfinity}) {
      std::vector<float> x = normal_floats(n, random);
      x[random() % n] = -inf;
      EXPECT_EQ(sum_of(tensor<float>(x), p).norm(), inf) << n;
      EXPECT_EQ(sum_of(tensor<double>(doubles(x)), p).norm(), inf) << n;
      ExactSum other = sum_of(tensor<float>({1.f}), p);
      other.merge(sum_of(tensor<float>(x), p));
      EXPECT_EQ(other.norm(), inf);
      x[random() % n] = std::copysign(nan, random() % 2 ? 1.f : -1.f);
      EXPECT_TRUE(std::isnan(sum_of(tensor<float>(x), p).norm())) << n;
      EXPECT_TRUE(std::isnan(sum_of(tensor<double>(doubles(x)), p).norm())) << n;
      EXPECT_TRUE(std::isnan(sum_of(to_raw(tensor<float>(x), kBFloat16), p).norm())) << n;
    }
  // The finite values beside an infinite one are summed all the same, so cuts do not matter.
  const ExactSum with = sum_of(tensor<float>({3.f, inf, 4.f}), 2);
  EXPECT_EQ(with.state().data<int64_t>()[ExactSum::kInfs], 1);
  const BigFixed finite = BigFixed::from_state(sum_of(tensor<float>({3.f, 4.f}), 2).state());
  EXPECT_EQ(BigFixed::from_state(with.state()), finite);
}

TEST(ExactSum, StridedInputs) {
  std::mt19937 random(10);
  const std::vector<float> x = normal_floats(60, random);
  const Tensor all = tensor<float>(std::span<const float>(x), {6, 10});
  EXPECT_EQ(sum_of(all.as_strided_raw({10, 6}, {1, 10}, 0), 2).norm(), sum_of(all, 2).norm());
  std::vector<float> column;
  for (int i = 0; i < 6; ++i) column.push_back(x[i * 10 + 3]);
  EXPECT_EQ(sum_of(all.as_strided_raw({6}, {10}, 3), 2).norm(),
            sum_of(tensor<float>(column), 2).norm());
}

TEST(ExactSum, RefusesWhatItCannotSum) {
  for (double p : {0.0, -1.0, -double(INFINITY), double(NAN)})
    EXPECT_THROW(ExactSum{p}, Error) << p;
  ExactSum s(2);
  EXPECT_THROW(s.add(tensor<int64_t>({1})), Error);
  EXPECT_THROW(s.add(empty({2}, kFloat32, kMeta)), Error);
  EXPECT_THROW(s.merge(ExactSum(1)), Error);
}

}  // namespace
}  // namespace sherd
