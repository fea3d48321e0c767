// Functions of a user's own, by record() and record_many(): what becomes of their gradients.
#include <gtest/gtest.h>

#include "autograd/checkpoint.h"
#include "autograd/engine.h"
#include "autograd/gradcheck.h"
#include "autograd/ops.h"
#include "autograd/record.h"
#include "tests/errors.h"

namespace sherd {
using autograd::Needs, autograd::record, autograd::Saved;
namespace {

Tensor leaf(const Dims& sizes, DType dtype = kFloat64) {
  return full(sizes, 2, dtype).set_requires_grad();
}
std::vector<double> values(const Tensor& t) {
  const Tensor c = contiguous_raw(to_raw(t, kFloat64));
  return {c.data<double>(), c.data<double>() + c.numel()};
}
// A function of x whose backward gives that gradient.
Tensor giving(const Tensor& x, const Tensor& gradient) {
  return record<1>("mine", zeros({1}, kFloat64), {&x},
                   [gradient](const Tensor&, Needs) { return std::array{gradient}; });
}

TEST(CustomFunction, IsALambda) {
  auto cube = [](const Tensor& x) {
    Tensor y;
    {
      NoGrad off;
      y = x * x * x;
    }
    return record<1>("cube", y, {&x}, [x = Saved(x)](const Tensor& g, Needs) {
      return std::array{3 * g * x.get() * x.get()};
    });
  };
  const TensorsFunction f = [&](const std::vector<Tensor>& in) {
    return std::vector<Tensor>{cube(in[0])};
  };
  gradcheck(f, {full({3}, 1.5, kFloat64)});
  gradgradcheck(f, {full({3}, 1.5, kFloat64)});
}

TEST(CustomFunction, GradientsAreFittedToTheirInputs) {
  for (DType dtype : {kFloat64, kFloat32, kBFloat16}) {
    const Tensor x = leaf({2, 3}, dtype);
    giving(x, full({4, 2, 3}, 1, kFloat64)).backward();
    EXPECT_EQ(x.grad().dtype(), dtype);
    EXPECT_EQ(values(x.grad()), std::vector<double>(6, 4));
    // Of a result too, and where a graph of the gradient is made or the call is checkpointed.
    const Tensor g = grad({giving(x * 1, full({2, 2, 3}, 1))}, {x}, {}, {.create_graph = true})[0];
    EXPECT_EQ(values(g), std::vector<double>(6, 2));
    x.set_grad({});
    checkpoint([](const Tensor& t) { return giving(t, full({5, 2, 3}, 1)); }, x).backward();
    EXPECT_EQ(values(x.grad()), std::vector<double>(6, 5));
  }
}

TEST(CustomFunction, SecondDerivativesGoThroughTheFitting) {
  const Tensor x = leaf({1});
  const Tensor y =
      record<1>("square_sum", full({3}, 4, kFloat64), {&x}, [x = Saved(x)](const Tensor& g, Needs) {
        return std::array{(g * 2 * x.get())};  // [3], for an input of [1]
      });
  const Tensor first = grad({y.sum()}, {x}, {}, {.create_graph = true})[0];
  EXPECT_EQ(values(first), (std::vector<double>{12}));
  EXPECT_EQ(values(grad({first}, {x})[0]), (std::vector<double>{6}));
}

TEST(CustomFunction, GradientsThatDoNotFitAreRefused) {
  const Tensor x = leaf({2, 3});
  for (const Dims& wrong : {Dims{}, Dims{3}, Dims{1, 3}, Dims{3, 2}, Dims{2, 3, 1}, Dims{4, 2, 1}})
    EXPECT_HAS(error_of([&] { giving(x, full(wrong, 1)).backward(); }),
               "[mine] its backward returned a gradient of shape");
  EXPECT_HAS(error_of([&] {
               giving(x, empty({2, 3}, kFloat64, kMeta)).backward();
             }),
             "returned a gradient on meta");
  EXPECT_FALSE(x.grad().defined());
  // Of its other inputs nothing arrives either.
  const Tensor good = leaf({1});
  const Tensor y = record<2>("mine", zeros({1}, kFloat64), {&good, &x}, [](const Tensor& g, Needs) {
    return std::array{g, full({5}, 1)};
  });
  EXPECT_HAS(error_of([&] { y.backward(); }), "for input 1 of shape [2, 3]");
  EXPECT_FALSE(good.grad().defined());
}

// Contributions come to a sink as to a leaf.
TEST(CustomFunction, SinksGetWhatFits) {
  struct Sink : autograd::GradSink {
    Destination destination(autograd::AutogradMeta&, DType) override { return {}; }
    void accept(autograd::AutogradMeta&, const Tensor& g) override { got = g; }
    void complete(autograd::AutogradMeta&) override {}
    Tensor got;
  };
  const Tensor x = leaf({2, 3}, kBFloat16);
  const auto sink = std::make_shared<Sink>();
  autograd::make_meta(x).sink = sink;
  giving(x, full({4, 2, 3}, 1)).backward();
  EXPECT_EQ(sink->got.dtype(), kBFloat16);
  EXPECT_EQ(sink->got.sizes(), (Dims{2, 3}));
}

Tensor twice(const Tensor& t) {
  return record<1>("twice", t, {&t}, [](const Tensor& g, Needs) { return std::array{g * 2}; });
}

TEST(CustomFunction, MayReturnItsInput) {
  const Tensor x = leaf({2});
  const Tensor y = twice(twice(x));
  EXPECT_TRUE(x.is_leaf());
  EXPECT_EQ(y.storage().get(), x.storage().get());
  (y + x).sum().backward();
  EXPECT_EQ(values(x.grad()), (std::vector<double>{5, 5}));
  const std::vector<Tensor> both = autograd::record_many(
      "both", {x, x * 1}, {x},
      [](std::span<const Tensor> g, Needs) { return std::vector<Tensor>{g[0] * 3 + g[1]}; });
  x.set_grad({});
  (both[0] + both[1]).sum().backward();
  EXPECT_EQ(values(x.grad()), (std::vector<double>{4, 4}));
}

// The two are one memory: a change of either would be one of both.
TEST(CustomFunction, InPlaceChangesOfAReturnedInputAreRefused) {
  const Tensor x = leaf({2});
  Tensor of_leaf = twice(x);
  EXPECT_HAS(error_of([&] { of_leaf.mul_(3); }), "[mul_] an in-place change of a view");
  Tensor z = x * 1, of_result = twice(z);
  EXPECT_HAS(error_of([&] { of_result.mul_(3); }), "[mul_] an in-place change of a view");
  z.mul_(3);
  EXPECT_HAS(error_of([&] { of_result.sum().backward(); }), "was changed in place after the view");
  Tensor same = checkpoint([](const Tensor& t) { return t; }, x);
  EXPECT_HAS(error_of([&] { same.mul_(3); }), "[mul_] an in-place change of a view");
}

}  // namespace
}  // namespace sherd
