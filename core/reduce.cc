#include "core/reduce.h"

namespace sherd {

ReductionPlan plan_reduction(const char* op, const Tensor& x, const Dims& dims, Dims& kept_sizes,
                             Over& over, bool needs_elements) {
  bool reduced[kMaxDims] = {};
  for (auto d : dims) {
    if (d < -std::max(1, x.dim()) || d >= std::max(1, x.dim()))
      fail("[", op, "] dimension ", d, " is out of range for shape ", x.sizes());
    if (std::exchange(reduced[d < 0 ? d + std::max(1, x.dim()) : d], true))
      fail("[", op, "] dimension ", d, " appears twice");
  }
  ReductionPlan r{};
  r.dtype = x.dtype();
  kept_sizes = x.sizes();
  for (int i = 0; i < x.dim(); ++i) {
    if (dims.n == 0) reduced[i] = true;
    if (reduced[i]) over.dims.push(i), kept_sizes[i] = 1;
  }
  over.count = 1;
  for (auto d : over.dims) over.count *= x.size(d);
  if (over.count == 0 && needs_elements && kept_sizes.numel())
    fail("[", op, "] of no elements has no value: shape ", x.sizes());
  auto add = [](Axes& a, int64_t size, int64_t stride) {
    a.count *= size;
    if (size == 1) return;
    if (a.n && stride == a.strides[a.n - 1] * a.sizes[a.n - 1])
      a.sizes[a.n - 1] *= size;
    else
      a.sizes[a.n] = size, a.strides[a.n] = stride, ++a.n;
  };
  for (int i = x.dim() - 1; i >= 0; --i)
    add(reduced[i] ? r.reduced : r.kept, x.size(i), x.strides()[i] * size_of(x.dtype()));
  return r;
}

}  // namespace sherd
