// Schedulers beyond PyTorch's values (goldens_test): groups, resuming, warm-up with cosine, errors.
#include "optim/lr_scheduler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

#include "optim/optim.h"
#include "tests/optim/support.h"

namespace sherd::optim {
namespace {

using test::copy_of;

Tensor leaf() { return ones({2}).set_requires_grad(); }

std::vector<double> lrs_of(LRScheduler& scheduler, int n) {
  std::vector<double> r;
  for (int t = 0; t < n; ++t) {
    if (t > 0) scheduler.step();
    r.push_back(scheduler.optimizer().lr(0));
  }
  return r;
}

TEST(WarmupCosine, RisesFallsAndStays) {
  AdamW optimizer({leaf()}, {.lr = 0.8});
  WarmupCosineLR scheduler(optimizer, {.warmup_steps = 3, .total_steps = 7, .min_lr = 0.1});
  const auto lrs = lrs_of(scheduler, 10);
  const double expected[] = {0.2,
                             0.4,
                             0.6,
                             0.8,
                             0.1 + 0.35 * (1 + std::cos(std::numbers::pi / 4)),
                             0.45,
                             0.1 + 0.35 * (1 + std::cos(3 * std::numbers::pi / 4)),
                             0.1,
                             0.1,
                             0.1};
  for (size_t t = 0; t < 10; ++t) EXPECT_NEAR(lrs[t], expected[t], 1e-15) << t;
}

TEST(WarmupCosine, WithoutDecayOrWarmup) {
  AdamW optimizer({leaf()}, {.lr = 0.8});
  {
    WarmupCosineLR constant(optimizer, {.decay = false});
    EXPECT_EQ(lrs_of(constant, 5), std::vector<double>(5, 0.8));
  }
  {
    WarmupCosineLR warm(optimizer, {.warmup_steps = 1, .decay = false});
    EXPECT_EQ(lrs_of(warm, 4), (std::vector<double>{0.4, 0.8, 0.8, 0.8}));
  }
  {
    WarmupCosineLR cosine(optimizer, {.total_steps = 4});
    const auto lrs = lrs_of(cosine, 5);
    EXPECT_EQ(lrs[0], 0.8);
    EXPECT_NEAR(lrs[2], 0.4, 1e-15);
    EXPECT_EQ(lrs[4], 0);
  }
  {  // a run shorter than its warm-up
    WarmupCosineLR shorter(optimizer, {.warmup_steps = 9, .total_steps = 5});
    EXPECT_NEAR(lrs_of(shorter, 5)[4], 0.4, 1e-15);
  }
}

TEST(Scheduler, ScalesEachGroupsOwnLr) {
  const Tensor a = leaf(), b = leaf();
  SGD optimizer({{.params = {a}}, {.params = {b}, .lr = 0.01}}, {.lr = 1});
  StepLR scheduler(optimizer, {.step_size = 2, .gamma = 0.5});
  for (int t = 0; t < 4; ++t) scheduler.step();
  EXPECT_EQ(scheduler.get_last_lr(), (std::vector<double>{0.25, 0.0025}));
  // A group that joins later is scaled from its own lr on.
  optimizer.add_param_group({.params = {leaf()}, .lr = 8});
  scheduler.step();
  EXPECT_EQ(scheduler.get_last_lr(), (std::vector<double>{0.25, 0.0025, 2}));
  LambdaLR by_group(optimizer, {[](int64_t) { return 1.0; }, [](int64_t t) { return double(t); },
                                [](int64_t) { return 0.5; }});
  EXPECT_EQ(by_group.get_last_lr(), (std::vector<double>{1, 0, 4}));
}

TEST(Scheduler, StepToAnEpoch) {
  SGD optimizer({leaf()}, {.lr = 1});
  ExponentialLR scheduler(optimizer, {.gamma = 0.5});
  scheduler.step(10);
  EXPECT_EQ(optimizer.lr(0), std::pow(0.5, 10));
  EXPECT_EQ(scheduler.last_epoch(), 10);
  scheduler.step();
  EXPECT_EQ(optimizer.lr(0), std::pow(0.5, 11));
  EXPECT_SAYS(scheduler.step(-1), "cannot be negative");
}

TEST(Scheduler, ResumesWithTheSameBits) {
  auto make = [](Optimizer& o) {
    return SequentialLR(o, {LinearLR(o, {.total_iters = 3}), CosineAnnealingLR(o, {.T_max = 9})},
                        {3});
  };
  AdamW optimizer({leaf()}, {.lr = 0.3});
  auto scheduler = make(optimizer);
  for (int t = 0; t < 4; ++t) scheduler.step();
  const auto saved = scheduler.state_dict(), state = optimizer.state_dict();
  std::vector<double> expected, got;
  for (int t = 0; t < 4; ++t) scheduler.step(), expected.push_back(optimizer.lr(0));

  AdamW other({leaf()}, {.lr = 0.7});
  auto resumed = make(other);
  other.load_state_dict(state);
  resumed.load_state_dict(saved);
  EXPECT_EQ(other.lr(0), state.at("param_groups.0.lr").item());
  for (int t = 0; t < 4; ++t) resumed.step(), got.push_back(other.lr(0));
  EXPECT_EQ(got, expected);

  // The scheduler's state alone is enough for the lr.
  AdamW third({leaf()}, {.lr = 0.9});
  auto alone = make(third);
  alone.load_state_dict(saved);
  alone.step();
  EXPECT_EQ(third.lr(0), expected[0]);

  // A scheduler built over a loaded optimizer scales the lr that the first one did.
  AdamW fourth({leaf()}, {.lr = 0.9});
  fourth.load_state_dict(state);
  auto late = make(fourth);
  late.step(5);
  EXPECT_EQ(fourth.lr(0), expected[0]);
}

TEST(Scheduler, RefusesABrokenState) {
  SGD optimizer({leaf()}, {.lr = 1});
  StepLR scheduler(optimizer, {.step_size = 2});
  nn::StateDict bad;
  bad.set("base_lrs", ones({2}));
  bad.set("gamma", ones({}));
  EXPECT_SAYS(scheduler.load_state_dict(bad), "missing: last_epoch");
  EXPECT_SAYS(scheduler.load_state_dict(bad), "unexpected: gamma");
  EXPECT_SAYS(scheduler.load_state_dict(bad), "base_lrs: shape [2]");
  nn::StateDict negative = scheduler.state_dict();
  negative.set("last_epoch", full({}, -3, kInt64));
  EXPECT_SAYS(scheduler.load_state_dict(negative), "last_epoch is negative");
}

TEST(Scheduler, TwoOnOneOptimizerAreRefused) {
  SGD optimizer({leaf()}, {.lr = 1});
  auto first = std::make_unique<ExponentialLR>(optimizer, ExponentialOptions{.gamma = 0.9});
  StepLR second(optimizer, {.step_size = 1});
  first->step();
  EXPECT_SAYS(second.step(), "another scheduler steps this optimizer");
  first.reset();
  second.step();
  EXPECT_EQ(optimizer.lr(0), 0.1);
}

TEST(Scheduler, OneCycleMovesAdamsFirstBeta) {
  AdamW optimizer({leaf()}, {.lr = 1, .betas = {0.9, 0.99}});
  OneCycleLR scheduler(optimizer, {.max_lr = {0.5}, .epochs = 5, .steps_per_epoch = 2});
  EXPECT_EQ(optimizer.param_groups()[0].betas[0], 0.95);
  EXPECT_EQ(optimizer.param_groups()[0].betas[1], 0.99);
  EXPECT_NEAR(optimizer.lr(0), 0.02, 1e-15);
  for (int t = 0; t < 2; ++t) scheduler.step();
  EXPECT_NEAR(optimizer.lr(0), 0.5, 1e-15);
  EXPECT_NEAR(optimizer.param_groups()[0].betas[0], 0.85, 1e-15);
  for (int t = 2; t < 10; ++t) scheduler.step();
  const double last = optimizer.lr(0);
  EXPECT_SAYS(scheduler.step(), "stepped 11 times, but total_steps is 10");
  EXPECT_EQ(optimizer.lr(0), last);
  EXPECT_EQ(scheduler.last_epoch(), 10);
}

TEST(Scheduler, OneCycleInASequence) {
  SGD optimizer({leaf()}, {.lr = 1, .momentum = 0.5});
  SequentialLR scheduler(
      optimizer,
      {ConstantLR(optimizer, {.factor = 0.5, .total_iters = 10}),
       OneCycleLR(optimizer, {.max_lr = {2}, .total_steps = 4, .pct_start = 0.5})},
      {2});
  EXPECT_EQ(optimizer.lr(0), 0.5);  // of the lr before OneCycleLR was built, as in PyTorch
  scheduler.step(), scheduler.step();
  EXPECT_NEAR(optimizer.lr(0), 0.08, 1e-15);
  EXPECT_EQ(optimizer.param_groups()[0].momentum, 0.95);
}

TEST(Scheduler, RefusesBadOptions) {
  SGD o({leaf()}, {.lr = 1}), other({leaf()});
  EXPECT_SAYS(StepLR(o, {}), "[StepLR] step_size");
  EXPECT_SAYS(ExponentialLR(o, {}), "gamma");
  EXPECT_SAYS(ConstantLR(o, {.factor = 2}), "factor");
  EXPECT_SAYS(LinearLR(o, {.start_factor = 0}), "start_factor");
  EXPECT_SAYS(LinearLR(o, {.end_factor = -1}), "end_factor");
  EXPECT_SAYS(LinearLR(o, {.total_iters = 0}), "total_iters");
  EXPECT_SAYS(CosineAnnealingLR(o, {}), "T_max");
  EXPECT_SAYS(CosineAnnealingWarmRestarts(o, {}), "T_0");
  EXPECT_SAYS(CosineAnnealingWarmRestarts(o, {.T_0 = 2, .T_mult = 0}), "T_mult");
  EXPECT_SAYS(PolynomialLR(o, {.total_iters = 0}), "total_iters");
  EXPECT_SAYS(OneCycleLR(o, {.max_lr = {1}}), "total_steps");
  EXPECT_SAYS(OneCycleLR(o, {.total_steps = 5}), "max_lr");
  EXPECT_SAYS(OneCycleLR(o, {.max_lr = {1}, .total_steps = 5, .anneal_strategy = "sin"}), "anneal");
  EXPECT_SAYS(WarmupCosineLR(o, {.warmup_steps = 3}), "total_steps");
  EXPECT_SAYS(LambdaLR(o, std::vector<LambdaLR::Lambda>{}), "function");
  EXPECT_SAYS(LambdaLR(o, [](int64_t) { return -1.0; }), "lr must be in");
  EXPECT_SAYS(SequentialLR(o, {StepLR(o, {.step_size = 1})}, {3}), "one milestone less");
  EXPECT_SAYS(SequentialLR(o, {StepLR(o, {.step_size = 1}), StepLR(other, {.step_size = 1})}, {3}),
              "of this optimizer");
}

}  // namespace
}  // namespace sherd::optim
