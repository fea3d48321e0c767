#include "core/gemm.h"

#include "core/ops/activation.h"
#include "core/pointwise.h"

namespace sherd {
namespace {

void check(const Tensor& a, const Tensor& b, const Tensor& y, const GemmOptions& options) {
  const int n = a.dim();
  const auto shapes = [&] {
    return concat("got ", a.sizes(), " x ", b.sizes(), " into ", y.sizes());
  };
  if ((n != 2 && n != 3) || b.dim() != n || y.dim() != n)
    fail("[gemm] needs matrices [M, K] x [K, N] into [M, N], or all three with a batch first; ",
         shapes());
  if (a.size(-1) != b.size(-2) || y.size(-2) != a.size(-2) || y.size(-1) != b.size(-1))
    fail("[gemm] the shapes do not fit [M, K] x [K, N] into [M, N]; ", shapes());
  if (n == 3 && (a.size(0) != b.size(0) || a.size(0) != y.size(0)))
    fail("[gemm] the batch sizes differ; ", shapes());
  if (a.device() != b.device() || a.device() != y.device())
    fail("[gemm] tensors on different devices: ", a.device(), ", ", b.device(), " and ",
         y.device());
  const DType d = a.dtype();
  if (b.dtype() != d ||
      (y.dtype() != d && !(y.dtype() == kFloat32 && is_float(d) && size_of(d) == 2)))
    fail("[gemm] needs both inputs and the output in one dtype (the output may be float32 for ",
         "16-bit inputs), got ", d, " x ", b.dtype(), " into ", y.dtype());
  if (d == kBool || d == kUInt8) fail("[gemm] is not defined for ", d, " tensors");
  for (int i = 0; i < n; ++i)
    if (y.strides()[i] == 0 && y.size(i) > 1)
      fail("[gemm] cannot write to an expanded tensor, strides ", y.strides());
  const Tensor& bias = options.bias;
  const bool post = bias.defined() || options.activation != Activation::kNone;
  if (post && options.accumulate)
    fail("[gemm] accumulate excludes a bias and an activation: they would be applied to the sum");
  if (post && !is_float(d)) fail("[gemm] a bias or an activation needs floats, not ", d);
  if (!bias.defined()) return;
  if (bias.dim() != 1 || bias.size(0) != y.size(-1) || !is_float(bias.dtype()))
    fail("[gemm] needs a floating point bias of shape [", y.size(-1), "], got ", bias.dtype(), " ",
         bias.sizes());
  if (bias.device() != y.device())
    fail("[gemm] bias is on ", bias.device(), ", the output on ", y.device());
}

}  // namespace

void gemm(const Tensor& a, const Tensor& b, const Tensor& y, const GemmOptions& options) {
  check(a, b, y, options);
  if (y.numel() == 0 || y.device().is_meta()) return;
  if (a.numel() > 0) return gemm_kernel(a.device(), a.dtype())(a, b, y, options);
  if (options.accumulate) return;
  copy_raw(y, options.bias.defined() ? options.bias : Tensor(0.0));
  apply_activation(options.activation, y);
}

void apply_activation(Activation activation, const Tensor& y) {
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kRelu:
      return evaluate(Relu{}, y, y.dtype(), y);
    case Activation::kGelu:
      return evaluate(Gelu{}, y, y.dtype(), y);
    case Activation::kGeluTanh:
      return evaluate(GeluTanh{}, y, y.dtype(), y);
  }
}

}  // namespace sherd
