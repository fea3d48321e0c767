#include "distributed/memory_forecast.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <random>

namespace sherd::dist {
namespace {

using Kind = Step::Kind;

int64_t rounded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

UnitLayout unit(int64_t elements, int shards, bool trained = true) {
  return UnitLayout(std::vector{FlatParameter{{"weight"}, {elements}, kFloat32, trained}}, shards);
}
std::vector<UnitLayout> equal_units(int n, int64_t elements, int64_t root, int shards) {
  std::vector<UnitLayout> units(n, unit(elements, shards));
  units.push_back(unit(root, shards));
  return units;
}

// A rank's buffers through one step of training, as the runtime allocates and frees them: the
// schedule's steps, and one queue of collectives of which a part (chance) has run before it must.
class Simulation {
 public:
  Simulation(const std::vector<UnitLayout>& units, const ForecastOptions& options, double chance)
      : options_(options),
        units_(units),
        schedule_(scheduled(), options.schedule),
        chance_(chance) {
    const MemoryForecast f = forecast_memory(units, options);
    now_ = f.after_zero_grad + (options.adds_to_gradients ? f.gradients : 0);
  }
  int64_t forward() {
    peak_ = now_;
    const int root = schedule_.size() - 1;
    carry_out(schedule_.forward_pre(root, ForwardKind::kTraining));
    for (int u = 0; u < root; ++u) {
      carry_out(schedule_.forward_pre(u, ForwardKind::kTraining));
      carry_out(schedule_.forward_post(u, ForwardKind::kTraining));
    }
    carry_out(schedule_.forward_post(root, ForwardKind::kTraining));
    return peak_;
  }
  int64_t backward() {
    peak_ = now_;
    const int root = schedule_.size() - 1;
    std::vector<GatherSchedule::PlanItem> plan;
    for (int u = root; u >= 0; --u) plan.push_back({u});
    schedule_.begin_backward(plan);
    carry_out(schedule_.enter(root));
    take(grad(root));
    for (int u = root - 1; u >= 0; --u) {
      carry_out(schedule_.enter(u));
      take(grad(u));
      if (grad(u)) carry_out(schedule_.gradients_complete(u));
      carry_out(schedule_.leave(u));
    }
    if (grad(root)) carry_out(schedule_.gradients_complete(root));
    carry_out(schedule_.leave(root));
    carry_out(schedule_.end_backward());
    return peak_;
  }
  int64_t now() const { return now_; }
  void zero_grad() {
    if (!options_.adds_to_gradients) now_ -= forecast_memory(units_, options_).gradients;
  }

 private:
  std::vector<ScheduledUnit> scheduled() const {
    std::vector<ScheduledUnit> s;
    for (const UnitLayout& u : units_) s.push_back(scheduled_unit(u, options_));
    s.back().reshard_after_forward = false;
    return s;
  }
  DType param() const { return options_.param_dtype.value_or(kFloat32); }
  DType reduce() const { return options_.reduce_dtype.value_or(param()); }
  DType sharded() const { return options_.keep_low_precision_grads ? reduce() : kFloat32; }
  // These tests have units of one group.
  const FlatLayout& group(int u) const { return units_[u].groups()[0]; }
  bool whole(int u) const { return group(u).shards() == 1; }
  int64_t full(int u) const { return rounded(group(u).padded() * size_of(param())); }
  int64_t grad(int u) const {
    return group(u).requires_grad() ? rounded(group(u).padded() * size_of(reduce())) : 0;
  }
  int64_t piece(int u, DType dtype) const { return rounded(group(u).piece() * size_of(dtype)); }

