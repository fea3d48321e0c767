#include "optim/grad_scaler.h"

#include <algorithm>
#include <cmath>

#include "autograd/grad_mode.h"
#include "core/exact_sum.h"
#include "nn/shard_info.h"

namespace sherd::optim {
namespace {

void check(const GradScalerOptions& o) {
  const auto positive = [](const char* name, double value) {
    if (!(value > 0) || std::isinf(value))
      fail("[grad_scaler] ", name, " must be a number above 0, got ", value);
  };
  positive("init_scale", o.init_scale);
  positive("growth_factor", o.growth_factor);
  positive("backoff_factor", o.backoff_factor);
  if (o.growth_factor < 1) fail("[grad_scaler] growth_factor must be at least 1");
  if (o.backoff_factor > 1) fail("[grad_scaler] backoff_factor must be at most 1");
  if (o.growth_interval < 1)
    fail("[grad_scaler] growth_interval must be at least 1, got ", o.growth_interval);
}

}  // namespace

GradScaler::GradScaler(const GradScalerOptions& options)
    : options_(options), scale_(options.init_scale) {
  check(options);
}
GradScaler::~GradScaler() = default;

void GradScaler::unscale_(Optimizer& optimizer) {
  if (!options_.enabled) return;
  Seen& seen = seen_[&optimizer];
  if (seen.stage != Stage::kScaled)
    fail("[grad_scaler] ",
         seen.stage == Stage::kUnscaled
             ? "unscale_() was called on this optimizer already since the last update()"
             : "unscale_() comes before step(): call update() after the step");
  NoGrad off;
  const Tensor found = zeros({1}, kInt32);
  std::vector<const nn::ShardInfo*> groups;  // one parameter of each
  for (auto& [name, p] : optimizer.named_parameters()) {
    const nn::ShardInfo* shard = nn::shard_info(p);
    if (shard && std::none_of(groups.begin(), groups.end(),
                              [&](auto* g) { return g->group() == shard->group(); }))
      groups.push_back(shard);
    Tensor g = p.grad();
    if (!g.defined()) continue;
    g = g.detach();
    ExactSum largest(ExactSum::kInfinity, g.device());
    largest.add(g);
    if (!std::isfinite(largest.norm())) found.data<int32_t>()[0] = 1;
    g.div_(Tensor(scale_));
  }
  for (auto* shard : groups) shard->max(found);
  agree(found);
  seen = {Stage::kUnscaled, found.data<int32_t>()[0] != 0};
}

bool GradScaler::step(Optimizer& optimizer, const StepArguments& arguments) {
  if (!options_.enabled) {
    optimizer.step(arguments);
    return true;
  }
  if (seen_[&optimizer].stage == Stage::kStepped)
    fail("[grad_scaler] step() was called on this optimizer already since the last update()");
  if (seen_[&optimizer].stage == Stage::kScaled) unscale_(optimizer);
  Seen& seen = seen_[&optimizer];
  seen.stage = Stage::kStepped;
  if (!seen.found_inf) optimizer.step(arguments);
  return !seen.found_inf;
}

void GradScaler::update() {
  if (!options_.enabled) return;
  bool any = false, bad = false;
  for (auto& [optimizer, seen] : seen_)
    if (seen.stage != Stage::kScaled) any = true, bad = bad || seen.found_inf;
  if (!any) fail("[grad_scaler] update() without a step() or unscale_() before it");
  seen_.clear();
  if (bad) {
    scale_ *= options_.backoff_factor;
    good_steps_ = 0;
  } else if (++good_steps_ == options_.growth_interval) {
    const double next = scale_ * options_.growth_factor;
    if (std::isfinite(float(next))) scale_ = next;
    good_steps_ = 0;
  }
}

void GradScaler::update(double new_scale) {
  GradScalerOptions o = options_;
  o.init_scale = new_scale;
  check(o);
  scale_ = new_scale;
  seen_.clear();
}

nn::StateDict GradScaler::state_dict() const {
  nn::StateDict d;
  d.set("scale", full({}, scale_, kFloat64));
  d.set("growth_factor", full({}, options_.growth_factor, kFloat64));
  d.set("backoff_factor", full({}, options_.backoff_factor, kFloat64));
  d.set("growth_interval", full({}, double(options_.growth_interval), kInt64));
  d.set("growth_tracker", full({}, double(good_steps_), kInt64));
  return d;
}

void GradScaler::load_state_dict(const nn::StateDict& state) {
  std::vector<nn::ExpectedTensor> expected, found;
  for (auto& [name, t] : state_dict()) expected.push_back({name, t.sizes()});
  for (auto& [name, t] : state) found.push_back({name, t.sizes()});
  nn::check_state("load_state_dict", expected, found, true);
  GradScalerOptions o = options_;
  o.init_scale = state.find("scale")->item();
  o.growth_factor = state.find("growth_factor")->item();
  o.backoff_factor = state.find("backoff_factor")->item();
  o.growth_interval = state.find("growth_interval")->item<int64_t>();
  check(o);
  options_ = o;
  scale_ = o.init_scale;
  good_steps_ = state.find("growth_tracker")->item<int64_t>();
  seen_.clear();
}

}  // namespace sherd::optim
