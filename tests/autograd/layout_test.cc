// Strides of results: contiguous for contiguous inputs, so that view() works on them as in PyTorch.
#include "autograd/engine.h"
#include "autograd/ops.h"
#include "tests/core/support.h"

namespace sherd {
namespace {

using namespace test;

TEST(Layout, SoftmaxOverAnyDimensionIsContiguous) {
  EXPECT_EQ(softmax(ones({2, 3}), 0).view({6}).sizes(), (Dims{6}));
  for (auto f : {softmax, log_softmax})
    for (int64_t dim : {0, 1, 2, -3}) {
      const Tensor x = random_tensor({2, 3, 4}, 1).set_requires_grad(), y = f(x, dim);
      EXPECT_EQ(y.strides(), (Dims{12, 4, 1})) << dim;
      for (bool create_graph : {false, true})
        EXPECT_EQ(grad({y.sum()}, {x}, {}, {.retain_graph = true, .create_graph = create_graph})[0]
                      .strides(),
                  (Dims{12, 4, 1}))
            << dim;
      // Of other layouts too, as in PyTorch.
      EXPECT_EQ(f(x.transpose(0, 2), dim).strides(), (Dims{6, 2, 1})) << dim;
    }
}

TEST(Layout, ResultsOfContiguousInputsAreContiguous) {
  const Tensor x = random_tensor({2, 3, 4}, 1), w = random_tensor({5, 4}, 2);
  const Tensor t = zeros({2, 4}, kInt64), q = random_tensor({2, 3, 5, 4}, 3);
  const auto check = [](const char* what, const Tensor& y) {
    EXPECT_TRUE(y.is_contiguous()) << what << " " << to_string(y.strides());
  };
  for (int64_t d = 0; d < 3; ++d)
    for (bool keep : {false, true}) {
      check("sum", sum(x, {d}, keep));
      check("mean", mean(x, {d}, keep));
      check("var", var(x, {d}, 1, keep));
      check("norm", norm(x, {d}, keep));
      check("amax", amax(x, {d}, keep));
      check("argmax", argmax(x, {d}, keep));
    }
  check("layer_norm", layer_norm(x, {4}));
  check("layer_norm", layer_norm(x, {3, 4}, ones({3, 4}), zeros({3, 4})));
  check("cross_entropy", cross_entropy(x, t, {.reduction = Reduction::kNone}));
  check("cross_entropy", cross_entropy(x, softmax(x, 1), {.reduction = Reduction::kNone}));
  check("linear", linear(x, w));
  check("linear", linear(x, w, zeros({5})));
  check("matmul", matmul(x, w.t()));
  check("matmul", matmul(w, x.transpose(1, 2)));
  check("matmul", matmul(x.select(0, 0), random_tensor({4}, 4)));
  check("embedding", embedding(t, w));
  check("dropout", dropout(x, 0.5));
  check("where", where(x > 0, x, 0));
  check("attention", scaled_dot_product_attention(q, q, q));
}

}  // namespace
}  // namespace sherd
