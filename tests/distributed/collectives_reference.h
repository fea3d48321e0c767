// What collectives are given in tests, and what they should give: for collectives_matrix_test.cc and
// collectives_test.cc.
#pragma once
#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "core/strided.h"
#include "distributed/reduce_op.h"

namespace sherd::dist {

// Values that a rank has, the same wherever they are computed: small whole numbers and halves, so
// that every dtype holds them; products and sums of float types round.
inline Tensor values(int rank, int64_t n, DType dtype, int salt = 0) {
  Tensor x = empty({n}, kFloat64);
  uint64_t state = 0x9e3779b97f4a7c15 * (1 + rank + 100 * salt);
  for (int64_t i = 0; i < n; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const auto v = int64_t(state >> 60);  // 0 to 15
    x.data<double>()[i] = dtype == kBool ? v & 1 : is_float(dtype) ? 1.3 * double(v) - 7 : v;
  }
  return to_raw(x, dtype);
}

inline bool same_bytes(const Tensor& a, const Tensor& b) {
  const Tensor x = contiguous_raw(a), y = contiguous_raw(b);
  return x.dtype() == y.dtype() && x.numel() == y.numel() &&
         (x.numel() == 0 || std::memcmp(x.bytes(), y.bytes(), x.nbytes()) == 0);
}

inline Tensor copy_of(const Tensor& x) {
  Tensor y = empty(x.sizes(), x.dtype());
  copy_raw(y, x);
  return y;
}

// The tree over ranks, from the definition: one node at a time, each rounded to the dtype.
inline Tensor expected(ReduceOp op, const std::vector<Tensor>& inputs) {
  const DType dtype = inputs[0].dtype();
  auto node = [&](auto& self, size_t a, size_t b) -> Tensor {
    if (b - a == 1) return to_raw(inputs[a], kFloat64);
    const size_t h = std::bit_floor(b - a - 1);
    const Tensor l = self(self, a, a + h), r = self(self, a + h, b);
    Tensor out = empty(l.sizes(), kFloat64);
    for (int64_t i = 0; i < l.numel(); ++i) {
      const double x = l.data<double>()[i], y = r.data<double>()[i];
      out.data<double>()[i] = op == ReduceOp::kProduct ? x * y
                              : op == ReduceOp::kMin   ? std::min(x, y)
                              : op == ReduceOp::kMax   ? std::max(x, y)
                              : op == ReduceOp::kBand  ? double(int64_t(x) & int64_t(y))
                              : op == ReduceOp::kBor   ? double(int64_t(x) | int64_t(y))
                              : op == ReduceOp::kBxor  ? double(int64_t(x) ^ int64_t(y))
                                                       : x + y;
    }
    // float32 pairs: the exact sum or product fits a double or rounds twice to the same.
    if (dtype == kFloat16 || dtype == kBFloat16) out = to_raw(out, kFloat32);
    return to_raw(to_raw(out, dtype), kFloat64);
  };
  Tensor sum = node(node, 0, inputs.size());
  if (op == ReduceOp::kAvg)
    for (int64_t i = 0; i < sum.numel(); ++i) sum.data<double>()[i] /= double(inputs.size());
  return to_raw(sum, dtype);
}

}  // namespace sherd::dist
