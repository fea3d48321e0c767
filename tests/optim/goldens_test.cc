// Optimizers, schedulers and clipping against PyTorch's answers (goldens/README.md).
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "optim/optim.h"
#include "tests/optim/support.h"

namespace sherd::optim {
namespace {

using nlohmann::json;
using test::values;

const json& goldens() {
  static const json data = [] {
    std::ifstream in("tests/optim/goldens/optim.json");
    return json::parse(in);
  }();
  return data;
}

void flatten(const json& j, std::vector<double>& out) {
  if (j.is_array())
    for (auto& e : j) flatten(e, out);
  else
    out.push_back(j.get<double>());
}
Tensor tensor_of(const json& j, DType dtype) {
  std::vector<double> v;
  flatten(j, v);
  Dims sizes;
  for (const json* e = &j; e->is_array(); e = &(*e)[0]) sizes.push(int64_t(e->size()));
  return to_raw(tensor<double>(std::span<const double>(v), sizes), dtype);
}
void expect_close(const Tensor& t, const json& expected, double relative, double absolute,
                  const std::string& what) {
  const auto a = values(t), b = values(tensor_of(expected, kFloat64));
  ASSERT_EQ(a.size(), b.size()) << what;
  for (size_t i = 0; i < a.size(); ++i)
    EXPECT_NEAR(a[i], b[i], absolute + relative * std::abs(b[i])) << what << " element " << i;
}

// Sets the fields of an Options or Group struct by PyTorch's names.
template <class Fields, class S>
void set_fields(S& s, const json& given) {
  size_t used = 0;
  Fields::visit(
      [&](const char* name, auto& field) {
        if (!given.contains(name)) return;
        ++used;
        if constexpr (requires { field.has_value(); })
          field = given[name].get<typename std::decay_t<decltype(field)>::value_type>();
        else
          field = given[name].get<std::decay_t<decltype(field)>>();
      },
      s);
  ASSERT_EQ(used, given.size()) << given;
}

template <class O, class Group, class Fields, class Options>
void replay(const json& run, DType dtype, const Options& options, double relative,
            const std::string& what) {
  std::vector<Tensor> params;
  for (auto& p : run["params"]) params.push_back(tensor_of(p, dtype).set_requires_grad());
  std::vector<Group> groups;
  for (size_t g = 0; g < run["groups"].size(); ++g) {
    Group group;
    for (size_t i : run["groups"][g]) group.params.push_back(params[i]);
    set_fields<Fields>(group, run["group_hyper"][g]);
    groups.push_back(group);
  }
  O optimizer(groups, options);
  for (size_t t = 0; t < run["grads"].size(); ++t) {
    for (size_t i = 0; i < params.size(); ++i) {
      const json& g = run["grads"][t][i];
      params[i].set_grad(g.is_null() ? Tensor() : tensor_of(g, dtype));
    }
    optimizer.step();
    for (size_t i = 0; i < params.size(); ++i)
      expect_close(params[i], run["after"][t][i], relative, relative,
                   concat(what, run["hyper"].dump(), " step ", t, " parameter ", i));
  }
}
template <class O, class Options, class Group, class Fields>
void replay(const json& run, DType dtype) {
  Options options;
  set_fields<Fields>(options, run["hyper"]);
  // float32: a few roundings a step, of values near 1, five steps.
  replay<O, Group, Fields>(run, dtype, options, dtype == kFloat64 ? 1e-12 : 2e-6, run["name"]);
}

void replay_all(DType dtype) {
  int runs = 0;
  for (auto& run : goldens()["optimizers"]) {
    const auto name = run["name"].get<std::string>();
    if (name == "SGD")
      replay<SGD, SgdOptions, SgdGroup, SgdFields>(run, dtype);
    else if (name == "Adam")
      replay<Adam, AdamOptions, AdamGroup, AdamFields>(run, dtype);
    else if (name == "AdamW")
      replay<AdamW, AdamWOptions, AdamGroup, AdamFields>(run, dtype);
    else
      ADD_FAILURE() << name;
    ++runs;
  }
  EXPECT_EQ(runs, 26);
}
TEST(OptimizerGoldens, Float64) { replay_all(kFloat64); }
TEST(OptimizerGoldens, Float32) { replay_all(kFloat32); }

TEST(OptimizerGoldens, Muon) {
  int runs = 0;
  for (auto& run : goldens()["muon"]) {
    MuonOptions options;
    json fields = run["hyper"];
    options.ns_steps = fields.value("ns_steps", options.ns_steps);
    const std::string adjust = fields.value("adjust_lr_fn", "original");
    options.adjust_lr_fn = adjust == "match_rms_adamw"      ? AdjustLr::kMatchRmsAdamW
                           : adjust == "spectral_unclamped" ? AdjustLr::kSpectralUnclamped
                                                            : AdjustLr::kOriginal;
    fields.erase("ns_steps"), fields.erase("adjust_lr_fn");
    set_fields<MuonFields>(options, fields);
    // Where a sum before a rounding to bfloat16 was added up in another order, an element of the
    // update (at most about 1, times an lr of 0.02) may be off by some 2^-8.
    replay<Muon, MuonGroup, MuonFields>(run, kFloat64, options, 4e-4, "Muon");
    replay<Muon, MuonGroup, MuonFields>(run, kFloat32, options, 4e-4, "Muon");
    ++runs;
  }
  EXPECT_EQ(runs, 4);
}

// ---- schedulers
std::unique_ptr<LRScheduler> make_scheduler(const std::string& name, const json& a, SGD& o) {
  auto number = [&](const char* key, auto otherwise) { return a.value(key, otherwise); };
  if (name == "StepLR")
    return std::make_unique<StepLR>(
        o, StepOptions{number("step_size", int64_t(0)), number("gamma", 0.1)});
  if (name == "MultiStepLR")
    return std::make_unique<MultiStepLR>(
        o, MultiStepOptions{a["milestones"].get<std::vector<int64_t>>(), number("gamma", 0.1)});
  if (name == "ExponentialLR")
    return std::make_unique<ExponentialLR>(o, ExponentialOptions{a["gamma"].get<double>()});
  if (name == "ConstantLR")
    return std::make_unique<ConstantLR>(
        o, ConstantOptions{number("factor", 1.0 / 3), number("total_iters", int64_t(5))});
  if (name == "LinearLR")
    return std::make_unique<LinearLR>(
        o, LinearOptions{number("start_factor", 1.0 / 3), number("end_factor", 1.0),
                         number("total_iters", int64_t(5))});
  if (name == "CosineAnnealingLR")
    return std::make_unique<CosineAnnealingLR>(
        o, CosineAnnealingOptions{number("T_max", int64_t(0)), number("eta_min", 0.0)});
  if (name == "CosineAnnealingWarmRestarts")
    return std::make_unique<CosineAnnealingWarmRestarts>(
        o, CosineAnnealingWarmRestartsOptions{
               number("T_0", int64_t(0)), number("T_mult", int64_t(1)), number("eta_min", 0.0)});
  if (name == "PolynomialLR")
    return std::make_unique<PolynomialLR>(
        o, PolynomialOptions{number("total_iters", int64_t(5)), number("power", 1.0)});
  if (name == "OneCycleLR") {
    OneCycleOptions c{.max_lr = {a["max_lr"].get<double>()}};
    c.total_steps = number("total_steps", int64_t(0));
    c.pct_start = number("pct_start", c.pct_start);
    c.anneal_strategy = number("anneal_strategy", c.anneal_strategy);
    c.three_phase = number("three_phase", false);
    c.cycle_momentum = number("cycle_momentum", true);
    return std::make_unique<OneCycleLR>(o, c);
  }
  if (name == "LambdaLR")
    return std::make_unique<LambdaLR>(o, [](int64_t t) { return 1.0 / double(1 + t); });
  if (name == "SequentialLR")
    return std::make_unique<SequentialLR>(
        o,
        std::vector<AnyScheduler>{
            LinearLR(o, {.start_factor = 0.1, .end_factor = 1, .total_iters = 4}),
            CosineAnnealingLR(o, {.T_max = 8, .eta_min = 0.05})},
        std::vector<int64_t>{4});
  return nullptr;
}

TEST(SchedulerGoldens, LearningRatesAndMomenta) {
  int runs = 0;
  for (auto& run : goldens()["schedulers"]) {
    const auto name = run["name"].get<std::string>();
    SGD optimizer({ones({1}).set_requires_grad()},
                  {.lr = run["base_lr"].get<double>(), .momentum = 0.9});
    auto scheduler = make_scheduler(name, run["args"], optimizer);
    ASSERT_TRUE(scheduler) << name;
    for (size_t t = 0; t < run["lrs"].size(); ++t) {
      if (t > 0) scheduler->step();
      const double lr = run["lrs"][t], momentum = run["momenta"][t];
      EXPECT_NEAR(optimizer.lr(0), lr, 1e-13 * std::abs(lr) + 1e-16) << name << " step " << t;
      EXPECT_NEAR(optimizer.param_groups()[0].momentum, momentum, 1e-13) << name << " step " << t;
      EXPECT_EQ(scheduler->get_last_lr(), std::vector<double>{optimizer.lr(0)});
    }
    ++runs;
  }
  EXPECT_EQ(runs, 14);
}

// ---- clipping
void clip_all(DType dtype) {
  // The float32 coefficient has one rounding, its product another.
  const double relative = dtype == kFloat64 ? 1e-12 : 4e-7;
  int runs = 0;
  for (auto& run : goldens()["clip"]) {
    std::vector<Tensor> params;
    for (auto& g : run["grads"]) {
      const Tensor grad = tensor_of(g, dtype);
      params.push_back(zeros(grad.sizes(), dtype).set_requires_grad());
      params.back().set_grad(grad);
    }
    if (run["kind"] == "norm") {
      const auto type = run["norm_type"].get<std::string>();
      const Tensor norm = clip_grad_norm_(params, run["max"].get<double>(), std::stod(type));
      EXPECT_EQ(norm.dtype(), dtype);
      EXPECT_EQ(norm.dim(), 0);
      const double expected = run["total_norm"];
      EXPECT_NEAR(norm.item(), expected, relative * expected) << run["norm_type"];
    } else {
      clip_grad_value_(params, run["max"].get<double>());
    }
    for (size_t i = 0; i < params.size(); ++i)
      expect_close(params[i].grad(), run["after"][i], relative, 0, run["kind"].get<std::string>());
    ++runs;
  }
  EXPECT_EQ(runs, 15);
}
TEST(ClipGoldens, Float64) { clip_all(kFloat64); }
TEST(ClipGoldens, Float32) { clip_all(kFloat32); }

}  // namespace
}  // namespace sherd::optim
