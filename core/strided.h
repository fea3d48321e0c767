// Strided: up to six operands over one index space, with dimensions sorted and collapsed as far as
// their strides allow. Operand 0 is the output. It is all that a device's pointwise kernel needs to
// know.
#pragma once
#include "core/tensor.h"

namespace sherd {

struct Strided {
  static constexpr int kMaxOperands = 7;
  struct Operand {
    char* data;
    DType dtype;
    int64_t strides[kMaxDims];  // bytes, innermost first
    bool uniform;               // all strides are 0
    bool host;                  // a number beside accelerator tensors
  };
  int ndim = 0, n = 0;
  int64_t numel = 1;
  int64_t sizes[kMaxDims];  // innermost first
  Operand operands[kMaxOperands];
  DType compute = kFloat32;  // the type the formula runs in: float32, float64, int32 or int64

  Strided(const Dims& sizes, std::span<const Tensor* const> tensors);
  bool dense(int k, DType t) const {
    return ndim <= 1 && operands[k].dtype == t &&
           (numel <= 1 || operands[k].strides[0] == size_of(t));
  }
};

constexpr DType compute_type(DType d) {
  return d == kFloat64 || d == kFloat32 || d == kInt64 ? d : is_float(d) ? kFloat32 : kInt32;
}

}  // namespace sherd
