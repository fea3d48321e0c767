// Dropout, with a mask that follows from a Generator's draw and is never stored.
// Srivastava et al.: Dropout. JMLR 2014.
//
//     const Generator::Draw draw = default_generator().next();
//     dropout_kernel(x.device(), x.dtype())(x, p, draw, y);
//     dropout_kernel(x.device(), x.dtype())(g, p, draw, dx);       // backward: the same mask
#pragma once
#include "core/generator.h"
#include "core/kernel.h"

namespace sherd {

// y[i] = x[i] keep(i) / (1 - p), where keep(i) is 1 with probability 1 - p, else 0, and depends on
// (draw, i) alone: i is the element's place in row-major order, whatever the strides. x and y have
// one shape and one floating point dtype, any strides, and may be one memory. p in [0, 1]; at p =
// 1, y = 0 x.
inline constinit Kernel<void(const Tensor& x, double p, Generator::Draw draw, const Tensor& y)>
    dropout_kernel{"dropout"};

}  // namespace sherd
