// Random numbers for an interval of a larger array: element i's value follows from (draw, i) alone,
// so that a rank fills only its own piece of a parameter, and any cut gives the same whole.
//
//     const Generator::Draw draw{philox_key(seed, name.data(), name.size()), 0};
//     normal_kernel(y.device(), y.dtype())(draw, begin, 0.0, 0.02, y);   // elements begin, ...
//
// y is contiguous: float32, bfloat16 and float16 (the float32 number, rounded) or float64 (numbers
// of its own, with 53 random bits). The same bits on AVX2 and AVX-512, for any number of threads.
#pragma once
#include "core/generator.h"
#include "core/kernel.h"

namespace sherd {

// Uniform in [low, high).
inline constinit Kernel<void(Generator::Draw draw, int64_t begin, double low, double high,
                             const Tensor& y)>
    uniform_kernel{"uniform"};

// Normal. Box, Muller: A Note on the Generation of Random Normal Deviates. 1958.
inline constinit Kernel<void(Generator::Draw draw, int64_t begin, double mean, double std,
                             const Tensor& y)>
    normal_kernel{"normal"};

// Normal, restricted to [low, high] (bounds on the value, not in units of std), by the inverse of
// the distribution function.
inline constinit Kernel<void(Generator::Draw draw, int64_t begin, double mean, double std,
                             double low, double high, const Tensor& y)>
    trunc_normal_kernel{"trunc_normal"};

}  // namespace sherd
