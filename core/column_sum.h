// Sums over the rows of a matrix: the gradient of a bias.
//
//     column_sum_kernel(g.device(), g.dtype())(g, dbias, false);
//
// Legend: N rows, C columns.
#pragma once
#include "core/kernel.h"

namespace sherd {

// y[c] = sum_n x[n, c], or y += it where `accumulate`.
//   x [N, C], any row stride, columns side by side (stride 1); y [C] contiguous. Floating point
//   dtypes, which may differ; sums are in float32 (float64 if x is float64).
// The order of additions follows from the shape alone.
inline constinit Kernel<void(const Tensor& x, const Tensor& y, bool accumulate)> column_sum_kernel{
    "column_sum"};

}  // namespace sherd
