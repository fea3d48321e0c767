// Layer normalisation over rows, y = (x - mean) / sqrt(var + eps) * weight + bias.
// Ba, Kiros, Hinton: Layer Normalization. arXiv 1607.06450.
//
//     layer_norm_forward(x.device(), x.dtype())(x, weight, bias, 1e-5, y, mean, rstd);
//     layer_norm_backward(x.device(), x.dtype())(g, x, weight, mean, rstd, dx, dweight, dbias);
//
// Legend: N rows, C channels (normalised over).
#pragma once
#include "core/kernel.h"

namespace sherd {

// x, y [N, C] contiguous, of one dtype: float32, bfloat16, float16 or float64. weight, bias [C]
// contiguous, of any floating point dtype; undefined: 1 and 0. mean, rstd [N] are written, in
// float32 (float64 for float64 x). The variance is the biased one.
inline constinit Kernel<void(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps,
                             const Tensor& y, const Tensor& mean, const Tensor& rstd)>
    layer_norm_forward{"layer_norm"};

// g as y; dx [N, C], dweight and dbias [C] are written where defined (the last two in any floating
// point dtype). Their sums over rows run in pieces that follow from the shape alone. dx may be g.
inline constinit Kernel<void(const Tensor& g, const Tensor& x, const Tensor& weight,
                             const Tensor& mean, const Tensor& rstd, const Tensor& dx,
                             const Tensor& dweight, const Tensor& dbias)>
    layer_norm_backward{"layer_norm backward"};

}  // namespace sherd
