// GradScaler: trains in float16 without losing small gradients. The loss is multiplied by a scale,
// so that gradients stay in float16's range; the optimizer steps what was divided by it again. A
// step whose gradients hold an Inf or NaN is left out and the scale is lowered; after
// `growth_interval` good steps in a row it is raised. Micikevicius et al.: Mixed Precision
// Training. arXiv 1710.03740.
//
//     optim::GradScaler scaler;
//     scaler.scale(loss).backward();
//     scaler.unscale_(optimizer);                           // only if gradients are looked at
//     fsdp.clip_grad_norm_(1.0);
//     scaler.step(optimizer);
//     scaler.update();
//     optimizer.zero_grad();
//
// Parameters may be sharded by FSDP: ranks that share pieces agree on what they found, so unscale_
// and step are collectives then. With gradients that only some ranks have, use ShardedGradScaler
// (distributed/sharded_grad_scaler.h), which asks all ranks.
#pragma once
#include <unordered_map>

#include "nn/visit_tensors.h"
#include "optim/optimizer.h"

namespace sherd::optim {

struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2, backoff_factor = 0.5;
  int64_t growth_interval = 2000;  // steps
  bool enabled = true;             // off: every call does nothing, or just the step
};

class GradScaler {
 public:
  // Error for a scale or factor that is not above 0, growth below 1, backoff above 1, or an
  // interval below 1.
  explicit GradScaler(const GradScalerOptions& options = {});
  virtual ~GradScaler();

  // All tensors in `values` (a tensor, lists, tuples of them, nested) times the scale, recorded.
  template <class T>
  T scale(T values) const {
    if (options_.enabled) nn::visit_tensors(values, [&](Tensor& t) { t = t * scale_; });
    return values;
  }
  // Divides the optimizer's gradients by the scale, in place. Error if it was done since the last
  // update().
  void unscale_(Optimizer& optimizer);
  // unscale_, if it was not done, and the optimizer's step unless an Inf or NaN was found. True if
  // it stepped. Error if it was done since the last update().
  bool step(Optimizer& optimizer, const StepArguments& arguments = {});
  // After all optimizers' steps: lowers, keeps or raises the scale; or sets it.
  void update();
  void update(double new_scale);

  double get_scale() const { return options_.enabled ? scale_ : 1; }
  bool is_enabled() const { return options_.enabled; }
  int64_t growth_tracker() const { return good_steps_; }  // good steps since the last change
  // scale, growth_factor, backoff_factor float64 []; growth_interval, growth_tracker int64 [].
  nn::StateDict state_dict() const;
  void load_state_dict(const nn::StateDict& state);

 protected:
  // found: int32 [1], 1 if this rank found an Inf or NaN. Makes it the same on all ranks that
  // step together.
  virtual void agree(const Tensor& /*found*/) const {}

 private:
  enum class Stage : uint8_t { kScaled, kUnscaled, kStepped };
  struct Seen {
    Stage stage = Stage::kScaled;
    bool found_inf = false;
  };

  GradScalerOptions options_;
  double scale_;
  int64_t good_steps_ = 0;
  std::unordered_map<Optimizer*, Seen> seen_;  // since the last update()
};

}  // namespace sherd::optim
