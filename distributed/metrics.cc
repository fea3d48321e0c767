#include "distributed/metrics.h"

#include <algorithm>

#include "distributed/distributed.h"

namespace sherd::dist {

void MeanMetric::update(const Tensor& values) {
  if (!is_float(values.dtype())) fail("[MeanMetric] values must be floating, got ", values.dtype());
  // float32 holds the shorter ones exactly.
  const DType dtype = values.dtype() == kFloat64 ? kFloat64 : kFloat32;
  const Tensor all = contiguous_raw(to_raw(values.detach(), dtype));
  const Tensor part = empty(all.sizes(), dtype);
  visit(dtype, [&]<class T>(Type<T>) {
    if constexpr (std::is_floating_point_v<T>)
      for (bool below_zero : {false, true}) {
        // NaN goes into both.
        std::transform(all.data<T>(), all.data<T>() + all.numel(), part.data<T>(),
                       [&](T x) { return x != x || (x < 0) == below_zero ? x : T(0); });
        (below_zero ? negative_ : positive_).add(part);
      }
  });
  count_ += all.numel();
}

void MeanMetric::update(const Tensor& values, const Tensor& valid) {
  if (valid.dtype() != kBool || valid.numel() != values.numel())
    fail("[MeanMetric] `valid` must be bool, of as many elements as the values (", values.numel(),
         "), got ", valid.dtype(), " ", valid.sizes());
  const Tensor all = contiguous_raw(to_raw(values.detach(), kFloat64)),
               which = contiguous_raw(valid);
  std::vector<double> kept;
  for (int64_t i = 0; i < all.numel(); ++i)
    if (which.data<bool>()[i]) kept.push_back(all.data<double>()[i]);
  update(tensor<double>(std::span<const double>(kept), {int64_t(kept.size())}));
}

void MeanMetric::update(double value, int64_t weight) {
  if (weight < 0) fail("[MeanMetric] a weight is a number of samples, got ", weight);
  if (weight == 0) return;
  update(full({}, value * double(weight), kFloat64));
  count_ += weight - 1;
}

double MeanMetric::compute() const { return compute(is_initialized() ? default_group() : nullptr); }

std::vector<double> MeanMetric::compute(const std::vector<const MeanMetric*>& metrics,
                                        const Group& group) {
  constexpr int64_t kSize = ExactSum::kStateSize, kEach = 2 * kSize + 1;
  const Tensor all = empty({int64_t(metrics.size()) * kEach}, kInt64);
  int64_t* p = all.data<int64_t>();
  for (auto* m : metrics) {
    p = std::copy_n(m->positive_.state().data<int64_t>(), kSize, p);
    p = std::copy_n(m->negative_.state().data<int64_t>(), kSize, p);
    *p++ = m->count_;
  }
  if (size_of_group(group) > 1) group->all_reduce(all, ReduceOp::kSum, {.label = "metrics"}).wait();
  std::vector<double> means;
  for (const int64_t* s = all.data<int64_t>(); s != p; s += kEach) {
    ExactSum positive(1), negative(1);
    std::copy_n(s, kSize, positive.state().data<int64_t>());
    std::copy_n(s + kSize, kSize, negative.state().data<int64_t>());
    means.push_back((positive.sum() - negative.sum()) / double(s[2 * kSize]));
  }
  return means;
}

}  // namespace sherd::dist
