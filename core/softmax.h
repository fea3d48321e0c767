// Softmax and its logarithm over rows.
//
//     softmax_forward(x.device(), x.dtype())(x, y);
//     softmax_backward(x.device(), x.dtype())(g, y, dx);        // from the output, not the input
//
// Legend: N rows, C classes (normalised over). Tensors are [N, C] contiguous and floating point;
// the dtypes of inputs and outputs may differ, the arithmetic is float32 (float64 if any is).
// Outputs may be the memory of an input of the same dtype. A row that is all -inf, or holds NaN or
// +inf, gives NaN, as in PyTorch.
#pragma once
#include "core/kernel.h"

namespace sherd {

// y = e^x / sum(e^x)
inline constinit Kernel<void(const Tensor& x, const Tensor& y)> softmax_forward{"softmax"};
// dx = y (g - sum(g y))
inline constinit Kernel<void(const Tensor& g, const Tensor& y, const Tensor& dx)> softmax_backward{
    "softmax backward"};

// y = x - log(sum(e^x))
inline constinit Kernel<void(const Tensor& x, const Tensor& y)> log_softmax_forward{"log_softmax"};
// dx = g - e^y sum(g)
inline constinit Kernel<void(const Tensor& g, const Tensor& y, const Tensor& dx)>
    log_softmax_backward{"log_softmax backward"};

}  // namespace sherd
