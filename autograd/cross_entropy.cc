#include "core/cross_entropy.h"

#include <atomic>
#include <cstdio>

#include "autograd/engine.h"
#include "autograd/ops.h"
#include "autograd/record.h"

namespace sherd {
using autograd::alias, autograd::Needs, autograd::record, autograd::Saved;
namespace {

void check(const Tensor& logits, const Tensor& targets, const CrossEntropyArguments& a) {
  if (!is_float(logits.dtype()))
    fail("[cross_entropy] logits must be floating point, got ", logits.dtype());
  const bool probabilities = is_float(targets.dtype());
  if (!probabilities && targets.dtype() != kInt64)
    fail(
        "[cross_entropy] targets must be int64 class indices, or probabilities of a floating point "
        "dtype, got ",
        targets.dtype());
  if (probabilities && a.ignore_index >= 0)
    fail("[cross_entropy] ignore_index ", a.ignore_index,
         " has no meaning for targets that are probabilities");
  Dims expected;
  for (int i = 0; i < logits.dim(); ++i)
    if (probabilities || i != std::min(1, logits.dim() - 1)) expected.push(logits.size(i));
  if (logits.dim() == 0 || !(targets.sizes() == expected))
    fail("[cross_entropy] logits ", logits.sizes(), " need targets ", expected,
         probabilities ? ", for floating point ones are probabilities (class indices are int64)"
                       : "",
         ", got ", targets.dtype(), " ", targets.sizes());
  const int64_t v = logits.size(logits.dim() == 1 ? 0 : 1);
  if (a.weight.defined() && !(a.weight.sizes() == Dims{v}))
    fail("[cross_entropy] weight must be [", v, "], one a class, got ", a.weight.sizes());
  if (v == 0 && !probabilities)
    fail("[cross_entropy] logits ", logits.sizes(), " have no classes, of which targets could be");
  if (!(a.label_smoothing >= 0 && a.label_smoothing <= 1))
    fail("[cross_entropy] label_smoothing must be in [0, 1], got ", a.label_smoothing);
}

// Logits as [N, V]: classes to the end.
Tensor to_rows(const Tensor& logits) {
  if (logits.dim() == 1) return logits.unsqueeze(0);
  Dims order{0};
  for (int i = 2; i < logits.dim(); ++i) order.push(i);
  order.push(1);
  return (logits.dim() == 2 ? logits : logits.permute(order)).reshape({-1, logits.size(1)});
}

// -sum_v w[v] t[v] log p[v] of each row, where t are the targets' probabilities, smoothed.
Tensor of_probabilities(const Tensor& logits, const Tensor& targets,
                        const CrossEntropyArguments& a) {
  const int classes = logits.dim() == 1 ? 0 : 1;
  const int64_t v = logits.size(classes);
  Tensor t = targets;
  if (a.label_smoothing > 0)
    t = t * (1 - a.label_smoothing) + a.label_smoothing / double(std::max<int64_t>(1, v));
  if (a.weight.defined()) {
    Dims sizes;
    for (int i = 0; i < logits.dim(); ++i) sizes.push(i == classes ? v : 1);
    t = t * a.weight.reshape(sizes);
  }
  const Tensor losses = -sum(log_softmax(logits, classes) * t, {classes});
  if (a.reduction == Reduction::kNone) return losses.to(logits.dtype());
  const Tensor total = sum(losses);
  const Tensor y = a.reduction == Reduction::kSum ? total : total / double(losses.numel());
  return y.to(logits.dtype());
}

}  // namespace

Tensor cross_entropy_composed(const Tensor& logits, const Tensor& targets,
                              const CrossEntropyArguments& a) {
  check(logits, targets, a);
  if (is_float(targets.dtype())) return of_probabilities(logits, targets, a);
  const Tensor p = log_softmax_composed(to_rows(logits), 1);
  const int64_t n = p.size(0), v = p.size(1);
  const Tensor t = targets.reshape({n, 1}),
               ignored = targets.reshape({n}) == Tensor(a.ignore_index);
  const Tensor hit = t == arange(v).to(p.device()).unsqueeze(0);
  const Tensor w = a.weight.defined() ? a.weight.to(p.dtype()).unsqueeze(0)
                                      : ones({1, 1}, p.dtype(), p.device());
  // By where, not by a factor of 0: a class of probability 0 has an infinite logarithm.
  auto chosen = [&](const Tensor& x) { return sum(where(hit, x, Tensor(0.0)), {1}); };
  auto of_kept = [&](const Tensor& x) { return where(ignored, Tensor(0.0), x); };
  const Tensor weights = of_kept(chosen(w));
  Tensor losses = -(1 - a.label_smoothing) * chosen(p * w);
  if (a.label_smoothing > 0) losses = losses - sum(p * w, {1}) * (a.label_smoothing / double(v));
  losses = of_kept(losses);
  if (a.reduction == Reduction::kSum) return sum(losses);
  if (a.reduction == Reduction::kMean) return sum(losses) / sum(weights);
  return losses.reshape(targets.sizes());
}

Tensor cross_entropy(const Tensor& logits, const Tensor& targets, const CrossEntropyArguments& a) {
  check(logits, targets, a);
  if (is_float(targets.dtype())) return of_probabilities(logits, targets, a);
  Tensor x = to_rows(logits);
  if (x.dim() && x.size(1) > 1 && x.stride(1) != 1) x = x.contiguous();
  const int64_t n = x.size(0);
  const DType wide = x.dtype() == kFloat64 ? kFloat64 : kFloat32;
  const CrossEntropyOptions options{a.ignore_index, a.label_smoothing,
                                    a.weight.defined() ? contiguous_raw(a.weight) : Tensor()};
  const Tensor t = contiguous_raw(targets.reshape({n}).detach());
  Tensor losses = empty({n}, wide, x.device()), log_sums = empty({n, 2}, wide, x.device()),
         sums = zeros({2}, wide, x.device());
  if (n)
    cross_entropy_forward(x.device(), x.dtype())(x.detach(), t, options, losses, log_sums, sums);
  Tensor y;
  {
    NoGrad off;
    const Tensor total = sums.select(0, 0);
    y = a.reduction == Reduction::kNone  ? losses.reshape(targets.sizes())
        : a.reduction == Reduction::kSum ? total.clone()
                                         : total / sums.select(0, 1);
    y = y.to(logits.dtype()).detach();
  }
  return record<1>(
      "cross_entropy", y, {&x},
      [x = Saved(x), targets = Saved(targets), weight = Saved(a.weight), t, a, options, log_sums,
       sums](const Tensor& g, Needs) {
        const Tensor logits = x.get();
        targets.get(), weight.get();  // unchanged since, or an error
        if (grad_enabled()) {
          CrossEntropyArguments rows = a;
          const Tensor own = alias(logits), y = cross_entropy_composed(own, t, rows);
          return std::array{grad({y}, {own}, {g.reshape(y.sizes())}, {.create_graph = true})[0]};
        }
        Tensor dx = empty(logits.sizes(), logits.dtype(), logits.device());
        const Tensor divisor =
            a.reduction == Reduction::kMean ? sums.select(0, 1).detach() : Tensor();
        const Tensor gc = contiguous_raw(g.reshape({-1}).detach());
        if (dx.numel())
          cross_entropy_backward(dx.device(), dx.dtype())(gc, divisor, logits.detach(), t, log_sums,
                                                          options, dx);
        return std::array{dx};
      });
}

Tensor mse_loss(const Tensor& input, const Tensor& target, Reduction reduction) {
  static std::atomic<bool> has_warned = false;
  if (!(input.sizes() == target.sizes()) && !has_warned.exchange(true))
    std::fprintf(stderr,
                 "[mse_loss] warning: input %s and target %s differ in shape and are broadcast, "
                 "which is seldom meant\n",
                 to_string(input.sizes()).c_str(), to_string(target.sizes()).c_str());
  const Tensor d = input - target, squares = d * d;
  return reduction == Reduction::kNone  ? squares
         : reduction == Reduction::kSum ? sum(squares)
                                        : mean(squares);
}

}  // namespace sherd
