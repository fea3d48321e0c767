#include "core/tensor.h"

#include <gtest/gtest.h>

#include <cmath>
#include <sstream>

#include "core/error.h"

namespace sherd {
namespace {

constexpr int64_t kLarge = int64_t(1) << 40;

TEST(Error, NumbersHaveAsManyDigitsAsTellThem) {
  EXPECT_EQ(concat(0.1, " ", 1e-5, " ", 3.0, " ", 0.1f, " ", 7), "0.1 1e-05 3 0.1 7");
  EXPECT_EQ(concat(-std::nan("")), "nan");
}

TEST(Tensor, ShapesAndDtypesArePrinted) {
  std::ostringstream out;
  out << zeros({2, 3}).sizes() << " " << kBFloat16;
  EXPECT_EQ(out.str(), "[2, 3] bfloat16");
}

TEST(Tensor, OfBools) {
  const Tensor t = tensor<bool>({true, false});
  EXPECT_EQ(t.dtype(), kBool);
  EXPECT_TRUE(t.data<bool>()[0] && !t.data<bool>()[1]);
}

TEST(Tensor, SizesTooLargeAreErrors) {
  EXPECT_THROW(empty({kLarge, kLarge}), Error);
  EXPECT_THROW(empty({int64_t(1) << 61, 2}, kFloat64, kMeta), Error);
  EXPECT_THROW(empty({2, -1}), Error);
}

TEST(Tensor, BesideAZeroNoSizeIsTooLarge) {
  for (const Dims& sizes : {Dims{0, kLarge, kLarge}, {kLarge, kLarge, 0}, {kLarge, 0, kLarge}}) {
    EXPECT_EQ(sizes.numel(), 0);
    EXPECT_EQ(empty(sizes).numel(), 0);
  }
}

}  // namespace
}  // namespace sherd
