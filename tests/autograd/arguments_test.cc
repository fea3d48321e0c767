// Arguments that ops refuse, where PyTorch does, instead of giving another result silently.
#include <limits>

#include "autograd/ops.h"
#include "tests/core/support.h"
#include "tests/errors.h"

namespace sherd {
namespace {

using namespace test;

TEST(Arguments, AlphaIsOfTheIntegersForIntegers) {
  Tensor i = tensor<int64_t>({10, 20});
  const Tensor b = ones({2}, kBool), x = from_values({1, 2}, {2}, kFloat32);
  for (double alpha : {0.5, -1.5, double(NAN)}) {
    EXPECT_HAS(error_of([&] { add(i, i, alpha); }), "[add] alpha");
    EXPECT_HAS(error_of([&] { sub(i, i, alpha); }), "[sub] alpha");
    EXPECT_HAS(error_of([&] { i.add_(i, alpha); }), "[add] alpha");
    EXPECT_HAS(error_of([&] { add(b, b, alpha); }), "must be a whole number for bool");
  }
  EXPECT_HAS(error_of([&] { add(i, 3, 0.5); }), "must be a whole number for int64");
  EXPECT_HAS(error_of([&] { add(to_raw(i, kInt32), 1, 1e10); }), "is no value of int32");
  EXPECT_HAS(error_of([&] { add(i, 1, INFINITY); }), "is no value of int64");
  EXPECT_EQ(values(add(i, i, 2)), (std::vector<double>{30, 60}));
  EXPECT_EQ(values(sub(i, i, -3)), (std::vector<double>{40, 80}));
  EXPECT_EQ(values(add(i, x, 0.5)), (std::vector<double>{10.5, 21}));
  EXPECT_EQ(values(i), (std::vector<double>{10, 20}));
}

TEST(Arguments, IntegersHaveNoNegativePowers) {
  const Tensor i = tensor<int64_t>({1, 2});
  for (DType d : {kBool, kUInt8, kInt32, kInt64})
    EXPECT_HAS(error_of([&] { pow(to_raw(i, d), -1); }), "[pow] " + to_string(d));
  EXPECT_EQ(values(pow(i, -1.0)), (std::vector<double>{1, 0.5}));
  EXPECT_EQ(values(pow(i, 2)), (std::vector<double>{1, 4}));
  EXPECT_EQ(values(pow(ones({1}) * 2, -1)), (std::vector<double>{0.5}));
  // Of a tensor, powers are taken in the integers, as in PyTorch.
  EXPECT_EQ(values(pow(i, tensor<int64_t>({-1}))), (std::vector<double>{1, 0}));
}

TEST(Arguments, BoolsAreNotSubtracted) {
  Tensor b = ones({2}, kBool);
  const char* what = "[sub] two bool tensors cannot be subtracted";
  EXPECT_HAS(error_of([&] { b - b; }), what);
  EXPECT_HAS(error_of([&] { sub(b, b); }), what);
  EXPECT_HAS(error_of([&] { sub(b, b, 2); }), what);
  EXPECT_HAS(error_of([&] { b.sub_(b); }), what);
}

TEST(Arguments, ConditionsAreBool) {
  for (DType d : {kUInt8, kInt64, kFloat32})
    EXPECT_HAS(error_of([&] { where(ones({2}, d), 1, 2); }),
               "[where] the condition must be bool, got " + to_string(d));
}

TEST(Arguments, NoDimensionIsReducedTwice) {
  const Tensor x = ones({2, 3});
  for (const Dims& dims : {Dims{0, 0}, Dims{0, -2}, Dims{1, 0, 1}})
    for (const std::string& text :
         {error_of([&] { sum(x, dims); }), error_of([&] { mean(x, dims); }),
          error_of([&] { var(x, dims); }), error_of([&] { norm(x, dims); }),
          error_of([&] { amax(x, dims); }), error_of([&] { argmax(x, dims); })})
      EXPECT_HAS(text, "appears twice");
  EXPECT_HAS(error_of([&] { sum(ones({}), {0, -1}); }), "[sum] dimension -1 appears twice");
}

TEST(Arguments, CrossEntropyNamesItself) {
  const Tensor x = zeros({2, 3}), t = zeros({2}, kInt64);
  EXPECT_HAS(error_of([&] { cross_entropy(x, t, {.label_smoothing = NAN}); }),
             "[cross_entropy] label_smoothing must be in [0, 1], got");
  for (const Dims& sizes : {Dims{2, 0}, Dims{0, 0}, Dims{2, 0, 3}}) {
    const Dims of_targets = sizes.n == 3 ? Dims{2, 3} : Dims{sizes[0]};
    EXPECT_HAS(error_of([&] { cross_entropy(zeros(sizes), zeros(of_targets, kInt64)); }),
               "[cross_entropy] logits " + to_string(sizes) + " have no classes");
  }
}

TEST(Arguments, ArangeSaysWhatIsTooLong) {
  EXPECT_HAS(error_of([] { arange(0., 1e300); }), "[arange] from 0 to 1e+300 in steps of 1");
  EXPECT_HAS(error_of([] { arange(-1e308, 1e308, 1e-300); }), "more than memory can hold");
  EXPECT_HAS(error_of([] { arange(0., -9e18, -1); }), "[arange]");
}

}  // namespace
}  // namespace sherd
