// Layers: initial distributions, options, errors; what conformance does not see.
#include <cmath>

#include "autograd/engine.h"
#include "core/generator.h"
#include "nn/nn.h"
#include "tests/nn/support.h"

namespace sherd {
namespace {

using namespace test;

struct Moments {
  double mean = 0, std = 0, low = INFINITY, high = -INFINITY;
};
Moments moments(const Tensor& t) {
  const auto v = values(t);
  Moments m;
  for (double x : v) m.mean += x / double(v.size());
  for (double x : v) {
    m.std += (x - m.mean) * (x - m.mean) / double(v.size());
    m.low = std::min(m.low, x), m.high = std::max(m.high, x);
  }
  m.std = std::sqrt(m.std);
  return m;
}
// Mean and deviation within five standard errors, extremes at the bounds.
void expect_uniform(const Tensor& t, double bound) {
  const Moments m = moments(t);
  const double n = std::sqrt(double(t.numel())), std = bound / std::sqrt(3.0);
  EXPECT_NEAR(m.mean, 0, 5 * std / n);
  EXPECT_NEAR(m.std, std, 5 * std / n);
  EXPECT_GE(m.low, -bound);
  EXPECT_LE(m.low, -0.98 * bound);
  EXPECT_LE(m.high, bound);
  EXPECT_GE(m.high, 0.98 * bound);
}

TEST(Init, LinearIsPyTorchs) {
  manual_seed(1);
  nn::Linear m(100, 400);
  expect_uniform(m.weight, 0.1);
  expect_uniform(m.bias, 0.1);
}

TEST(Init, EmbeddingIsNormal) {
  manual_seed(1);
  nn::Embedding m(300, 100, {.padding_idx = -2});
  const auto v = values(m.weight);
  for (int64_t i = 0; i < 30000; ++i) EXPECT_EQ(v[size_t(i)] == 0, i / 100 == 298);
  const Moments x = moments(m.weight->narrow(0, 0, 298));
  EXPECT_NEAR(x.mean, 0, 5 / std::sqrt(29800.0));
  EXPECT_NEAR(x.std, 1, 5 / std::sqrt(2 * 29800.0));
  EXPECT_LT(x.high, 6);
  EXPECT_GT(x.high, 3);
}

TEST(Init, AttentionIsPyTorchs) {
  manual_seed(1);
  nn::MultiheadAttention m(100, 4);
  expect_uniform(m.in_proj_weight, std::sqrt(6.0 / 400));
  expect_uniform(m.out_proj->weight, 0.1);
  EXPECT_EQ(values(m.in_proj_bias), std::vector<double>(300, 0));
  EXPECT_EQ(values(m.out_proj->bias), std::vector<double>(100, 0));
}

TEST(Init, LayerNormIsTheIdentity) {
  nn::LayerNorm m(3);
  EXPECT_EQ(values(m.weight), std::vector<double>(3, 1));
  EXPECT_EQ(values(m.bias), std::vector<double>(3, 0));
}

TEST(Init, TruncatedNormalStaysInItsBounds) {
  struct One : nn::Module {
    One() { w = parameter("w", {20000}, nn::init::trunc_normal(1, 2, -1, 2)); }
    nn::Parameter w;
  };
  manual_seed(1);
  One m;
  const Moments x = moments(m.w);
  EXPECT_GE(x.low, -1);
  EXPECT_LE(x.high, 2);
  // A normal of mean 1 and deviation 2 within [-1, 2], by its density: mean 0.5867, deviation
  // 0.8313.
  EXPECT_NEAR(x.mean, 0.5867, 5 * 0.8313 / std::sqrt(20000.0));
  EXPECT_NEAR(x.std, 0.8313, 5 * 0.8313 / std::sqrt(20000.0));
}

TEST(Init, APieceHasTheNumbersOfTheWhole) {
  for (const nn::Initializer& init :
       {nn::init::uniform(-1, 2), nn::init::normal(0, 2), nn::init::trunc_normal(0, 1, -2, 2),
        nn::init::kaiming_uniform(7), nn::init::xavier_uniform(3, 4), nn::init::constant(3)})
    for (DType d : {kFloat32, kBFloat16, kFloat64}) {
      const Tensor whole = empty({1000}, d);
      init.fill(42, 0, whole);
      for (auto [begin, n] : {std::pair<int64_t, int64_t>{0, 1}, {1, 7}, {333, 334}, {999, 1}}) {
        const Tensor piece = empty({n}, d);
        init.fill(42, begin, piece);
        EXPECT_TRUE(same_bits(piece, whole.narrow(0, begin, n))) << name_of(d) << " from " << begin;
      }
      init.fill(42, 5, empty({0}, d));
    }
}

TEST(Layers, OptionsWithoutParameters) {
  EXPECT_EQ(nn::Linear(2, 3, {.bias = false}).parameters().size(), 1u);
  EXPECT_EQ(nn::LayerNorm(3, {.elementwise_affine = false}).parameters().size(), 0u);
  EXPECT_EQ(nn::LayerNorm(3, {.bias = false}).parameters().size(), 1u);
  EXPECT_EQ(nn::MultiheadAttention(4, 2, {.bias = false}).parameters().size(), 2u);
  EXPECT_EQ(nn::Linear(2, 3, {.dtype = kBFloat16}).parameters()[0].dtype(), kBFloat16);
  nn::LayerNorm plain(Dims{2, 3}, {.elementwise_affine = false});
  EXPECT_EQ(plain.forward(ones({4, 2, 3})).sizes(), (Dims{4, 2, 3}));
}

TEST(Layers, ErrorsNameTheLayer) {
  expect_error([] { nn::Linear(-1, 2); }, {"[Linear]", "-1"});
  expect_error([] { nn::Embedding(3, 2, {.padding_idx = 3}); }, {"[Embedding]", "3"});
  expect_error([] { nn::MultiheadAttention(5, 2); }, {"[MultiheadAttention]", "5", "2"});
  expect_error([] { nn::MultiheadAttention(4, 0); }, {"[MultiheadAttention]", "0"});
  expect_error([] { nn::Dropout(1.5); }, {"[Dropout]", "1.5"});
  expect_error([] { nn::GELU("exact"); }, {"[GELU]", "exact"});
  expect_error([] { nn::Linear(2, 3).forward(ones({4})); }, {"[linear]", "[4]", "[3, 2]"});
  expect_error([] { nn::Embedding(3, 2).forward(tensor<int64_t>({0, 3})); }, {"[embedding]", "3"});
  nn::MultiheadAttention m(4, 2);
  const Tensor x = ones({2, 3, 4});
  expect_error([&] { m.forward(ones({2, 3, 5}), x, x); }, {"[MultiheadAttention]", "[2, 3, 5]"});
  expect_error([&] { m.forward(x, ones({2, 5, 4}), x); }, {"[MultiheadAttention]", "[2, 5, 4]"});
  expect_error([&] { m.forward(x, x, x, {.attn_mask = ones({2, 2})}); }, {"[2, 2]"});
  expect_error([&] { m.forward(x, x, x, {.attn_mask = ones({3, 3}, kInt64)}); }, {"int64", "bool"});
  expect_error(
      [&] {
        m.forward(x, x, x, {.key_padding_mask = full({2, 4}, 0, kBool)});
      },
      {"[2, 4]"});
}

TEST(Layers, EmbeddingPaddingGetsNoGradient) {
  nn::Embedding m(3, 2, {.padding_idx = 1});
  m.forward(tensor<int64_t>({0, 1, 1, 2, 2})).sum().backward();
  EXPECT_EQ(values(m.weight->grad()), (std::vector<double>{1, 1, 0, 0, 2, 2}));
}

TEST(Dropout, OnlyInTraining) {
  manual_seed(1);
  nn::Dropout m(0.25);
  const Tensor x = ones({100, 100});
  const auto v = values(nn::call(m, x));
  const double kept = double(std::count_if(v.begin(), v.end(), [](double y) { return y != 0; }));
  EXPECT_NEAR(kept / 10000, 0.75, 5 * std::sqrt(0.75 * 0.25 / 10000));
  for (double y : v) EXPECT_TRUE(y == 0 || y == double(float(1 / 0.75)));
  m.eval();
  EXPECT_TRUE(nn::call(m, x).is_same(x) || same_bits(nn::call(m, x), x));
}

// All the ways to say "query t sees keys up to t".
TEST(Attention, MasksAgree) {
  manual_seed(1);
  nn::MultiheadAttention m(8, 2);
  m.to(kFloat64);
  const Tensor x = random_tensor({3, 5, 8}, 1, kFloat64),
               memory = random_tensor({3, 5, 8}, 2, kFloat64);
  const Tensor hidden = arange(5).unsqueeze(1) < arange(5).unsqueeze(0);  // true hides
  for (const Tensor& kv : {x, memory}) {
    const Tensor want = m.forward(x, kv, kv, {.is_causal = true}).output;
    for (const nn::MultiheadAttentionArguments& a :
         {nn::MultiheadAttentionArguments{.attn_mask = hidden},
          nn::MultiheadAttentionArguments{.attn_mask = causal_mask(5, kFloat64)},
          nn::MultiheadAttentionArguments{.attn_mask = hidden.expand({6, 5, 5})},
          nn::MultiheadAttentionArguments{.attn_mask = hidden, .need_weights = true},
          nn::MultiheadAttentionArguments{.attn_mask = hidden, .is_causal = true},
          nn::MultiheadAttentionArguments{.is_causal = true, .need_weights = true}}) {
      const auto r = m.forward(x, kv, kv, a);
      expect_close(values(r.output), values(want), 1e-12, 1e-12);
      if (!a.need_weights) continue;
      EXPECT_EQ(r.weights.sizes(), (Dims{3, 5, 5}));
      expect_close(values(r.weights.sum({-1})), std::vector<double>(15, 1), 1e-12, 0);
    }
  }
  const auto heads = m.forward(x, x, x, {.need_weights = true, .average_attn_weights = false});
  EXPECT_EQ(heads.weights.sizes(), (Dims{3, 2, 5, 5}));
  // A padded key changes nothing of what the others give.
  const Tensor padding = empty({3, 5}, kBool);
  for (int i = 0; i < 15; ++i) padding.data<bool>()[i] = i % 5 == 4;
  const Tensor cut = memory.narrow(1, 0, 4);
  expect_close(values(m.forward(x, memory, memory, {.key_padding_mask = padding}).output),
               values(m.forward(x, cut, cut).output), 1e-12, 1e-12);
}

TEST(Attention, DropoutDrawsOnlyInTraining) {
  manual_seed(1);
  nn::MultiheadAttention m(8, 2, {.dropout = 0.5});
  const Tensor x = random_tensor({2, 5, 8}, 1);
  const Tensor a = m.forward(x, x, x).output, b = m.forward(x, x, x).output;
  EXPECT_FALSE(same_bits(a, b));
  m.eval();
  EXPECT_TRUE(same_bits(m.forward(x, x, x).output, m.forward(x, x, x).output));
}

}  // namespace
}  // namespace sherd
