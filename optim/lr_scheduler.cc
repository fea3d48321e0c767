#include "optim/lr_scheduler.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace sherd::optim {
namespace {

void require(bool ok, const char* scheduler, const char* what) {
  if (!ok) fail("[", scheduler, "] ", what);
}

// From `from` at 0 along half a cosine to `to` at 1.
double cosine(double from, double to, double part) {
  return to + (from - to) * (1 + std::cos(std::numbers::pi * part)) / 2;
}

}  // namespace

// ---- the base
void LRScheduler::apply(int64_t t) {
  require(t >= 0, "lr_scheduler", "the number of steps cannot be negative");
  std::vector<double> lrs;
  for (size_t g = 0; g < optimizer_->num_groups(); ++g) lrs.push_back(lr_at(t, g));
  for (size_t g = 0; g < lrs.size(); ++g) {
    optimizer_->set_initial_lr(g, base_lr(g));
    optimizer_->set_lr(g, lrs[g]);
    if (auto m = momentum_at(t, g)) *optimizer_->momentum(g) = *m;
  }
  last_epoch_ = t;
}

void LRScheduler::step() { step(last_epoch_ + 1); }
void LRScheduler::step(int64_t epoch) {
  if (!optimizer_->claim_schedule(token_))
    fail(
        "[lr_scheduler] another scheduler steps this optimizer already, and the later one would "
        "overwrite its lr: combine the two by SequentialLR or LambdaLR");
  apply(epoch);
}

std::vector<double> LRScheduler::get_last_lr() const {
  std::vector<double> result;
  for (size_t g = 0; g < optimizer_->num_groups(); ++g) result.push_back(lr_at(last_epoch_, g));
  return result;
}

nn::StateDict LRScheduler::state_dict() const {
  std::vector<double> base_lrs;
  for (size_t g = 0; g < optimizer_->num_groups(); ++g) base_lrs.push_back(base_lr(g));
  nn::StateDict result;
  result.set("last_epoch", full({}, double(last_epoch_), kInt64));
  result.set("base_lrs", tensor<double>(base_lrs));
  return result;
}

void LRScheduler::load_state_dict(const nn::StateDict& state) {
  const auto groups = int64_t(optimizer_->num_groups());
  std::vector<nn::ExpectedTensor> found;
  for (auto& [name, t] : state) found.push_back({name, t.sizes()});
  nn::check_state("load_state_dict", {{"last_epoch", {}}, {"base_lrs", {groups}}}, found, true);
  const Tensor lrs = contiguous_raw(to_raw(state.at("base_lrs"), kFloat64));
  const int64_t t = state.at("last_epoch").item<int64_t>();
  require(t >= 0, "load_state_dict", "last_epoch is negative");
  for (int64_t g = 0; g < groups; ++g) optimizer_->set_initial_lr(size_t(g), lrs.data<double>()[g]);
  apply(t);
}

// ---- the schedules
LambdaLR::LambdaLR(Optimizer& optimizer, std::vector<Lambda> by_group)
    : LRScheduler(optimizer), lambdas_(std::move(by_group)) {
  require(lambdas_.size() == 1 || lambdas_.size() == optimizer.num_groups(), "LambdaLR",
          "expected one function, or one for each parameter group");
  start();
}
double LambdaLR::lr_at(int64_t t, size_t group) const {
  return base_lr(group) *
         lambdas_[lambdas_.size() == 1 ? 0 : std::min(group, lambdas_.size() - 1)](t);
}

StepLR::StepLR(Optimizer& optimizer, const StepOptions& options)
    : LRScheduler(optimizer), options_(options) {
  require(options.step_size > 0, "StepLR", "step_size must be above 0");
  start();
}
double StepLR::lr_at(int64_t t, size_t group) const {
  return base_lr(group) * std::pow(options_.gamma, double(t / options_.step_size));
}

MultiStepLR::MultiStepLR(Optimizer& optimizer, const MultiStepOptions& options)
    : LRScheduler(optimizer), options_(options) {
  std::sort(options_.milestones.begin(), options_.milestones.end());
  start();
}
double MultiStepLR::lr_at(int64_t t, size_t group) const {
  const auto& m = options_.milestones;
  const auto passed = std::upper_bound(m.begin(), m.end(), t) - m.begin();
  return base_lr(group) * std::pow(options_.gamma, double(passed));
}

