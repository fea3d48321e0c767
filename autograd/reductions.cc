#include "core/ops/reductions.h"

#include "autograd/pointwise.h"

namespace sherd {
using autograd::kOutput, autograd::Needs, autograd::record, autograd::Saved;
namespace {

template <class Op>
Tensor reduce(const Op& op, const Tensor& x, const Dims& dims, bool keepdim) {
  autograd::refuse_placeholder(Op::name, x);
  Dims sizes;
  Over over;
  const DType type = reduced_type(Op::name, x.dtype(), gives_of<Op>, kinds_of<Op>);
  sherd::ReductionPlan r = plan_reduction(
      Op::name, x, dims, sizes, over, !requires { Op::empty; });
  r.compute = x.dtype() == kFloat64 || in_float64<Op> ? kFloat64
              : is_float(x.dtype())                   ? kFloat32
                                                      : kInt64;
  Tensor wide = empty(sizes, gives_of<Op> == kIndex ? kInt64 : r.compute, x.device());
  if (wide.numel() && !x.device().is_meta()) {
    r.in = x.bytes(), r.out = wide.bytes();
    reduction<Op>(x.device(), x.dtype())(op, r);
  }
  Tensor y = to_raw(wide, type);  // with size 1 where x was reduced
  if (!keepdim) {
    Dims kept;
    for (int i = 0; i < x.dim(); ++i)
      if (std::find(over.dims.begin(), over.dims.end(), i) == over.dims.end()) kept.push(x.size(i));
    y = over_storage(y.storage(), kept, type);
  }
  if constexpr (requires { op.grad(x, x, x, over); })
    return record<1>(
        Op::name, y, {&x},
        [op, over, sizes, x = Saved(x), from = x.sizes(), y = Saved(y, kOutput)](const Tensor& g,
                                                                                 Needs) {
          return std::array{
              op.grad(g.reshape(sizes), x.get(), y.get().reshape(sizes), over).expand(from)};
        });
  return y;
}

// Where the gradient reads neither input nor output, they are not kept.
template <class Op>
Tensor reduce_linear(const Op& op, const Tensor& x, const Dims& dims, bool keepdim) {
  Tensor y;
  {
    NoGrad off;
    y = reduce(op, x, dims, keepdim);
  }
  if (!is_float(y.dtype())) return y;
  Dims sizes;
  Over over;
  plan_reduction(Op::name, x, dims, sizes, over, false);
  return record<1>(Op::name, y, {&x}, [op, over, sizes, from = x.sizes()](const Tensor& g, Needs) {
    return std::array{op.grad(g.reshape(sizes), g, g, over).expand(from)};
  });
}

}  // namespace

Tensor sum(const Tensor& x, const Dims& dims, bool keepdim) {
  return reduce_linear(Sum{}, x, dims, keepdim);
}
Tensor mean(const Tensor& x, const Dims& dims, bool keepdim) {
  return reduce_linear(Mean{}, x, dims, keepdim);
}
Tensor norm(const Tensor& x, const Dims& dims, bool keepdim) {
  return reduce(Norm{}, x, dims, keepdim);
}
Tensor amax(const Tensor& x, const Dims& dims, bool keepdim) {
  return reduce(Amax{}, x, dims, keepdim);
}
Tensor argmax(const Tensor& x, const Dims& dims, bool keepdim) {
  return reduce(Argmax{}, x, dims, keepdim);
}
Tensor var(const Tensor& x, const Dims& dims, double correction, bool keepdim) {
  return reduce(Var{correction}, x, dims, keepdim);
}

Tensor Tensor::sum(const Dims& dims, bool keepdim) const {
  return sherd::sum(*this, dims, keepdim);
}
Tensor Tensor::mean(const Dims& dims, bool keepdim) const {
  return sherd::mean(*this, dims, keepdim);
}

Tensor sum_to(const Tensor& x, const Dims& sizes) {
  if (x.sizes() == sizes) return x;
  Dims dims;
  const int lead = x.dim() - sizes.n;
  for (int i = 0; i < x.dim(); ++i)
    if (i < lead || (sizes[i - lead] == 1 && x.size(i) != 1)) dims.push(i);
  Tensor r = dims.n ? sum(x, dims, true) : x;
  return r.sizes() == sizes ? r : r.reshape(sizes);
}

}  // namespace sherd
