#include "optim/clip_grad.h"

#include <array>
#include <cmath>
#include <deque>

#include "autograd/grad_mode.h"
#include "autograd/meta.h"
#include "autograd/pointwise.h"
#include "core/exact_sum.h"
#include "core/ops/arithmetic.h"
#include "nn/shard_info.h"

namespace sherd::optim {
namespace {

// A sum, and how many gradients of each dtype went into it.
struct Partial {
  Partial(double p, const nn::ShardInfo* shard, Device device) : shard(shard), sum(p, device) {}
  const nn::ShardInfo* shard;  // one of the group; null: whole parameters
  ExactSum sum;
  std::array<int64_t, kDTypes> gradients = {};

  void all_reduce();
};

// The counts travel with the sum: all ranks agree on the norm's dtype, those without a gradient
// too.
void Partial::all_reduce() {
  const int64_t n = sum.state().numel();
  const Tensor values = empty({n + kDTypes}, kInt64, sum.state().device());
  const Tensor state = values.as_strided_raw({n}, {1}, 0);
  const Tensor counts = values.as_strided_raw({kDTypes}, {1}, n);
  copy_raw(state, sum.state());
  copy_raw(counts, tensor<int64_t>(std::span<const int64_t>(gradients), {kDTypes}));
  if (sum.merges_by_max())
    shard->max(values);
  else
    shard->sum_exact(values);
  copy_raw(sum.state(), state);
  for (int d = 0; d < kDTypes; ++d)
    gradients[d] = counts.as_strided_raw({}, {}, n + d).item<int64_t>();
}

std::string name_of(const Tensor& p, size_t i) {
  const auto* meta = autograd::meta_of(p);
  return meta && !meta->name.empty() ? meta->name : std::to_string(i);
}

// The gradient of parameter i; undefined if it has none.
Tensor gradient(const char* op, const Tensor& p, size_t i) {
  if (!p.defined()) fail("[", op, "] parameter ", i, " is an undefined tensor");
  const Tensor g = p.grad();
  if (!g.defined()) return g;
  if (!is_float(g.dtype()))
    fail("[", op, "] the gradient of ", name_of(p, i), " is ", g.dtype(),
         ", expected a floating point dtype");
  if (g.sizes() == p.sizes()) return g.detach();
  const auto* shard = nn::shard_info(p);
  const bool pending = shard && g.sizes() == shard->full_shape();
  fail("[", op, "] the gradient of ", name_of(p, i), " ",
       pending ? "is not reduced yet (the last backward ran under no_sync): it " : "", "has shape ",
       g.sizes(), ", the parameter ", p.sizes());
}

}  // namespace

ClipCoefficient clip_coefficient(const std::vector<Tensor>& params, double max_norm,
                                 double norm_type, bool error_if_nonfinite) {
  if (!(max_norm >= 0)) fail("[clip_grad_norm] max_norm must be at least 0, got ", max_norm);
  if (!(norm_type > 0))
    fail("[clip_grad_norm] norm_type must be above 0 (or infinite), got ", norm_type);
  const Device device = params.empty() || params[0].device().is_meta() ? kCPU : params[0].device();
  std::deque<Partial> partials;
  auto partial = [&](const nn::ShardInfo* shard) -> Partial& {
    for (auto& p : partials)
      if (shard ? p.shard && p.shard->group() == shard->group() : !p.shard) return p;
    return partials.emplace_back(norm_type, shard, device);
  };
  Partial& total = partial(nullptr);
  for (size_t i = 0; i < params.size(); ++i) {
    const Tensor g = gradient("clip_grad_norm", params[i], i);
    Partial& p = partial(nn::shard_info(params[i]));
    if (!g.defined()) continue;
    p.sum.add(g);
    ++p.gradients[int(g.dtype())];
  }
  for (auto& p : partials) {
    if (!p.shard) continue;
    p.all_reduce();
    total.sum.merge(p.sum);
    for (int d = 0; d < kDTypes; ++d) total.gradients[d] += p.gradients[d];
  }
  DType dtype = kFloat32;
  int kinds = 0;
  for (int d = 0; d < kDTypes; ++d)
    if (total.gradients[d]) dtype = DType(d), ++kinds;
  if (kinds != 1) dtype = kFloat32;

  const double exact = total.sum.norm();
  const double norm = dtype == kFloat64 ? exact : double(float(exact));
  if (error_if_nonfinite && !std::isfinite(norm))
    fail("[clip_grad_norm] the gradients' ", norm_type, "-norm is ", norm,
         ": skip this step, lower the learning rate, or leave error_if_nonfinite off");
  const double ratio = std::isinf(max_norm) ? 1 : max_norm / (norm + 1e-6);
  const double coefficient = ratio >= 1 ? 1 : ratio;  // NaN stays
  return {full({}, norm, dtype, device),
          full({}, coefficient, dtype == kFloat64 ? kFloat64 : kFloat32, device)};
}

Tensor clip_grad_norm_(const std::vector<Tensor>& params, double max_norm, double norm_type,
                       bool error_if_nonfinite) {
  const ClipCoefficient clip = clip_coefficient(params, max_norm, norm_type, error_if_nonfinite);
  const double c = clip.coefficient.item();
  if (c == 1) return clip.norm;
  NoGrad off;
  for (size_t i = 0; i < params.size(); ++i)
    if (Tensor g = gradient("clip_grad_norm", params[i], i); g.defined()) g.mul_(c);
  return clip.norm;
}

void clip_grad_value_(const std::vector<Tensor>& params, double clip_value) {
  if (!(clip_value >= 0)) fail("[clip_grad_value] clip_value must be at least 0, got ", clip_value);
  NoGrad off;
  for (size_t i = 0; i < params.size(); ++i)
    if (Tensor g = gradient("clip_grad_value", params[i], i); g.defined())
      call_(Clamp{-clip_value, clip_value}, g);
}

}  // namespace sherd::optim