ExponentialLR::ExponentialLR(Optimizer& optimizer, const ExponentialOptions& options)
    : LRScheduler(optimizer), options_(options) {
  require(options.gamma > 0, "ExponentialLR", "gamma must be above 0");
  start();
}
double ExponentialLR::lr_at(int64_t t, size_t group) const {
  return base_lr(group) * std::pow(options_.gamma, double(t));
}

ConstantLR::ConstantLR(Optimizer& optimizer, const ConstantOptions& options)
    : LRScheduler(optimizer), options_(options) {
  require(options.factor >= 0 && options.factor <= 1, "ConstantLR", "factor must be in [0, 1]");
  start();
}
double ConstantLR::lr_at(int64_t t, size_t group) const {
  return base_lr(group) * (t < options_.total_iters ? options_.factor : 1);
}

LinearLR::LinearLR(Optimizer& optimizer, const LinearOptions& options)
    : LRScheduler(optimizer), options_(options) {
  require(options.start_factor > 0 && options.start_factor <= 1, "LinearLR",
          "start_factor must be in (0, 1]");
  require(options.end_factor >= 0 && options.end_factor <= 1, "LinearLR",
          "end_factor must be in [0, 1]");
  require(options.total_iters > 0, "LinearLR", "total_iters must be above 0");
  start();
}
double LinearLR::lr_at(int64_t t, size_t group) const {
  const double part = double(std::min(t, options_.total_iters)) / double(options_.total_iters);
  return base_lr(group) *
         (options_.start_factor + (options_.end_factor - options_.start_factor) * part);
}

CosineAnnealingLR::CosineAnnealingLR(Optimizer& optimizer, const CosineAnnealingOptions& options)
    : LRScheduler(optimizer), options_(options) {
  require(options.T_max > 0, "CosineAnnealingLR", "T_max must be above 0");
  start();
}
double CosineAnnealingLR::lr_at(int64_t t, size_t group) const {
  return cosine(base_lr(group), options_.eta_min, double(t) / double(options_.T_max));
}

CosineAnnealingWarmRestarts::CosineAnnealingWarmRestarts(
    Optimizer& optimizer, const CosineAnnealingWarmRestartsOptions& options)
    : LRScheduler(optimizer), options_(options) {
  require(options.T_0 > 0, "CosineAnnealingWarmRestarts", "T_0 must be above 0");
  require(options.T_mult >= 1, "CosineAnnealingWarmRestarts", "T_mult must be at least 1");
  start();
}
double CosineAnnealingWarmRestarts::lr_at(int64_t t, size_t group) const {
  int64_t length = options_.T_0;
  if (options_.T_mult == 1) t %= length;
  while (t >= length) t -= length, length *= options_.T_mult;
  return cosine(base_lr(group), options_.eta_min, double(t) / double(length));
}

PolynomialLR::PolynomialLR(Optimizer& optimizer, const PolynomialOptions& options)
    : LRScheduler(optimizer), options_(options) {
  require(options.total_iters > 0, "PolynomialLR", "total_iters must be above 0");
  start();
}
double PolynomialLR::lr_at(int64_t t, size_t group) const {
  const double part = double(std::min(t, options_.total_iters)) / double(options_.total_iters);
  return base_lr(group) * std::pow(1 - part, options_.power);
}

