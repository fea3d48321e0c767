// Changes in place under autograd: right derivatives, or an error; never a silent other meaning.
#include "autograd/engine.h"
#include "autograd/ops.h"
#include "core/allocator.h"
#include "tests/core/support.h"

namespace sherd {
namespace {

using namespace test;
using Values = std::vector<double>;

Tensor leaf(std::initializer_list<double> v) { return tensor<double>(v).set_requires_grad(); }
template <class F>
void expect_error(F f, const char* part) {
  try {
    f();
    ADD_FAILURE() << "no Error was thrown";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
  }
}

TEST(InPlace, ArithmeticHasTheDerivativeOfItsResult) {
  const Tensor x = leaf({1, 2}), w = leaf({3, 4});
  Tensor y = x * 1;
  y.add_(w, 2), y.mul_(tensor<double>({5, 6})), y.sub_(w), y.div_(tensor<double>({2, 2}));
  y.sum().backward();  // (5 (x + 2 w) - w) / 2
  EXPECT_EQ(values(x.grad()), (Values{2.5, 3}));
  EXPECT_EQ(values(w.grad()), (Values{4.5, 5.5}));
}

TEST(InPlace, AConstantGetsTheHistoryOfWhatIsAdded) {
  const Tensor w = leaf({3, 4});
  Tensor y = zeros({2}, kFloat64);
  y.add_(w);
  EXPECT_TRUE(y.requires_grad());
  (y * 2).sum().backward();
  EXPECT_EQ(values(w.grad()), (Values{2, 2}));
}

TEST(InPlace, WhatWasOverwrittenGetsZero) {
  const Tensor x = leaf({1, 2}), w = leaf({3, 4});
  Tensor a = x * 3, b = x * 3, c = x * 3;
  a.zero_(), b.fill_(7), c.copy_(w);
  (a + b + c).sum().backward();
  EXPECT_EQ(values(x.grad()), (Values{0, 0}));
  EXPECT_EQ(values(w.grad()), (Values{1, 1}));
}

TEST(InPlace, CopyBroadcastsAndConverts) {
  const Tensor w = full({3}, 2).set_requires_grad();
  Tensor y = zeros({2, 3}, kFloat64);
  y.copy_(w);
  (y * tensor<double>({1, 2, 3})).sum().backward();
  EXPECT_EQ(w.grad().dtype(), kFloat32);
  EXPECT_EQ(values(w.grad()), (Values{2, 4, 6}));
}

TEST(InPlace, LeavesAndExpandedTensorsAreRefused) {
  Tensor x = leaf({1, 2});
  expect_error([&] { x.add_(1); }, "leaf");
  expect_error([&] { x.zero_(); }, "leaf");
  expect_error([&] { x.copy_(zeros({2}, kFloat64)); }, "leaf");
  {
    NoGrad off;
    x.add_(1);
  }
  EXPECT_EQ(values(x.detach()), (Values{2, 3}));
  EXPECT_TRUE(x.is_leaf() && x.requires_grad());
  Tensor wide = zeros({1}, kFloat64).expand({3});
  expect_error([&] { wide.add_(1); }, "[add] cannot write to an expanded");
  expect_error([&] { wide.copy_(ones({3}, kFloat64)); }, "[copy] cannot write to an expanded");
  EXPECT_EQ(values(wide), (Values{0, 0, 0}));
  wide.fill_(3);  // one value for all, as in PyTorch
  EXPECT_EQ(values(wide), (Values{3, 3, 3}));
  wide.zero_();
  Tensor none = zeros({1, 1}).expand({0, 3});  // nothing is written
  none.add_(1), none.copy_(ones({3}));
  Tensor small = zeros({1}, kFloat64);
  expect_error([&] { small.add_(zeros({3}, kFloat64)); }, "cannot hold");
  Tensor whole = zeros({1}, kInt64);
  expect_error([&] { whole.add_(0.5); }, "cannot be cast");
}

TEST(InPlace, OverlappingMemoryIsRefused) {
  Tensor x = ones({4, 4}, kFloat64);
  const char* what = "shares memory";
  expect_error([&] { x.add_(x.t()); }, what);
  expect_error([&] { x.copy_(x.t()); }, what);
  expect_error([&] { x.mul_(x.select(0, 1)); }, what);
  expect_error([&] { x.narrow(0, 1, 3).add_(x.narrow(0, 0, 3)); }, what);
  Tensor row = ones({1, 4}, kFloat64);
  row.view({4, 1}).add_(row.t());       // strides of one element do not matter
  x.add_(x);                            // element for element
  x.select(1, 0).add_(x.select(1, 1));  // side by side
  x.narrow(0, 0, 2).add_(x.narrow(0, 2, 2));
  EXPECT_EQ(values(x.select(0, 0)), (Values{8, 4, 4, 4}));
}

TEST(InPlace, IntegersStayConstants) {
  const Tensor w = leaf({1, 2});
  Tensor i = zeros({2}, kInt64);
  i.copy_(w * 2.5);
  i.narrow(0, 0, 1).copy_(w.narrow(0, 0, 1) * 2.5);  // a view of constants, too
  EXPECT_FALSE(i.requires_grad());
  EXPECT_EQ(values(i), (Values{2, 5}));
}

TEST(InPlace, WithItselfAsTheOtherInputKeepsNothing) {
  const int64_t before = memory_stats().allocated;
  for (int k = 0; k < 3; ++k) {
    Tensor y = leaf({1, 2}) * 2;
    y.mul_(y);
    Tensor z = leaf({1, 2}) * 2;
    z.div_(z);
  }
  EXPECT_EQ(memory_stats().allocated, before);
}

TEST(InPlace, ErrorsHaveTheNameThatWasCalled) {
  Tensor x = leaf({1});
  expect_error([&] { x.fill_(1); }, "[fill_] a leaf");
  expect_error([&] { x.zero_(); }, "[zero_] a leaf");
  expect_error([&] { x.copy_(leaf({2})); }, "[copy_] a leaf");
}

TEST(InPlace, ThroughAViewIsRefused) {
  const Tensor x = leaf({1, 2}), w = leaf({3});
  Tensor y = x * 1, part = y.narrow(0, 0, 1);
  expect_error([&] { part.mul_(2); }, "view");
  // A view of a constant: the whole would not get the history.
  Tensor buffer = zeros({2}, kFloat64), head = buffer.narrow(0, 0, 1);
  expect_error([&] { head.copy_(w); }, "view");
  expect_error([&] { head.add_(w); }, "view");
  head.add_(1);  // of constants alone it is fine
  EXPECT_EQ(values(buffer), (Values{1, 0}));
  // The other way round: views of it would not get the history.
  expect_error([&] { buffer.add_(x); }, "views");
}

TEST(InPlace, AViewTakenBeforeTheChangeIsNotUsed) {
  const Tensor x = leaf({1, 2});
  for (auto take : {+[](const Tensor& t) { return t.narrow(0, 0, 1); },
                    +[](const Tensor& t) { return t.unsqueeze(0); },
                    +[](const Tensor& t) {
                      return t.view({2, 1}).t();
                    },
                    +[](const Tensor& t) {
                      return t.expand({3, 2});
                    }}) {
    Tensor y = x * 1;
    const Tensor view = take(y);
    y.mul_(5);
    expect_error([&] { view.sum().backward(); }, "changed in place");
    // A view taken after the change is right.
    Tensor z = x * 1;
    z.mul_(5);
    x.set_grad({});
    take(z).sum().backward();
    EXPECT_GT(values(x.grad())[0], 4);
  }
}

TEST(InPlace, SavedValuesAreWatched) {
  const Tensor x = leaf({1, 2});
  // exp needs its output, mul its inputs, add neither.
  Tensor e = exp(x * 1);
  e.add_(1);
  expect_error([&] { e.sum().backward(); }, "[exp]");
  Tensor a = x * 1;
  const Tensor b = a * a;
  a.add_(1);
  expect_error([&] { b.sum().backward(); }, "[mul]");
  Tensor c = x * 1;
  const Tensor d = c + 1;
  c.add_(1);
  (c + d).sum().backward();
  EXPECT_EQ(values(x.grad()), (Values{2, 2}));
}

TEST(InPlace, TargetsAndMasksAreWatched) {
  const Tensor x = random_tensor({2, 3}, 1, kFloat64).set_requires_grad();
  Tensor target = tensor<int64_t>({0, 1});
  const Tensor loss = cross_entropy(x, target);
  target.fill_(2);
  expect_error([&] { loss.backward(); }, "[cross_entropy]");
  Tensor ids = tensor<int64_t>({0, 1});
  const Tensor rows = embedding(ids, x);
  ids.fill_(0);
  expect_error([&] { rows.sum().backward(); }, "[embedding]");
  Tensor mask = full({2, 2}, 1, kBool);
  const Tensor y = scaled_dot_product_attention(x, x, x, {.mask = mask});
  mask.fill_(0);
  expect_error([&] { y.sum().backward(); }, "[scaled_dot_product_attention]");
}

TEST(InPlace, GradientsAreNotShared) {
  // Two leaves get what one tensor of the graph was; adding to one must not change the other.
  const Tensor x = leaf({1, 2}), w = leaf({3, 4});
  (x + w).sum().backward();
  (x * 2).sum().backward();
  EXPECT_EQ(values(x.grad()), (Values{3, 3}));
  EXPECT_EQ(values(w.grad()), (Values{1, 1}));
  // A gradient that the caller gave stays the caller's.
  const Tensor g = ones({2}, kFloat64), z = leaf({1, 2});
  const Tensor y = z + 0;
  y.backward(g);
  (z * 2).sum().backward();
  EXPECT_EQ(values(g), (Values{1, 1}));
}

}  // namespace
}  // namespace sherd