  void take(int64_t bytes) { peak_ = std::max(peak_, now_ += bytes); }
  void run_one() {
    const Step s = queue_.front();
    queue_.pop_front();
    if (s.kind == Kind::kGather) {
      take(full(s.unit));
      return;
    }
    const bool becomes_grad = reduce() == sharded() && !options_.adds_to_gradients;
    if (whole(s.unit) && becomes_grad) return;  // the gradient is its own sharded form
    if (!whole(s.unit)) take(piece(s.unit, reduce()));
    if (!whole(s.unit)) now_ -= grad(s.unit);
    if (!becomes_grad) {
      if (!options_.adds_to_gradients) take(piece(s.unit, sharded()));
      now_ -= whole(s.unit) ? grad(s.unit) : piece(s.unit, reduce());
    }
  }
  void run_until(Step s) {
    while (std::ranges::find(queue_, s) != queue_.end()) run_one();
  }
  void carry_out(const GatherSchedule::Steps& steps) {
    for (Step s : steps) {
      if (s.kind == Kind::kGather || s.kind == Kind::kReduce) queue_.push_back(s);
      if (s.kind == Kind::kShow || s.kind == Kind::kRelease) run_until({Kind::kGather, s.unit});
      if (s.kind == Kind::kRelease) now_ -= full(s.unit);
      if (s.kind == Kind::kRetire) run_until({Kind::kReduce, s.unit});
      while (!queue_.empty() && std::uniform_real_distribution<>()(random_) < chance_) run_one();
    }
  }

