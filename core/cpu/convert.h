// Blocks of elements between any two dtypes, strides in bytes. A stride of 0 repeats one element.
#pragma once
#include "core/tensor.h"
namespace sherd::cpu {
using Convert = void (*)(char* to, int64_t to_stride, const char* from, int64_t from_stride,
                         int64_t n);
Convert convert(DType to, DType from);
}  // namespace sherd::cpu
