// Rows of a table by index, and the gradient of the table.
//
//     embedding_forward(weight.device(), weight.dtype())(weight, indices, y);
//     embedding_backward(g.device(), g.dtype())(g, indices, padding_idx, false, dweight);
//
// Legend: V rows of the table, C channels, N indices (of any shape).
#pragma once
#include "core/kernel.h"

namespace sherd {

// y[n] = weight[indices[n]]. weight [V, C] with channels side by side (stride 1), any dtype;
// indices N elements, contiguous, int64 or int32; y [N, C] (or [..., C]) contiguous, of weight's
// dtype. Error where an index is not in [0, V): names position, value and V.
inline constinit Kernel<void(const Tensor& weight, const Tensor& indices, const Tensor& y)>
    embedding_forward{"embedding"};

// dweight[v] = sum of g[n] where indices[n] = v and v != padding_idx (-1: none); added to what is
// there where `accumulate`, else all of dweight is written, zeros included.
//   g [N, C] contiguous, dweight [V, C] contiguous, floating point; dtypes may differ. Each row is
//   summed in float32 (float64 for float64) in the order of n, whatever the number of threads, and
//   rounded once.
inline constinit Kernel<void(const Tensor& g, const Tensor& indices, int64_t padding_idx,
                             bool accumulate, const Tensor& dweight)>
    embedding_backward{"embedding backward"};

}  // namespace sherd