  ForecastOptions options_;
  std::vector<UnitLayout> units_;
  GatherSchedule schedule_;
  double chance_;
  std::mt19937 random_{1};
  std::deque<Step> queue_;
  int64_t now_ = 0, peak_ = 0;
};

TEST(MemoryForecast, BetweenThePeakAndFivePercentAboveIt) {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    const int n = 1 + random() % 8, shards = std::array{1, 2, 3, 4, 8}[random() % 5];
    std::vector<UnitLayout> units;
    const int64_t usual = 2000 + random() % 20000;
    for (int i = 0; i <= n; ++i) {
      const int64_t size = random() % 3 ? usual : 100 + random() % 60000;
      units.push_back(unit(size, shards, i == n || random() % 4 != 0));
    }
    ForecastOptions o;
    const std::optional<DType> dtypes[] = {std::nullopt, kFloat32, kBFloat16};
    o.param_dtype = dtypes[random() % 3];
    o.reduce_dtype = dtypes[random() % 3];
    o.keep_low_precision_grads = random() % 4 == 0;
    o.adds_to_gradients = random() % 4 == 0;
    o.reshard_after_forward = shards > 1 && random() % 3;
    o.schedule.backward_prefetch = BackwardPrefetch(random() % 3);
    o.schedule.forward_prefetch = random() % 3;

    const MemoryForecast f = forecast_memory(units, o);
    int64_t forward = 0, backward = 0;
    for (double chance : {0.0, 0.2, 0.5, 0.8, 1.0}) {
      Simulation step(units, o, chance);
      for (int i = 0; i < 2; ++i) {
        forward = std::max(forward, step.forward());
        backward = std::max(backward, step.backward());
        EXPECT_EQ(step.now(), f.after_step);
        step.zero_grad();
      }
    }
    EXPECT_LE(forward, f.forward);
    EXPECT_GE(forward, 0.95 * f.forward);
    EXPECT_LE(backward, f.backward);
    EXPECT_GE(backward, 0.95 * f.backward);
    if (HasFailure())
      FAIL() << "round " << round << ": " << n << " units, " << shards << " shards, full shard "
             << o.reshard_after_forward << ", prefetch " << int(o.schedule.backward_prefetch)
             << ", adds " << o.adds_to_gradients;
  }
}

TEST(MemoryForecast, WindowsOfEqualUnits) {
  // In float32 units of 1,024,000 elements over 4 ranks: 3, 2.5 and 1.5 of them in backward.
  const int64_t u = 1'024'000;
  const auto units = equal_units(4, u, u, 4);
  struct Case {
    std::optional<DType> param, reduce;
    double window;
  };
  for (auto [param, reduce, window] : {Case{std::nullopt, std::nullopt, 3},
                                       {kBFloat16, kFloat32, 2.5},
                                       {kBFloat16, kBFloat16, 1.5}}) {
    ForecastOptions o;
    o.param_dtype = param;
    o.reduce_dtype = reduce;
    const MemoryForecast f = forecast_memory(units, o);
    const double p = param ? 2 : 4, d = reduce.value_or(kFloat32) == kBFloat16 ? 2 : 4;
    EXPECT_EQ(f.after_zero_grad, 5 * u / 4 * 12);
    EXPECT_EQ(f.after_step, 5 * u / 4 * 16) << "16 bytes x parameters / ranks";
    // The peak is in the last units: most sharded gradients are there, but the root's is not.
    const double rest = double(f.backward - f.after_zero_grad) - (p + d) * u - window * 4 * u;
    EXPECT_GE(rest, 0);
    EXPECT_LE(rest, 4.5 * u / 4 * 4);
    EXPECT_EQ(f.forward, f.after_zero_grad + p * u + 2 * p * u);
    EXPECT_EQ(f.summon_unit, 4 * u);
    EXPECT_EQ(f.summon_model, 5 * 4 * u);
    EXPECT_EQ(f.pending, 5 * d * u);
  }
}

TEST(MemoryForecast, TheWindowStaysWithinTheBound) {
  std::mt19937 random(2);
  for (int round = 0; round < 200; ++round) {
    std::vector<UnitLayout> units;
    std::vector<int64_t> bytes;
    for (int i = 0; i < 6; ++i) {
      bytes.push_back(64 * (1 + random() % 400));
      units.push_back(unit(bytes.back() / 4, 2));
    }
    units.push_back(unit(16, 2));
    const MemoryForecast f = forecast_memory(units, {});
    std::ranges::sort(bytes);
    const int64_t bound = std::max<int64_t>(2.2 * bytes[5], 3 * bytes[3]);
    EXPECT_LE(f.backward - f.after_step, bound + 2 * 64);
  }
}

TEST(MemoryForecast, BoundsOfASmallTransformer) {
  // L-002: 3 blocks, dim 768, vocabulary 32, untied, 2 ranks, float32.
  const int64_t d = 768;
  const int64_t block = 12 * d * d + 13 * d, outside = 2 * 32 * d + 16 * d + 2 * d;
  const MemoryForecast f = forecast_memory(equal_units(3, block, outside, 2), {});
  const double u = 4.0 * block, e = 4.0 * outside, p = 3 * u + e, s = p / 2, mb = 1 << 20;
  const double moments = 2 * s;
  EXPECT_LE(f.forward - moments, s + 3 * u + e + 16 * mb);
  EXPECT_LE(f.backward - moments, 2 * s + 3 * u + e + 16 * mb);
  EXPECT_LE(f.after_step, 4 * s + 16 * mb);
  EXPECT_LE(f.after_zero_grad, 3 * s + 32 * mb);
  ForecastOptions kept;
  kept.reshard_after_forward = false;
  const MemoryForecast k = forecast_memory(equal_units(3, block, outside, 2), kept);
  EXPECT_LE(k.forward - moments, s + p + u + 16 * mb);
  EXPECT_LE(k.backward - moments, s + p + 1.5 * u + 16 * mb);
}

TEST(MemoryForecast, OneRankHoldsTheModelOnce) {
  ForecastOptions o;
  o.reshard_after_forward = false;
  const int64_t u = 64'000;
  const MemoryForecast f = forecast_memory(equal_units(3, u, u, 1), o);
  EXPECT_EQ(f.after_step, 4 * u * 16);
  EXPECT_EQ(f.forward, f.after_zero_grad);
  EXPECT_EQ(f.backward, f.after_step);
  o.param_dtype = kBFloat16;  // a copy, kept for the whole step
  o.reduce_dtype = kFloat32;
  EXPECT_EQ(forecast_memory(equal_units(3, u, u, 1), o).forward, f.after_zero_grad + 4 * u * 2);
}

TEST(MemoryForecast, FrozenParametersHaveNoGradientsOrMoments) {
  std::vector<UnitLayout> units = {unit(6400, 2, false), unit(6400, 2)};
  const MemoryForecast f = forecast_memory(units, {});
  EXPECT_EQ(f.parameters, 2 * 3200 * 4);
  EXPECT_EQ(f.optimizer, 3200 * 8);
  EXPECT_EQ(f.gradients, 3200 * 4);
}

TEST(MemoryForecast, MixedGroupsAndNoParameters) {
  std::vector<UnitLayout> units = {
      UnitLayout(std::vector{FlatParameter{{"a"}, {100}, kFloat32, true},
                             FlatParameter{{"b"}, {100}, kFloat64, true}},
                 2),
      UnitLayout({}, 2)};
  const MemoryForecast f = forecast_memory(units, {});
  EXPECT_EQ(f.parameters, rounded(50 * 4) + rounded(50 * 8));
  EXPECT_EQ(f.summon_unit, rounded(100 * 4) + rounded(100 * 8));
  EXPECT_THROW(forecast_memory({}, {}), Error);
}

}  // namespace
}  // namespace sherd::dist
