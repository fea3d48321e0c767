// The optimizers' common part: groups, state made at first use, odd parameters and gradients, state
// dicts, and errors.
#include "optim/optimizer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "autograd/meta.h"
#include "autograd/ops.h"
#include "core/allocator.h"
#include "nn/nn.h"
#include "nn/shard_info.h"
#include "optim/optim.h"
#include "tests/optim/support.h"

namespace sherd::optim {
namespace {

using test::bits;
using test::copy_of;
using test::message_of;
using test::random_leaf;
using test::random_tensor;
using test::values;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

void set_random_grads(const std::vector<Tensor>& params, uint64_t seed) {
  for (auto& p : params) p.set_grad(random_tensor(p.sizes(), seed++, p.dtype()));
}

// ---- construction
TEST(Construction, TakesTensorsNamesOrGroups) {
  const Tensor w = random_leaf({2, 3}, 1), b = random_leaf({3}, 2);
  w.set_grad(ones({2, 3})), b.set_grad(ones({3}));
  AdamW plain({w, b}, {.lr = 1e-4});
  EXPECT_EQ(plain.param_groups()[0].params().size(), 2u);
  EXPECT_EQ(plain.param_groups()[0].weight_decay, 1e-2);
  Adam named({{"w", w}, {"b", b}});
  EXPECT_EQ(named.named_parameters()[1].first, "b");
  AdamW grouped({{.params = {w}}, {.params = {b}, .lr = 1e-2, .weight_decay = 0}},
                {.lr = 1e-4, .betas = {0.5, 0.75}});
  ASSERT_EQ(grouped.num_groups(), 2u);
  EXPECT_EQ(grouped.param_groups()[0].lr, 1e-4);
  EXPECT_EQ(grouped.param_groups()[1].lr, 1e-2);
  EXPECT_EQ(grouped.param_groups()[1].weight_decay, 0);
  EXPECT_EQ(grouped.param_groups()[1].betas[1], 0.75);
  grouped.add_param_group({.params = {random_leaf({2}, 3)}, .eps = 1e-3});
  EXPECT_EQ(grouped.param_groups()[2].eps, 1e-3);
  EXPECT_EQ(grouped.param_groups()[2].lr, 1e-4);
}

TEST(Construction, RefusesWhatCannotBeOptimized) {
  const Tensor w = random_leaf({2}, 1), v = random_leaf({2}, 2);
  EXPECT_SAYS(SGD(std::vector<Tensor>{}), "no parameters");
  EXPECT_SAYS(SGD({w, v, w}), "parameter 2 is given twice");
  EXPECT_SAYS(SGD({{.params = {w}}, {.params = {v, w}}}), "second time in group 1");
  EXPECT_SAYS(SGD({w, Tensor()}), "parameter 1 is an undefined tensor");
  EXPECT_SAYS(SGD({tensor<int64_t>({1, 2})}), "is int64: only floating point");
  EXPECT_SAYS(SGD({w * 2}), "result of an op");
  EXPECT_SAYS(SGD({{"a", w}, {"a", v}}), "two parameters are named a");
  // Two tensors of one parameter, as FSDP has them.
  const Tensor full = ones({4});
  autograd::share_meta(full, w);
  EXPECT_SAYS(SGD({w, full}), "given twice");
  SGD sgd({v});
  EXPECT_SAYS(sgd.add_param_group({.params = {w, v}}), "given twice");
  EXPECT_EQ(sgd.num_groups(), 1u);
  sgd.add_param_group({.params = {w}});
  EXPECT_EQ(sgd.num_groups(), 2u);
}

TEST(Construction, RefusesOptionsOutOfRange) {
  const std::vector<Tensor> p{random_leaf({2}, 1)};
  EXPECT_SAYS(AdamW(p, {.lr = -1}), "[adam] lr must be in [0");
  EXPECT_SAYS(AdamW(p, {.lr = kNaN}), "lr");
  EXPECT_SAYS(AdamW(p, {.betas = {1.0, 0.9}}), "betas[0]");
  EXPECT_SAYS(AdamW(p, {.betas = {0.9, -0.1}}), "betas[1]");
  EXPECT_SAYS(AdamW(p, {.eps = -1e-8}), "eps");
  EXPECT_SAYS(Adam(p, {.weight_decay = -1}), "weight_decay");
  EXPECT_SAYS(SGD(p, {.momentum = -0.5}), "momentum");
  EXPECT_SAYS(SGD(p, {.dampening = kNaN}), "dampening");
  EXPECT_SAYS(SGD(p, {.nesterov = true}), "nesterov needs a momentum");
  EXPECT_SAYS(SGD(p, {.momentum = 0.9, .dampening = 0.1, .nesterov = true}), "no dampening");
  EXPECT_SAYS(SGD({{.params = p, .lr = -2}}), "lr");
  // Also when set later.
  AdamW adam(p);
  p[0].set_grad(ones({2}));
  adam.param_groups()[0].lr = kNaN;
  const std::string before = bits(p[0]);
  EXPECT_SAYS(adam.step(), "lr must be");
  EXPECT_EQ(bits(p[0]), before);
}

// ---- stepping
TEST(Step, GroupsHaveTheirOwnOptions) {
  const Tensor a = ones({2}).set_requires_grad(), b = ones({2}).set_requires_grad();
  a.set_grad(ones({2})), b.set_grad(ones({2}));
  SGD sgd({{.params = {a}}, {.params = {b}, .lr = 0.25}}, {.lr = 0.5});
  sgd.step();
  EXPECT_EQ(values(a), (std::vector<double>{0.5, 0.5}));
  EXPECT_EQ(values(b), (std::vector<double>{0.75, 0.75}));
  sgd.param_groups()[1].lr = 0.5;
  sgd.step();
  EXPECT_EQ(values(b), (std::vector<double>{0.25, 0.25}));
}

TEST(Step, ParametersWithoutGradientAreLeftAlone) {
  const Tensor a = random_leaf({3}, 1), b = random_leaf({3}, 2), b0 = copy_of(b);
  AdamW adam({a, b}, {.lr = 0.1, .weight_decay = 0.5});
  a.set_grad(ones({3}));
  adam.step();
  EXPECT_EQ(bits(b), bits(b0));
  EXPECT_FALSE(adam.state_dict().contains("state.1.step"));
  // Its first step is number 1 whatever the others did: as alone (bias correction).
  const Tensor c = copy_of(b0).set_requires_grad();
  AdamW alone({c}, {.lr = 0.1, .weight_decay = 0.5});
  b.set_grad(full({3}, 0.25)), c.set_grad(full({3}, 0.25));
  adam.step(), alone.step();
  EXPECT_EQ(bits(b), bits(c));
  EXPECT_EQ(adam.state_dict().at("state.0.step").item<int64_t>(), 2);
  EXPECT_EQ(adam.state_dict().at("state.1.step").item<int64_t>(), 1);
  // A zero gradient is not an absent one: decay, and the step counts.
  b.set_grad(zeros({3}));
  const Tensor before = copy_of(b);
  adam.step();
  EXPECT_NE(bits(b), bits(before));
  EXPECT_EQ(adam.state_dict().at("state.1.step").item<int64_t>(), 2);
}

TEST(Step, FrozenParametersAreAccepted) {
  const Tensor a = random_leaf({3}, 1), frozen = random_tensor({3}, 2);
  SGD sgd({a, frozen}, {.lr = 0.1, .momentum = 0.9});
  a.set_grad(ones({3}));
  sgd.step();
  EXPECT_FALSE(sgd.state_dict().contains("state.1.momentum_buffer"));
}

TEST(Step, RaisesTheVersionAndKeepsTheTensor) {
  const Tensor w = random_leaf({3}, 1);
  const char* bytes = w.bytes();
  w.set_grad(ones({3}));
  const uint32_t version = w.version();
  AdamW adam({w});
  adam.step();
  EXPECT_GT(w.version(), version);
  EXPECT_EQ(w.bytes(), bytes);
  // A graph that saved the old values must not run.
  const Tensor x = random_leaf({3}, 2);
  const Tensor y = (w * x).sum();
  adam.step();
  EXPECT_SAYS(y.backward(), "changed in place after it was saved");
}

TEST(Step, EmptyAndScalarParameters) {
  const Tensor empty_one = zeros({0}).set_requires_grad();
  const Tensor odd = zeros({3, 0, 2}).set_requires_grad(), scalar = ones({}).set_requires_grad();
  AdamW adam({empty_one, odd, scalar});
  SGD sgd({empty_one, odd, scalar}, {.momentum = 0.9});
  adam.step(), sgd.step();  // none has a gradient
  for (auto& p : {empty_one, odd, scalar}) p.set_grad(ones(p.sizes()));
  adam.step(), sgd.step();
  EXPECT_EQ(adam.state_dict().at("state.1.exp_avg").sizes(), (Dims{3, 0, 2}));
  EXPECT_EQ(adam.state_dict().at("state.0.step").item<int64_t>(), 1);
  EXPECT_LT(scalar.item(), 1);
  AdamW other({empty_one, odd, scalar});
  other.load_state_dict(adam.state_dict());
  EXPECT_EQ(other.state_dict().at("state.1.step").item<int64_t>(), 1);
  nn::StateDict steps_only;  // as a checkpoint gives it to a rank with no element of the first two
  for (auto& [name, t] : adam.state_dict())
    if (t.numel() > 0) steps_only.set(name, t);
  other.load_state_dict(steps_only);
  EXPECT_EQ(other.state_dict().at("state.0.step").item<int64_t>(), 1);
  other.step();
  EXPECT_EQ(other.state_dict().at("state.1.exp_avg").sizes(), (Dims{3, 0, 2}));
}

// Rounded gradients give what their rounded values in the parameter's dtype give.
TEST(Step, GradientsOfOtherDtypes) {
  for (DType dtype : {kFloat32, kFloat64})
    for (DType half : {kBFloat16, kFloat16, kFloat32, kFloat64}) {
      const Tensor a = random_leaf({1027}, 1, dtype), b = copy_of(a).set_requires_grad();
      AdamW one({a}), two({b});
      SGD three({a}, {.momentum = 0.9}), four({b}, {.momentum = 0.9});
      for (uint64_t t = 0; t < 3; ++t) {
        const Tensor g = random_tensor({1027}, 5 + t, half);
        a.set_grad(g), b.set_grad(to_raw(g, dtype));
        one.step(), two.step(), three.step(), four.step();
      }
      EXPECT_EQ(bits(a), bits(b)) << name_of(dtype) << " " << name_of(half);
      EXPECT_EQ(one.state_dict().at("state.0.exp_avg").dtype(), dtype);
    }
}

// bfloat16 parameters are stepped in float32, with float32 moments, and rounded.
TEST(Step, HalfParametersHaveFloat32Moments) {
  for (DType half : {kBFloat16, kFloat16}) {
    const Tensor a = random_leaf({100}, 1, half);
    const Tensor b = to_raw(a, kFloat32).set_requires_grad();
    AdamW one({a}, {.lr = 0.1}), two({b}, {.lr = 0.1});
    const Tensor g = random_tensor({100}, 2, half);
    a.set_grad(g), b.set_grad(to_raw(g, kFloat32));
    one.step(), two.step();
    EXPECT_EQ(bits(a), bits(to_raw(b, half)));
    EXPECT_EQ(one.state_dict().at("state.0.exp_avg_sq").dtype(), kFloat32);
  }
}

TEST(Step, AnyStrides) {
  const Tensor memory = random_tensor({4, 6}, 1);
  const Tensor a = memory.as_strided_raw({6, 4}, {1, 6}, 0).set_requires_grad();
  const Tensor b = copy_of(a).set_requires_grad();
  AdamW one({a}), two({b});
  for (uint64_t t = 0; t < 3; ++t) {
    const Tensor g = random_tensor({4, 6}, 5 + t);
    a.set_grad(g.as_strided_raw({6, 4}, {1, 6}, 0));
    b.set_grad(contiguous_raw(a.grad()));
    one.step(), two.step();
  }
  EXPECT_EQ(bits(contiguous_raw(a)), bits(b));
}

TEST(Step, NaNAndInfinityStayInTheirElement) {
  const double inf = std::numeric_limits<double>::infinity();
  const Tensor a = random_leaf({40}, 1), b = copy_of(a).set_requires_grad();
  AdamW one({a}), two({b});
  Tensor bad = ones({40});
  bad.data<float>()[3] = float(kNaN), bad.data<float>()[38] = float(inf);
  a.set_grad(bad), b.set_grad(ones({40}));
  one.step(), two.step();
  for (int i = 0; i < 40; ++i) {
    const float x = a.data<float>()[i], y = b.data<float>()[i];
    if (i == 3 || i == 38)
      EXPECT_TRUE(std::isnan(x)) << i;
    else
      EXPECT_EQ(x, y) << i;
  }
}

TEST(Step, GradScaleIsWhatScaledGradientsGive) {
  const Tensor scale = full({}, 0.3);
  auto run = [&](auto make) {
    const Tensor a = random_leaf({2, 517}, 1), b = copy_of(a).set_requires_grad();
    auto one = make(a), two = make(b);
    for (uint64_t t = 0; t < 3; ++t) {
      const Tensor g = random_tensor({2, 517}, 5 + t);
      Tensor scaled = copy_of(g);
      scaled.mul_(scale);
      a.set_grad(g), b.set_grad(scaled);
      one->step({.grad_scale = scale}), two->step();
      EXPECT_EQ(bits(a.grad()), bits(g));  // untouched
    }
    EXPECT_EQ(bits(a), bits(b));
  };
  using P = std::vector<Tensor>;
  run([](const Tensor& p) { return std::make_unique<AdamW>(P{p}); });
  run([](const Tensor& p) {
    return std::make_unique<Adam>(P{p}, AdamOptions{.weight_decay = 0.1, .amsgrad = true});
  });
  run([](const Tensor& p) {
    return std::make_unique<SGD>(P{p}, SgdOptions{.momentum = 0.9, .weight_decay = 0.1});
  });
}

TEST(Step, FoundInfChangesNothing) {
  const Tensor w = random_leaf({8}, 1);
  AdamW adam({w});
  w.set_grad(full({8}, kNaN));
  const std::string before = bits(w);
  adam.step({.found_inf = ones({})});
  EXPECT_EQ(bits(w), before);
  EXPECT_FALSE(adam.state_dict().contains("state.0.step"));
  w.set_grad(ones({8}));
  adam.step({.found_inf = zeros({1})});
  EXPECT_NE(bits(w), before);
  EXPECT_EQ(adam.state_dict().at("state.0.step").item<int64_t>(), 1);
  EXPECT_SAYS(adam.step({.found_inf = ones({2})}), "one element");
  EXPECT_SAYS(adam.step({.grad_scale = ones({0})}), "one element");
}

TEST(Step, WrongGradientsAreRefusedByNameBeforeAnythingChanges) {
  const Tensor a = random_leaf({4}, 1), b = random_leaf({4}, 2);
  SGD sgd({{"layer.a", a}, {"layer.b", b}}, {.lr = 1});
  a.set_grad(ones({4})), b.set_grad(ones({4}));
  b.set_data(random_tensor({2}, 3));  // as a swap of data by hand: its gradient no longer fits
  const std::string before = bits(a);
  EXPECT_SAYS(sgd.step(), "gradient of layer.b has shape [4], the parameter [2]");
  EXPECT_EQ(bits(a), before);
  autograd::make_meta(b).grad = tensor<int64_t>({1, 2});
  EXPECT_SAYS(sgd.step(), "gradient of layer.b is int64");
}

TEST(Step, ExpandedParametersAreRefusedByName) {
  const Tensor p = ones({1}).expand({3}).set_requires_grad();
  const Tensor good = random_leaf({2}, 1), before = copy_of(good);
  p.set_grad(ones({3})), good.set_grad(ones({2}));
  SGD sgd({{"good", good}, {"wide", p}});
  AdamW adam({{"good", good}, {"wide", p}});
  EXPECT_SAYS(sgd.step(), "[SGD] parameter wide is expanded");
  EXPECT_SAYS(adam.step(), "[AdamW] parameter wide is expanded");
  EXPECT_EQ(values(p), (std::vector<double>{1, 1, 1}));
  EXPECT_EQ(bits(good), bits(before));
}

TEST(ZeroGrad, ToNoneOrToZero) {
  const Tensor a = random_leaf({4}, 1), b = random_leaf({4}, 2);
  SGD sgd({a, b});
  a.set_grad(ones({4}));
  sgd.zero_grad(false);
  EXPECT_EQ(values(a.grad()), std::vector<double>(4));
  EXPECT_FALSE(b.grad().defined());
  sgd.zero_grad();
  EXPECT_FALSE(a.grad().defined());
}

TEST(TwoOptimizers, OnOneModelAreIndependent) {
  // F-019's point: the first clears only its own gradients, and steps are counted apart.
  const Tensor w = random_leaf({4}, 1), b = random_leaf({4}, 2);
  Adam first({w}, {.lr = 5e-3});
  AdamW second({b}, {.lr = 1e-2});
  set_random_grads({w, b}, 3);
  first.step(), second.step();
  first.zero_grad();
  EXPECT_FALSE(w.grad().defined());
  EXPECT_TRUE(b.grad().defined());
  first.step(), second.step();
  EXPECT_EQ(first.state_dict().at("state.0.step").item<int64_t>(), 1);
  EXPECT_EQ(second.state_dict().at("state.0.step").item<int64_t>(), 2);
}

// ---- state made at first use
TEST(LazyState, CountsAsOptimizerMemory) {
  const Tensor w = random_leaf({1024}, 1), unused = random_leaf({1024}, 2);
  const auto optimizer_bytes = [] { return memory_stats()[MemoryCategory::kOptimizer]; };
  const int64_t start = optimizer_bytes();
  {
    AdamW adam({w, unused}, {.amsgrad = true});
    EXPECT_EQ(optimizer_bytes(), start);
    w.set_grad(ones({1024}));
    adam.step();
    EXPECT_EQ(optimizer_bytes(), start + 3 * 4096);
    adam.step();
    EXPECT_EQ(optimizer_bytes(), start + 3 * 4096);
    SGD plain({w}), momentum({unused}, {.momentum = 0.9});
    unused.set_grad(ones({1024}));
    plain.step(), momentum.step();
    EXPECT_EQ(optimizer_bytes(), start + 4 * 4096);
    AdamW loaded({w, unused});
    loaded.load_state_dict(AdamW({w, unused}).state_dict());
    EXPECT_EQ(optimizer_bytes(), start + 4 * 4096);
  }
  EXPECT_EQ(optimizer_bytes(), start);
}

TEST(LazyState, DeclaredParametersMayBeFilledLater) {
  nn::Linear linear(8, 4);
  AdamW adam(linear.parameters(), {.lr = 0.1});
  EXPECT_TRUE(linear.parameters()[0].device().is_meta());
  adam.zero_grad();
  adam.step();
  nn::call(linear, random_tensor({2, 8}, 1)).sum().backward();
  const Tensor before = copy_of(linear.weight);
  adam.step();
  EXPECT_NE(bits(linear.weight), bits(before));
  EXPECT_EQ(adam.named_parameters()[0].first, "weight");
  EXPECT_EQ(adam.state_dict().at("state.weight.exp_avg").device(), kCPU);
}

TEST(LazyState, ParametersMayBecomeFlatPiecesBeforeTheFirstStep) {
  const Tensor w = random_leaf({4, 6}, 1), whole = copy_of(w).set_requires_grad();
  AdamW adam({w}), reference({whole});
  // What wrapping does: the same Tensor object becomes a view of this rank's elements.
  const Tensor piece = over_storage(w.storage(), {24}, kFloat32).as_strided_raw({10}, {1}, 7);
  w.set_data(piece);
  for (uint64_t t = 0; t < 3; ++t) {
    const Tensor g = random_tensor({4, 6}, 10 + t);
    whole.set_grad(g);
    w.set_grad(over_storage(g.storage(), {24}, kFloat32).as_strided_raw({10}, {1}, 7));
    adam.step(), reference.step();
  }
  EXPECT_EQ(bits(w), bits(over_storage(whole.storage(), {24}, kFloat32).narrow(0, 7, 10)));
}

TEST(LazyState, WrappingAfterAStepIsRefusedByName) {
  const Tensor w = random_leaf({4, 6}, 1);
  AdamW adam({{"block.weight", w}});
  w.set_grad(ones({4, 6}));
  adam.step();
  adam.zero_grad();
  w.set_data(random_tensor({12}, 2));
  adam.step();  // no gradient, nothing to do
  w.set_grad(ones({12}));
  EXPECT_SAYS(adam.step(),
              "optimizer state of block.weight has shape [4, 6], the parameter now [12]: build the "
              "optimizer after wrapping");
}

TEST(LazyState, ConvertingAfterAStepIsRefusedByName) {
  const Tensor a = random_leaf({4}, 1), w = random_leaf({4}, 2);
  AdamW adam({{"a", a}, {"block.weight", w}});
  set_random_grads({a, w}, 3);
  adam.step();
  adam.zero_grad();
  w.set_data(to_raw(w, kFloat64));
  set_random_grads({a, w}, 5);
  const std::string before = bits(a);
  EXPECT_SAYS(adam.step(),
              "[AdamW] optimizer state of block.weight is float32, and that of a parameter of "
              "float64 is float64");
  EXPECT_EQ(bits(a), before);
  EXPECT_EQ(adam.state_dict().at("state.a.step").item<int64_t>(), 1);
  const Tensor moment = to_raw(adam.state_dict().at("state.block.weight.exp_avg"), kFloat64);
  adam.load_state_dict(adam.state_dict());  // as the error says
  EXPECT_EQ(bits(adam.state_dict().at("state.block.weight.exp_avg")), bits(moment));
  adam.step();
  EXPECT_NE(bits(a), before);
}

class Piece : public nn::ShardInfo {
 public:
  Dims full_shape() const override { return {4, 6}; }
  int64_t begin() const override { return 0; }
  int64_t end() const override { return 12; }
  std::string name() const override { return "block.weight"; }
  const void* group() const override { return this; }
  void sum_exact(const Tensor&) const override {}
  void max(const Tensor&) const override {}
  int ranks() const override { return 1; }
  int rank() const override { return 0; }
  std::pair<int64_t, int64_t> part(int) const override { return {begin(), end()}; }
  void all_to_all(const std::vector<Tensor>&, const std::vector<Tensor>&) const override {}
};

TEST(LazyState, PendingGradientsOfAShardedParameterAreRefused) {
  const Tensor w = random_leaf({12}, 1);
  autograd::make_meta(w).shard = make_ref<Piece>();
  AdamW adam({w});
  autograd::make_meta(w).grad = ones({4, 6});
  EXPECT_SAYS(adam.step(), "gradient of block.weight is not reduced yet");
  EXPECT_SAYS(clip_grad_norm_({w}, 1), "not reduced yet");
  w.set_grad({});
  const Tensor none = zeros({0}).set_requires_grad();  // this rank has nothing of it
  autograd::make_meta(none).shard = make_ref<Piece>();
  AdamW empty({none});
  empty.step();
  autograd::make_meta(none).grad = ones({4, 6});
  EXPECT_SAYS(empty.step(), "not reduced yet");
}

// ---- state dicts
template <class O, class Options>
void expect_resumes(const Options& options) {
  const std::vector<Tensor> p{random_leaf({5, 7}, 1), random_leaf({7}, 2), random_leaf({3}, 3)};
  O optimizer(p, options);
  set_random_grads(p, 10);
  p[2].set_grad({});
  optimizer.step();
  set_random_grads(p, 20);
  optimizer.step();
  std::vector<Tensor> q;
  for (auto& x : p) q.push_back(copy_of(x).set_requires_grad());
  O resumed(q);  // other options
  nn::StateDict saved;
  for (auto& [name, t] : optimizer.state_dict()) saved.set(name, copy_of(t));
  resumed.load_state_dict(saved);
  for (uint64_t t = 0; t < 2; ++t) {
    set_random_grads(p, 30 + t), set_random_grads(q, 30 + t);
    optimizer.step(), resumed.step();
  }
  for (size_t i = 0; i < p.size(); ++i) EXPECT_EQ(bits(p[i]), bits(q[i])) << i;
  const auto a = optimizer.state_dict(), b = resumed.state_dict();
  ASSERT_EQ(a.size(), b.size());
  for (auto& [name, t] : a) EXPECT_EQ(bits(t), bits(b.at(name))) << name;
}
TEST(StateDict, TrainingGoesOnWithTheSameBits) {
  expect_resumes<AdamW>(AdamWOptions{.lr = 0.01, .betas = {0.8, 0.9}, .weight_decay = 0.1});
  expect_resumes<Adam>(AdamOptions{.lr = 0.02, .eps = 1e-4, .weight_decay = 0.1, .amsgrad = true});
  expect_resumes<SGD>(SgdOptions{.lr = 0.1, .momentum = 0.9, .dampening = 0.2, .maximize = true});
  expect_resumes<SGD>(SgdOptions{.lr = 0.1});
}

TEST(StateDict, NamesAndValues) {
  nn::Sequential model(nn::Linear(2, 3), nn::Linear(3, 1));
  AdamW adam(model.parameters(), {.lr = 0.5, .amsgrad = false});
  nn::call(model, ones({4, 2})).sum().backward();
  adam.step();
  const auto d = adam.state_dict();
  EXPECT_EQ(d.at("state.1.weight.exp_avg").sizes(), (Dims{1, 3}));
  EXPECT_EQ(d.at("state.0.bias.step").item<int64_t>(), 1);
  EXPECT_EQ(d.at("state.0.bias.group").item<int64_t>(), 0);
  EXPECT_FALSE(d.contains("state.0.bias.max_exp_avg_sq"));
  EXPECT_EQ(d.at("param_groups.0.lr").item(), 0.5);
  EXPECT_EQ(values(d.at("param_groups.0.betas")), (std::vector<double>{0.9, 0.999}));
  EXPECT_EQ(d.at("param_groups.0.amsgrad").dtype(), kBool);
  EXPECT_FALSE(d.at("state.1.weight.exp_avg").requires_grad());
}

TEST(StateDict, ParametersAreFoundByNameInAnyOrder) {
  const Tensor a = random_leaf({3}, 1), b = random_leaf({3}, 2);
  AdamW one({{"a", a}, {"b", b}});
  set_random_grads({a, b}, 3);
  one.step();
  AdamW two({{"b", b}, {"a", a}});
  two.load_state_dict(one.state_dict());
  EXPECT_EQ(bits(two.state_dict().at("state.a.exp_avg")),
            bits(one.state_dict().at("state.a.exp_avg")));
  EXPECT_NE(bits(two.state_dict().at("state.a.exp_avg")),
            bits(two.state_dict().at("state.b.exp_avg")));
}

TEST(StateDict, GroupsAreFoundByTheirParameters) {
  nn::Linear l(2, 2);
  const Tensor w = l.parameters()[0], b = l.parameters()[1], c = random_leaf({1}, 1);
  l.materialize();
  AdamW one({{.params = {w}, .lr = 0.1}, {.params = {}, .lr = 0.2}, {.params = {b, c}, .lr = 0.3}});
  AdamW two({{.params = {c, b}}, {.params = {w}}, {.params = {}}});
  // c has no name: its place, which differs
  EXPECT_SAYS(two.load_state_dict(one.state_dict()), "unexpected: state.2.group");
  autograd::make_meta(c).name = "c";
  two.load_state_dict(one.state_dict());
  EXPECT_EQ(two.param_groups()[0].lr, 0.3);
  EXPECT_EQ(two.param_groups()[1].lr, 0.1);
  EXPECT_EQ(two.param_groups()[2].lr, 0.2);
  AdamW apart({{.params = {w, b}}, {.params = {c}}, {.params = {}}});
  EXPECT_SAYS(apart.load_state_dict(one.state_dict()), "do not hold the same parameters");
  AdamW merged({{.params = {w}}, {.params = {b}}, {.params = {c}}});
  EXPECT_SAYS(merged.load_state_dict(one.state_dict()), "parameter c is in group 2");
  AdamW fewer({{.params = {w}}, {.params = {b, c}}});
  EXPECT_SAYS(fewer.load_state_dict(one.state_dict()), "unexpected: param_groups.1.lr");
}

TEST(StateDict, NeverSteppedAndWithoutTensors) {
  const Tensor w = random_leaf({3}, 1);
  SGD sgd({{.params = {w}}, {.params = {}, .lr = 0.7}}, {.lr = 0.1, .momentum = 0.5});
  SGD other({{.params = {w}}, {.params = {}}});
  other.load_state_dict(sgd.state_dict());
  EXPECT_EQ(other.param_groups()[0].momentum, 0.5);
  EXPECT_EQ(other.param_groups()[1].lr, 0.7);
  EXPECT_FALSE(other.state_dict().contains("state.0.step"));
  // Loading the state of one that never stepped forgets what there was.
  w.set_grad(ones({3}));
  other.step();
  EXPECT_TRUE(other.state_dict().contains("state.0.momentum_buffer"));
  other.load_state_dict(sgd.state_dict());
  EXPECT_FALSE(other.state_dict().contains("state.0.momentum_buffer"));
}

TEST(StateDict, AllFaultsInOneErrorAndNothingChanges) {
  const Tensor a = random_leaf({3}, 1), b = random_leaf({2, 2}, 2), c = random_leaf({2}, 3);
  AdamW adam({{"a", a}, {"b", b}, {"c", c}}, {.lr = 0.5});
  set_random_grads({a, b, c}, 3);
  adam.step();
  nn::StateDict broken;
  for (auto& [name, t] : adam.state_dict()) {
    if (name == "state.a.exp_avg_sq" || name == "state.c.step" || name == "param_groups.0.eps")
      continue;
    broken.set(name, name == "state.b.exp_avg"     ? ones({4})
                     : name == "param_groups.0.lr" ? full({}, 0.125, kFloat64)
                                                   : t);
  }
  broken.set("state.d.group", full({}, 0, kInt64));
  broken.set("param_groups.0.rho", full({}, 0, kFloat64));
  const std::string text = message_of([&] { adam.load_state_dict(broken); });
  for (const char* part :
       {"missing: param_groups.0.eps state.a.exp_avg_sq state.c.step",
        "unexpected: state.d.group param_groups.0.rho", "state.b.exp_avg: shape [4]", "[2, 2]"})
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n in: " << text;
  EXPECT_EQ(adam.lr(0), 0.5);
  EXPECT_EQ(adam.state_dict().at("state.a.step").item<int64_t>(), 1);
  // A value out of range is refused likewise.
  nn::StateDict bad = adam.state_dict();
  bad.set("param_groups.0.lr", full({}, -1, kFloat64));
  EXPECT_SAYS(adam.load_state_dict(bad), "lr must be in");
  bad = adam.state_dict();
  bad.set("state.a.step", full({}, -1, kInt64));
  EXPECT_SAYS(adam.load_state_dict(bad), "state.a.step is -1");
  for (double n : {kNaN, 1.5, 1e300, -0.5}) {
    bad.set("state.a.step", full({}, n, kFloat64));
    EXPECT_SAYS(adam.load_state_dict(bad), "state.a.step is ");
  }
  EXPECT_EQ(adam.lr(0), 0.5);
  // Another optimizer's state.
  SGD sgd({{"a", a}, {"b", b}, {"c", c}});
  EXPECT_SAYS(sgd.load_state_dict(adam.state_dict()), "unexpected:");
}

TEST(StateDict, ConvertsDtypesAndOwnsItsCopies) {
  const Tensor a = random_leaf({3}, 1);
  AdamW adam({a});
  a.set_grad(ones({3}));
  adam.step();
  nn::StateDict d;
  for (auto& [name, t] : adam.state_dict())
    d.set(name, name == "state.0.exp_avg" ? to_raw(t, kFloat64) : t);
  AdamW other({a});
  other.load_state_dict(d);
  EXPECT_EQ(other.state_dict().at("state.0.exp_avg").dtype(), kFloat32);
  const std::string before = bits(other.state_dict().at("state.0.exp_avg_sq"));
  adam.step();
  EXPECT_EQ(bits(other.state_dict().at("state.0.exp_avg_sq")), before);
}

TEST(StateDict, EqualNamesOfTwoModelsAreToldApart) {
  nn::Linear generator(2, 2), critic(2, 2);
  generator.materialize(), critic.materialize();
  std::vector<Tensor> both = generator.parameters();
  for (auto& p : critic.parameters()) both.push_back(p);
  AdamW adam(both);
  set_random_grads(both, 1);
  adam.step();
  EXPECT_EQ(adam.named_parameters()[2].first, "weight#2");
  AdamW other(both);
  other.load_state_dict(adam.state_dict());
  EXPECT_EQ(bits(other.state_dict().at("state.weight#2.exp_avg")),
            bits(adam.state_dict().at("state.weight#2.exp_avg")));
}

}  // namespace
}  // namespace sherd::optim