OneCycleLR::OneCycleLR(Optimizer& optimizer, const OneCycleOptions& options)
    : LRScheduler(optimizer), options_(options) {
  if (options_.total_steps == 0) options_.total_steps = options.epochs * options.steps_per_epoch;
  require(options_.total_steps > 0, "OneCycleLR",
          "total_steps (or epochs and steps_per_epoch) must be above 0");
  require(options.pct_start >= 0 && options.pct_start <= 1, "OneCycleLR",
          "pct_start must be in [0, 1]");
  require(options.anneal_strategy == "cos" || options.anneal_strategy == "linear", "OneCycleLR",
          "anneal_strategy must be \"cos\" or \"linear\"");
  require(options.div_factor > 0 && options.final_div_factor > 0, "OneCycleLR",
          "div_factor and final_div_factor must be above 0");
  require(options.max_lr.size() == 1 || options.max_lr.size() == optimizer.num_groups(),
          "OneCycleLR", "expected one max_lr, or one for each parameter group");
  for (size_t g = 0; g < optimizer.num_groups(); ++g)
    require(!options.cycle_momentum || optimizer.momentum(g), "OneCycleLR",
            "the optimizer has no momentum: set cycle_momentum = false");
  // Places of the start's, the largest and the last lr; of base_momentum and max_momentum.
  const double rise = options.pct_start * double(options_.total_steps);
  const double last = double(options_.total_steps - 1);
  if (options.three_phase)
    phases_ = {{rise - 1, 0, 1, 1, 0}, {2 * rise - 2, 1, 0, 0, 1}, {last, 0, 2, 1, 1}};
  else
    phases_ = {{rise - 1, 0, 1, 1, 0}, {last, 1, 2, 0, 1}};
  start();
}
double OneCycleLR::max_lr(size_t group) const {
  return options_
      .max_lr[options_.max_lr.size() == 1 ? 0 : std::min(group, options_.max_lr.size() - 1)];
}
double OneCycleLR::at(int64_t t, std::array<double, 3> places, bool momentum) const {
  if (t > options_.total_steps)
    fail("[OneCycleLR] stepped ", t, " times, but total_steps is ", options_.total_steps);
  double begin = 0;
  for (size_t i = 0;; begin = phases_[i++].end) {
    const Phase& p = phases_[i];
    if (double(t) > p.end && i + 1 < phases_.size()) continue;
    const double from = places[size_t(momentum ? p.from_momentum : p.from_lr)];
    const double to = places[size_t(momentum ? p.to_momentum : p.to_lr)];
    const double part = p.end > begin ? (double(t) - begin) / (p.end - begin) : 1;
    return options_.anneal_strategy == "cos" ? cosine(from, to, part) : from + (to - from) * part;
  }
}
double OneCycleLR::lr_at(int64_t t, size_t group) const {
  const double start = max_lr(group) / options_.div_factor;
  return at(t, {start, max_lr(group), start / options_.final_div_factor}, false);
}
std::optional<double> OneCycleLR::momentum_at(int64_t t, size_t) const {
  if (!options_.cycle_momentum) return {};
  return at(t, {options_.base_momentum, options_.max_momentum}, true);
}

WarmupCosineLR::WarmupCosineLR(Optimizer& optimizer, const WarmupCosineOptions& options)
    : LRScheduler(optimizer), options_(options) {
  require(options.warmup_steps >= 0, "WarmupCosineLR", "warmup_steps cannot be negative");
  require(options.min_lr >= 0, "WarmupCosineLR", "min_lr cannot be negative");
  require(!options.decay || options.total_steps > 0, "WarmupCosineLR",
          "total_steps must be above 0");
  start();
}
double WarmupCosineLR::lr_at(int64_t t, size_t group) const {
  const double lr = base_lr(group);
  const int64_t warmup = options_.warmup_steps, total = options_.total_steps;
  if (t < warmup) return lr * double(t + 1) / double(warmup + 1);
  if (!options_.decay) return lr;
  if (t >= total) return options_.min_lr;
  return cosine(lr, options_.min_lr, double(t - warmup) / double(total - warmup));
}

SequentialLR::SequentialLR(Optimizer& optimizer, std::vector<AnyScheduler> schedulers,
                           std::vector<int64_t> milestones)
    : LRScheduler(optimizer),
      schedulers_(std::move(schedulers)),
      milestones_(std::move(milestones)) {
  require(!schedulers_.empty() && milestones_.size() + 1 == schedulers_.size(), "SequentialLR",
          "expected one milestone less than schedulers");
  require(std::is_sorted(milestones_.begin(), milestones_.end()), "SequentialLR",
          "milestones must not fall");
  for (auto& s : schedulers_)
    require(&s->optimizer() == &optimizer, "SequentialLR",
            "all schedulers must be of this optimizer");
  start();
}
std::pair<const LRScheduler*, int64_t> SequentialLR::current(int64_t t) const {
  const auto i = std::upper_bound(milestones_.begin(), milestones_.end(), t) - milestones_.begin();
  return {&*schedulers_[size_t(i)], i == 0 ? t : t - milestones_[size_t(i) - 1]};
}
double SequentialLR::lr_at(int64_t t, size_t group) const {
  const auto [scheduler, own] = current(t);
  return scheduler->lr_at(own, group);
}
std::optional<double> SequentialLR::momentum_at(int64_t t, size_t group) const {
  const auto [scheduler, own] = current(t);
  return scheduler->momentum_at(own, group);
}

}  // namespace sherd::optim
