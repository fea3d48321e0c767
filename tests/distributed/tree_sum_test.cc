// The fixed tree over ranks: its values, and that bits depend on nothing but the inputs.
#include "distributed/tree_sum.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/tensor.h"

namespace sherd::dist {
namespace {

constexpr DType kAll[] = {kBool, kUInt8, kInt32, kInt64, kFloat16, kBFloat16, kFloat32, kFloat64};
constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kProduct, ReduceOp::kMin,
                             ReduceOp::kMax};

// Random bits, so that rounding matters: any value of the type, Inf and NaN too if `wild`.
std::vector<char> random_bytes(DType dtype, int64_t n, uint64_t seed, bool wild) {
  Tensor x = empty({n}, kFloat64);
  uint64_t state = seed * 0x9e3779b97f4a7c15 + 1;
  for (int64_t i = 0; i < n; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    double v = double(int64_t(state)) / 0x1p63;  // in [-1, 1)
    if (wild && i % 17 == 3) v = std::numeric_limits<double>::infinity();
    if (wild && i % 19 == 5) v = std::numeric_limits<double>::quiet_NaN();
    if (dtype == kBool) v = v > 0;
    if (dtype == kUInt8) v = std::floor(v * 127 + 128);
    if (dtype == kInt32) v = std::floor(v * 0x1p31);
    if (dtype == kInt64) v = std::floor(v * 0x1p62);
    x.data<double>()[i] = v;
  }
  const Tensor y = to_raw(x, dtype);
  return std::vector<char>(y.bytes(), y.bytes() + y.nbytes());
}

std::vector<std::vector<char>> random_inputs(DType dtype, int ranks, int64_t n, bool wild = false) {
  std::vector<std::vector<char>> list;
  for (int r = 0; r < ranks; ++r) list.push_back(random_bytes(dtype, n, 7 + r, wild));
  return list;
}

std::vector<char> reduce(ReduceOp op, DType dtype, const std::vector<std::vector<char>>& inputs) {
  std::vector<const char*> p;
  for (const auto& x : inputs) p.push_back(x.data());
  std::vector<char> out(inputs[0].size());
  tree_reduce(op, dtype, p, out.data(), int64_t(out.size()) / size_of(dtype));
  return out;
}

// One element, by the definition.
template <class T>
T node(ReduceOp op, const std::vector<T>& v, size_t a, size_t b) {
  if (b - a == 1) return v[a];
  const size_t h = std::bit_floor(b - a - 1);
  const T l = node(op, v, a, a + h), r = node(op, v, a + h, b);
  switch (op) {
    case ReduceOp::kProduct:
      return T(l * r);
    case ReduceOp::kMin:
      return std::min(l, r);
    case ReduceOp::kMax:
      return std::max(l, r);
    default:
      return T(l + r);
  }
}

TEST(TreeReduce, IsTheTree) {
  for (int ranks = 1; ranks <= 9; ++ranks) {
    const auto inputs = random_inputs(kFloat32, ranks, 3000);
    for (ReduceOp op : kOps) {
      const auto out = reduce(op, kFloat32, inputs);
      for (int64_t i = 0; i < 3000; ++i) {
        std::vector<float> v(ranks);
        for (int r = 0; r < ranks; ++r) std::memcpy(&v[r], inputs[r].data() + 4 * i, 4);
        float want = node(op, v, 0, ranks), got;
        if (op == ReduceOp::kAvg) want /= float(ranks);
        std::memcpy(&got, out.data() + 4 * i, 4);
        ASSERT_EQ(got, want) << ranks << " ranks, " << name_of(op) << ", element " << i;
      }
    }
  }
}

TEST(TreeReduce, OfAPowerOfTwoIsTheTreeOfTrees) {
  // What HYBRID relies on: over 4 x 2 ranks, the sum of sums.
  for (DType dtype : {kFloat32, kBFloat16, kFloat16}) {
    const auto inputs = random_inputs(dtype, 8, 1000);
    std::vector<std::vector<char>> sums;
    for (int k = 0; k < 8; k += 4)
      sums.push_back(reduce(ReduceOp::kSum, dtype, {inputs.begin() + k, inputs.begin() + k + 4}));
    EXPECT_EQ(reduce(ReduceOp::kSum, dtype, sums), reduce(ReduceOp::kSum, dtype, inputs));
  }
}

TEST(TreeReduce, RoundsEachNodeOfHalfTypes) {
  // 256 + 1 rounds to 256 in bfloat16 (8 bits), so the order shows.
  const Tensor big = full({1}, 256, kBFloat16), one = full({1}, 1, kBFloat16);
  auto sum = [&](std::initializer_list<const Tensor*> list) {
    std::vector<const char*> p;
    for (auto* t : list) p.push_back(t->bytes());
    Tensor out = empty({1}, kBFloat16);
    tree_reduce(ReduceOp::kSum, kBFloat16, p, out.bytes(), 1);
    return *to_raw(out, kFloat32).data<float>();
  };
  EXPECT_EQ(sum({&big, &one, &one}), 256);            // (256 + 1) + 1
  EXPECT_EQ(sum({&one, &one, &big}), 258);            // (1 + 1) + 256
  EXPECT_EQ(sum({&big, &one, &one, &one}), 258);      // (256 + 1) + (1 + 1)
  const Tensor half_way = full({1}, 2049, kFloat16);  // of no float16: 2048
  EXPECT_EQ(*to_raw(half_way, kFloat32).data<float>(), 2048);
}

TEST(TreeReduce, BitsDependOnNothingButTheInputs) {
  for (DType dtype : kAll) {
    for (ReduceOp op : kOps) {
      if (op == ReduceOp::kAvg && !is_float(dtype)) continue;
      for (int ranks : {2, 3, 5}) {
        const int64_t n = 5001, size = size_of(dtype);
        const auto inputs = random_inputs(dtype, ranks, n, true);
        const auto want = reduce(op, dtype, inputs);
        // Cut into chunks of odd sizes, at other alignments, into one of the inputs.
        for (int place = -1; place < ranks; ++place) {
          std::vector<std::vector<char>> moved;
          for (const auto& x : inputs) {
            moved.emplace_back(x.size() + 64);
            std::memcpy(moved.back().data() + size, x.data(), x.size());
          }
          std::vector<char> apart(want.size());
          char* out = place < 0 ? apart.data() : moved[place].data() + size;
          for (int64_t at = 0, step = 1; at < n; at += step, step = step * 3 % 1021 + 1) {
            const int64_t m = std::min(step, n - at);
            std::vector<const char*> p;
            for (const auto& x : moved) p.push_back(x.data() + (at + 1) * size);
            tree_reduce(op, dtype, p, out + at * size, m);
          }
          ASSERT_EQ(std::memcmp(out, want.data(), want.size()), 0)
              << name_of(dtype) << " " << name_of(op) << ", " << ranks << " ranks, into " << place;
        }
      }
    }
  }
}

TEST(TreeReduce, IntegersAndBools) {
  const std::vector<char> a{char(200), 3, 0}, b{char(100), 2, 1};
  EXPECT_EQ(reduce(ReduceOp::kSum, kUInt8, {a, b}), (std::vector<char>{44, 5, 1}));  // wraps
  EXPECT_EQ(reduce(ReduceOp::kProduct, kUInt8, {a, b}), (std::vector<char>{32, 6, 0}));
  EXPECT_EQ(reduce(ReduceOp::kMin, kUInt8, {a, b}), (std::vector<char>{100, 2, 0}));
  EXPECT_EQ(reduce(ReduceOp::kMax, kUInt8, {a, b}), (std::vector<char>{char(200), 3, 1}));
  const std::vector<char> t{1, 1, 0, 0}, u{1, 0, 1, 0};
  EXPECT_EQ(reduce(ReduceOp::kSum, kBool, {t, u}), (std::vector<char>{1, 1, 1, 0}));
  EXPECT_EQ(reduce(ReduceOp::kProduct, kBool, {t, u}), (std::vector<char>{1, 0, 0, 0}));
  EXPECT_EQ(reduce(ReduceOp::kMin, kBool, {t, u}), (std::vector<char>{1, 0, 0, 0}));
  EXPECT_EQ(reduce(ReduceOp::kMax, kBool, {t, u}), (std::vector<char>{1, 1, 1, 0}));
  Tensor y = tensor<int64_t>({INT64_MAX}), z = tensor<int64_t>({1}), out = zeros({1}, kInt64);
  const char* p[] = {y.bytes(), z.bytes()};
  tree_reduce(ReduceOp::kSum, kInt64, p, out.bytes(), 1);
  EXPECT_EQ(*out.data<int64_t>(), INT64_MIN);
  for (DType dtype : {kBool, kUInt8, kInt32, kInt64})
    EXPECT_THROW(reduce(ReduceOp::kAvg, dtype, {std::vector<char>(8), std::vector<char>(8)}),
                 Error);
}

TEST(TreeReduce, NaNIsTheResultWhereAnyRankHasIt) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (DType dtype : {kFloat16, kBFloat16, kFloat32, kFloat64})
    for (ReduceOp op : kOps)
      for (int where = 0; where < 3; ++where) {
        std::vector<Tensor> x;
        std::vector<const char*> p;
        for (int r = 0; r < 3; ++r) {
          x.push_back(full({20}, r == where ? nan : r, dtype));
          p.push_back(x[r].bytes());
        }
        Tensor out = zeros({20}, dtype);
        tree_reduce(op, dtype, p, out.bytes(), 20);
        const Tensor f = to_raw(out, kFloat32);
        for (int i = 0; i < 20; ++i) EXPECT_TRUE(std::isnan(f.data<float>()[i])) << name_of(op);
      }
}

}  // namespace
}  // namespace sherd::dist
