// Learning rate schedules, under PyTorch's names and with its values.
//
//     optim::AdamW optimizer(model.parameters(), {.lr = 3e-4});
//     optim::WarmupCosineLR scheduler(optimizer,
//                                     {.warmup_steps = 100, .total_steps = 1000, .min_lr = 3e-5});
//     for (...) { ...; optimizer.step(); scheduler.step(); }
//
// A scheduler sets the groups' lr when it is built (for the first step), and at each step(). What
// it scales is the lr that a group had when its first scheduler was built (Optimizer::initial_lr).
//
// [Note: closed form] An lr follows from the number of steps and the group's initial lr alone: not
// from the lr before it, so it has no rounding that adds up, and a resumed run has the same bits. A
// change of lr by hand lasts until the next step(). Two schedulers cannot step one optimizer
// (PyTorch would multiply them): combine them by SequentialLR or LambdaLR.
//
// Option structs say "t" for the number of steps done: 0 at the first optimizer step.
#pragma once
#include <concepts>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "optim/optimizer.h"

namespace sherd::optim {

class LRScheduler {
 public:
  LRScheduler(LRScheduler&&) = default;
  LRScheduler& operator=(LRScheduler&&) = delete;
  virtual ~LRScheduler() = default;

  // Goes to the next lr. Call it after optimizer.step().
  void step();
  // Goes to the lr of t = `epoch`.
  void step(int64_t epoch);
  int64_t last_epoch() const { return last_epoch_; }  // t
  std::vector<double> get_last_lr() const;            // by group

  // last_epoch: int64 []; base_lrs: float64 [groups]. Loading sets the optimizer's lr and
  // initial_lr.
  nn::StateDict state_dict() const;
  void load_state_dict(const nn::StateDict& state);

  // Of a group at t; Error for t < 0.
  virtual double lr_at(int64_t t, size_t group) const = 0;
  // For schedules that move the momentum too.
  virtual std::optional<double> momentum_at(int64_t, size_t) const { return {}; }
  Optimizer& optimizer() const { return *optimizer_; }

 protected:
  explicit LRScheduler(Optimizer& optimizer) : optimizer_(&optimizer) {}
  // The last line of every constructor.
  void start() { apply(0); }
  double base_lr(size_t group) const { return optimizer_->initial_lr(group); }

 private:
  void apply(int64_t t);

  Optimizer* optimizer_;
  std::shared_ptr<int> token_ = std::make_shared<int>();
  int64_t last_epoch_ = 0;
};

// lr * f(t), for all groups or with a function a group.
class LambdaLR : public LRScheduler {
 public:
  using Lambda = std::function<double(int64_t t)>;
  LambdaLR(Optimizer& optimizer, Lambda f) : LambdaLR(optimizer, std::vector<Lambda>{f}) {}
  LambdaLR(Optimizer& optimizer, std::vector<Lambda> by_group);
  double lr_at(int64_t t, size_t group) const override;

 private:
  std::vector<Lambda> lambdas_;
};

// lr * gamma^(t / step_size), rounded down.
struct StepOptions {
  int64_t step_size = 0;  // required
  double gamma = 0.1;
};
class StepLR : public LRScheduler {
 public:
  StepLR(Optimizer& optimizer, const StepOptions& options);
  double lr_at(int64_t t, size_t group) const override;

 private:
  StepOptions options_;
};

// lr * gamma^(number of milestones <= t); equal ones count each.
struct MultiStepOptions {
  std::vector<int64_t> milestones = {};
  double gamma = 0.1;
};
class MultiStepLR : public LRScheduler {
 public:
  MultiStepLR(Optimizer& optimizer, const MultiStepOptions& options);
  double lr_at(int64_t t, size_t group) const override;

 private:
  MultiStepOptions options_;
};

// lr * gamma^t.
struct ExponentialOptions {
  double gamma = 0;  // required
};
class ExponentialLR : public LRScheduler {
 public:
  ExponentialLR(Optimizer& optimizer, const ExponentialOptions& options);
  double lr_at(int64_t t, size_t group) const override;

 private:
  ExponentialOptions options_;
};

// lr * factor until t = total_iters, then lr.
struct ConstantOptions {
  double factor = 1.0 / 3;
  int64_t total_iters = 5;
};
class ConstantLR : public LRScheduler {
 public:
  ConstantLR(Optimizer& optimizer, const ConstantOptions& options = {});
  double lr_at(int64_t t, size_t group) const override;

 private:
  ConstantOptions options_;
};

// From lr * start_factor at t = 0 in equal steps to lr * end_factor at t = total_iters, and on.
struct LinearOptions {
  double start_factor = 1.0 / 3;  // in (0, 1]
  double end_factor = 1;          // in [0, 1]
  int64_t total_iters = 5;
};
class LinearLR : public LRScheduler {
 public:
  LinearLR(Optimizer& optimizer, const LinearOptions& options = {});
  double lr_at(int64_t t, size_t group) const override;

