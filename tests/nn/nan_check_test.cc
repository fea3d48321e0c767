#include "nn/nan_check.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "autograd/grad_mode.h"
#include "nn/nn.h"
#include "tests/errors.h"

namespace sherd::nn {
namespace {

class Net : public Module {
 public:
  Net() : first(add<Linear>("first", 3, 4)), second(add<Linear>("second", 4, 2)) {}
  Tensor forward(const Tensor& x) { return second(log(first(x))); }
  Child<Linear> first, second;
};

// Weights of ones and an input of ones: the logarithm of 3.
Net& filled(Net& net) {
  net.materialize(1);
  NoGrad guard;
  for (auto& p : net.parameters()) p.fill_(1);
  return net;
}

TEST(NanCheck, NamesTheFirstModuleThatLetsOneIn) {
  Net net;
  filled(net);
  NanCheck check(net);
  EXPECT_EQ(error_of([&] { call(net, full({5, 3}, 1)); }), "no error");
  // The logarithm is nobody's module: the next to see its result is the second.
  const std::string e = error_of([&] { call(net, full({5, 3}, -1)); });
  EXPECT_HAS(
      e, "an input of module 'second' (sherd::nn::Linear), float32 [5, 4], has a NaN at [0, 0]");
  Tensor x = full({5, 3}, 1);
  x.data<float>()[7] = std::numeric_limits<float>::infinity();
  EXPECT_HAS(error_of([&] { call(net, x); }), "an input of module ''");
  EXPECT_HAS(error_of([&] { call(net, x); }), "an infinity at [2, 1]");
}

TEST(NanCheck, NamesAParameter) {
  Net net;
  filled(net);
  NanCheck check(net);
  net.second->bias->data<float>()[1] = NAN;
  EXPECT_HAS(error_of([&] {
               call(net, full({5, 3}, 1));
             }),
             "parameter 'second.bias' [2] has a NaN at [1]");
}

TEST(NanCheck, NamesAGradient) {
  Net net;
  filled(net);
  NanCheck check(net, {.infinities = false});
  // log(0) is an infinity, which is let pass, and its derivative times 0 is none.
  Tensor y = call(net, full({5, 3}, 1));
  (y.sum() * 0.0 * std::numeric_limits<double>::infinity()).backward();
  EXPECT_HAS(error_of([&] { check.gradients(); }),
             "the gradient of parameter 'first.weight' [4, 3] has a NaN at [0, 0]");
}

TEST(NanCheck, TakesItselfOut) {
  Net net;
  filled(net);
  { NanCheck check(net); }
  EXPECT_TRUE(net.state().hooks.empty());
  EXPECT_EQ(error_of([&] { call(net, full({5, 3}, -1)); }), "no error");
}

TEST(FindNonFinite, AnyFloatingPoint) {
  for (const DType dtype : {kFloat16, kBFloat16, kFloat32, kFloat64}) {
    Tensor x = full({2, 3}, 1, dtype);
    EXPECT_EQ(find_non_finite(x), "");
    x = full({2, 3}, NAN, dtype);
    EXPECT_EQ(find_non_finite(x), "a NaN at [0, 0]");
    x = full({}, -std::numeric_limits<double>::infinity(), dtype);
    EXPECT_EQ(find_non_finite(x), "an infinity at []");
    EXPECT_EQ(find_non_finite(x, false), "");
  }
  EXPECT_EQ(find_non_finite(full({2}, 1, kInt64)), "");
  EXPECT_EQ(find_non_finite(Tensor()), "");
}

}  // namespace
}  // namespace sherd::nn
