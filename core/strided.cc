#include "core/strided.h"

#include <cstdlib>

namespace sherd {

Strided::Strided(const Dims& shape, std::span<const Tensor* const> t) {
  n = int(t.size());
  bool plain = true;  // the common case first: same shapes, all contiguous
  for (auto* x : t) plain = plain && (x->sizes() == shape) && x->is_contiguous();
  numel = shape.numel();
  for (int k = 0; k < n; ++k) operands[k].host = t[k]->device().is_cpu();
  if (plain || numel == 0) {
    ndim = 1, sizes[0] = numel;
    for (int k = 0; k < n; ++k) {
      auto& o = operands[k];
      o.data = t[k]->bytes(), o.dtype = t[k]->dtype(), o.strides[0] = size_of(o.dtype);
      o.uniform = numel == 1;
    }
    return;
  }
  int order[kMaxDims], m = 0;  // dimensions by falling stride of the output, then of the others
  int64_t s[kMaxOperands][kMaxDims];
  for (int k = 0; k < n; ++k) {
    operands[k].data = t[k]->bytes(), operands[k].dtype = t[k]->dtype();
    const Dims &sz = t[k]->sizes(), &st = t[k]->strides();
    for (int i = 0; i < shape.n; ++i) {
      int j = i - (shape.n - sz.n);
      s[k][i] = j < 0 || sz[j] == 1 ? 0 : st[j] * size_of(operands[k].dtype);
    }
  }
  for (int i = 0; i < shape.n; ++i)
    if (shape[i] != 1) order[m++] = i;
  auto inner_first = [&](int a, int b) {
    for (int k = 0; k < n; ++k)
      if (std::abs(s[k][a]) != std::abs(s[k][b]) && s[k][a] && s[k][b])
        return std::abs(s[k][a]) < std::abs(s[k][b]);
    return a > b;
  };
  for (int i = 1; i < m;
       ++i)  // insertion sort: the relation is not a strict weak order, and m is tiny
    for (int j = i; j > 0 && inner_first(order[j], order[j - 1]); --j)
      std::swap(order[j], order[j - 1]);
  for (int q = 0; q < m; ++q) {
    int i = order[q];
    bool joins = ndim > 0;
    for (int k = 0; k < n && joins; ++k)
      joins = s[k][i] == operands[k].strides[ndim - 1] * sizes[ndim - 1];
    if (joins) {
      sizes[ndim - 1] *= shape[i];
      continue;
    }
    sizes[ndim] = shape[i];
    for (int k = 0; k < n; ++k) operands[k].strides[ndim] = s[k][i];
    ++ndim;
  }
  if (ndim == 0) {
    ndim = 1, sizes[0] = 1;
    for (int k = 0; k < n; ++k) operands[k].strides[0] = 0;
  }
  for (int k = 0; k < n; ++k) {
    operands[k].uniform = true;
    for (int i = 0; i < ndim; ++i)
      operands[k].uniform = operands[k].uniform && operands[k].strides[i] == 0;
  }
}

}  // namespace sherd