 private:
  LinearOptions options_;
};

// eta_min + (lr - eta_min) (1 + cos(pi t / T_max)) / 2, also beyond T_max, where it rises again.
// Loshchilov, Hutter: SGDR. arXiv 1608.03983.
struct CosineAnnealingOptions {
  int64_t T_max = 0;  // required
  double eta_min = 0;
};
class CosineAnnealingLR : public LRScheduler {
 public:
  CosineAnnealingLR(Optimizer& optimizer, const CosineAnnealingOptions& options);
  double lr_at(int64_t t, size_t group) const override;

 private:
  CosineAnnealingOptions options_;
};

// The same, started anew after T_0 steps, then after T_0 T_mult, and so on.
struct CosineAnnealingWarmRestartsOptions {
  int64_t T_0 = 0;  // required
  int64_t T_mult = 1;
  double eta_min = 0;
};
class CosineAnnealingWarmRestarts : public LRScheduler {
 public:
  CosineAnnealingWarmRestarts(Optimizer& optimizer,
                              const CosineAnnealingWarmRestartsOptions& options);
  double lr_at(int64_t t, size_t group) const override;

 private:
  CosineAnnealingWarmRestartsOptions options_;
};

// lr (1 - t / total_iters)^power; 0 from total_iters on.
struct PolynomialOptions {
  int64_t total_iters = 5;
  double power = 1;
};
class PolynomialLR : public LRScheduler {
 public:
  PolynomialLR(Optimizer& optimizer, const PolynomialOptions& options = {});
  double lr_at(int64_t t, size_t group) const override;

 private:
  PolynomialOptions options_;
};

// Smith, Topin: Super-Convergence. arXiv 1708.07120. From max_lr / div_factor up to max_lr within
// pct_start of the steps, and down to the start / final_div_factor (three_phase: as fast down as up
// first). The momentum (or first beta) moves the other way. Error beyond total_steps.
struct OneCycleOptions {
  std::vector<double> max_lr = {};  // required: one, or one a group
  int64_t total_steps = 0;          // or epochs * steps_per_epoch
  int64_t epochs = 0;
  int64_t steps_per_epoch = 0;
  double pct_start = 0.3;
  std::string anneal_strategy = "cos";  // or "linear"
  bool cycle_momentum = true;
  double base_momentum = 0.85;
  double max_momentum = 0.95;
  double div_factor = 25;
  double final_div_factor = 1e4;
  bool three_phase = false;
};
class OneCycleLR : public LRScheduler {
 public:
  OneCycleLR(Optimizer& optimizer, const OneCycleOptions& options);
  double lr_at(int64_t t, size_t group) const override;
  std::optional<double> momentum_at(int64_t t, size_t group) const override;

 private:
  struct Phase {
    double end;  // in steps
    int from_lr, to_lr, from_momentum, to_momentum;
  };
  double max_lr(size_t group) const;
  double at(int64_t t, std::array<double, 3> lrs, bool momentum) const;

  OneCycleOptions options_;
  std::vector<Phase> phases_;
};

// Linear warm-up to lr at t = warmup_steps (from lr / (warmup_steps + 1) at t = 0), then half a
// cosine down to min_lr at t = total_steps, which stays; or, without decay, lr.
struct WarmupCosineOptions {
  int64_t warmup_steps = 0;
  int64_t total_steps = 0;  // required for decay
  double min_lr = 0;
  bool decay = true;
};
class WarmupCosineLR : public LRScheduler {
 public:
  WarmupCosineLR(Optimizer& optimizer, const WarmupCosineOptions& options);
  double lr_at(int64_t t, size_t group) const override;

 private:
  WarmupCosineOptions options_;
};

// A scheduler of any class, moved in.
class AnyScheduler {
 public:
  template <std::derived_from<LRScheduler> S>
  AnyScheduler(S scheduler) : scheduler_(std::make_shared<S>(std::move(scheduler))) {}
  const LRScheduler& operator*() const { return *scheduler_; }
  const LRScheduler* operator->() const { return scheduler_.get(); }

 private:
  std::shared_ptr<const LRScheduler> scheduler_;
};

// One schedule after another: number i from milestones[i - 1] on, where its own t is 0.
//
//     optim::SequentialLR scheduler(
//         optimizer, {optim::LinearLR(optimizer), optim::CosineAnnealingLR(optimizer, {.T_max = 95})},
//         {5});
class SequentialLR : public LRScheduler {
 public:
  SequentialLR(Optimizer& optimizer, std::vector<AnyScheduler> schedulers,
               std::vector<int64_t> milestones);
  double lr_at(int64_t t, size_t group) const override;
  std::optional<double> momentum_at(int64_t t, size_t group) const override;

 private:
  std::pair<const LRScheduler*, int64_t> current(int64_t t) const;

  std::vector<AnyScheduler> schedulers_;
  std::vector<int64_t> milestones_;
};

}  // namespace sherd::optim
