// What a training step took, over all ranks: time, memory, bytes between ranks.
//
//     StepMeter meter(options, fsdp);                     // null: data parallel, or one rank
//     while (...) {
//       meter.begin();
//       ...                                               // the step
//       reporter.step(meter.end(step, loss, grad_norm, lr));
//     }
#pragma once
#include <chrono>
#include <cstdint>

#include "examples/support/options.h"
#include "examples/support/report.h"
#include "sherd.h"

namespace examples {

class StepMeter {
 public:
  StepMeter(const Options& options, const sherd::FsdpModule* fsdp);

  void begin();
  // `loss`: of this rank's samples. The report has the mean of all ranks', and the largest peak of
  // memory. A collective.
  StepReport end(int64_t step, double loss, double grad_norm, double lr) const;

 private:
  sherd::dist::CollectiveCounts counts() const;  // of all groups

  const Options& options_;
  const sherd::FsdpModule* fsdp_;
  double peak_flops_;  // of this rank's processor, a second
  std::chrono::steady_clock::time_point start_;
  sherd::dist::CollectiveCounts before_;
};

}  // namespace examples
