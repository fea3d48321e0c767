// ShardedGradScaler: a GradScaler whose ranks agree: an Inf or NaN in any rank's gradients makes
// all ranks leave out the step, and all scales stay equal.
//
//     ShardedGradScaler scaler;                      // over the job's default group
//     scaler.scale(loss).backward();
//     scaler.step(optimizer);
//     scaler.update();
#pragma once
#include "distributed/distributed.h"
#include "optim/grad_scaler.h"

namespace sherd {

class ShardedGradScaler : public optim::GradScaler {
 public:
  explicit ShardedGradScaler(const optim::GradScalerOptions& options = {},
                             dist::Group process_group = nullptr)
      : GradScaler(options),
        group_(process_group ? std::move(process_group) : dist::default_group()) {}

 protected:
  void agree(const Tensor& found) const override {
    if (group_->size() > 1)
      group_->all_reduce(found, dist::ReduceOp::kMax, {.label = "found_inf"}).wait();
  }

 private:
  dist::Group group_;
};

}  // namespace sherd
