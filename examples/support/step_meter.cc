#include "examples/support/step_meter.h"

#include <algorithm>
#include <set>

#include "core/peak.h"

namespace examples {

using namespace sherd;
using dist::CollectiveCounts;

namespace {

// Floating point operations of a training step, a token: 2 a multiply-add; backward costs twice
// forward.
double flops_per_token(const Options& o) {
  const double block = 4.0 * o.dim * o.dim + 2.0 * o.dim * o.ff_dim;
  const double scores = 2.0 * o.seq_len * o.dim * (o.causal ? 0.5 : 1);
  return 6 * (double(o.layers) * (block + scores) + double(o.dim) * o.vocab_size);
}

}  // namespace

StepMeter::StepMeter(const Options& options, const FsdpModule* fsdp)
    : options_(options), fsdp_(fsdp), peak_flops_(1e9 * fma_peak() * num_threads()) {}

CollectiveCounts StepMeter::counts() const {
  std::set<dist::Group> groups = {dist::default_group()};
  if (fsdp_)
    for (auto& u : fsdp_->units())
      for (const dist::Group& g : {u->options().shard, u->options().replicate})
        if (g) groups.insert(g);
  CollectiveCounts sum;
  for (auto& g : groups) {
    const CollectiveCounts c = g->counts();
    for (auto kind :
         {&CollectiveCounts::all_gather, &CollectiveCounts::reduce_scatter,
          &CollectiveCounts::all_reduce, &CollectiveCounts::broadcast, &CollectiveCounts::other})
      (sum.*kind).calls += (c.*kind).calls, (sum.*kind).bytes += (c.*kind).bytes;
    sum.waited_ns += c.waited_ns;
  }
  return sum;
}

void StepMeter::begin() {
  reset_peak_memory();
  before_ = counts();
  start_ = std::chrono::steady_clock::now();
}

StepReport StepMeter::end(int64_t step, double loss, double grad_norm, double lr) const {
  const int w = dist::world_size();
  const Tensor mine = tensor<double>({loss, double(memory_stats().peak) / (1 << 20)}),
               all = empty({2 * w}, kFloat64);
  dist::all_gather_into_tensor(all, mine);
  StepReport r;
  r.step = step, r.steps = options_.steps, r.grad_norm = grad_norm, r.lr = lr;
  for (int k = 0; k < w; ++k) {
    r.loss += all.data<double>()[2 * k] / w;
    r.peak_mem_mib = std::max(r.peak_mem_mib, all.data<double>()[2 * k + 1]);
  }
  const auto after = counts();
  const auto add = [&](const char* name, auto count) {
    const int64_t bytes = (after.*count).bytes - (before_.*count).bytes;
    r.extra[name] = {{"calls", (after.*count).calls - (before_.*count).calls}, {"bytes", bytes}};
    if (w > 1) r.comm_bytes += bytes;
  };
  add("all_gather", &CollectiveCounts::all_gather);
  add("reduce_scatter", &CollectiveCounts::reduce_scatter);
  add("all_reduce", &CollectiveCounts::all_reduce);
  add("broadcast", &CollectiveCounts::broadcast);
  add("other", &CollectiveCounts::other);
  r.exposed_ms = double(after.waited_ns - before_.waited_ns) * 1e-6;
  r.step_ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start_).count();
  const int64_t tokens = options_.batch_size * options_.accumulate * options_.seq_len * w;
  r.tokens_per_s = double(tokens) / r.step_ms * 1e3;
  r.flops_share = r.tokens_per_s / w * flops_per_token(options_) / peak_flops_;
  return r;
}

}  // namespace examples
