#include "core/pointwise.h"

#include "core/ops/copy.h"

namespace sherd {

Plan plan(const char* op, std::span<const Tensor* const> in, int condition, Kinds kinds,
          bool gives_bool) {
  for (size_t i = 0; i < in.size(); ++i)
    if (!in[i]->defined()) fail("[", op, "] operand ", i, " is an undefined tensor");
  Plan p{in[0]->sizes(), kFloat32, kFloat32, kCPU};
  const Tensor* counted[Strided::kMaxOperands];
  int n = 0;
  bool same = true, placed = false;
  for (int i = 0; i < int(in.size()); ++i) {
    if (i) p.sizes = broadcast(p.sizes, in[i]->sizes(), op);
    if (i != condition)
      counted[n++] = in[i], same = same && in[i]->dtype() == counted[0]->dtype() &&
                                   in[i]->impl()->wrapped == counted[0]->impl()->wrapped;
    if (in[i]->impl()->wrapped) continue;
    if (placed && in[i]->device() != p.device)
      fail("[", op, "] tensors on different devices: ", p.device, " and ", in[i]->device());
    p.device = in[i]->device(), placed = true;
  }
  p.common =
      same && !counted[0]->impl()->wrapped ? counted[0]->dtype() : promote({counted, size_t(n)});
  if (kinds == kFloats && !is_float(p.common)) p.common = kFloat32;
  p.result = gives_bool ? kBool : p.common;
  return p;
}
Tensor output(const Plan& p, std::span<const Tensor* const> in) {
  const Tensor* model = nullptr;
  for (auto* t : in) {
    if (!(t->sizes() == p.sizes)) continue;
    if (t->is_contiguous() || (model && !(t->strides() == model->strides())))
      return empty(p.sizes, p.result, p.device);
    model = t;
  }
  if (!model) return empty(p.sizes, p.result, p.device);
  bool used[kMaxDims] =
      {};  // dense if the strides are those of a contiguous tensor in another order
  int64_t next = 1;
  for (int i = 0; i < p.sizes.n; ++i) {
    int d = 0;
    while (d < p.sizes.n && (used[d] || model->strides()[d] != next)) ++d;
    if (d == p.sizes.n) return empty(p.sizes, p.result, p.device);
    used[d] = true, next *= p.sizes[d];
  }
  Tensor y = empty(p.sizes, p.result, p.device);
  y.impl()->strides = model->strides();
  return y;
}
void check_writable(const char* op, const Tensor& out, const Plan& p, bool in_place) {
  if (!(out.sizes() == p.sizes))
    fail("[", op, in_place ? "_] " : "] out= ", "shape ", out.sizes(), " cannot hold the result ",
         p.sizes);
  auto category = [](DType d) { return is_float(d) ? 2 : d != kBool; };
  if (category(p.result) > category(out.dtype()))
    fail("[", op, "] result type ", name_of(p.result), " cannot be cast to ", name_of(out.dtype()));
  check_not_expanded(op, out);
}
bool is_expanded(const Tensor& x) {
  if (x.numel() == 0) return false;
  for (int i = 0; i < x.dim(); ++i)
    if (x.strides()[i] == 0 && x.size(i) > 1) return true;
  return false;
}
void check_not_expanded(const char* op, const Tensor& out) {
  if (is_expanded(out))
    fail("[", op, "] cannot write to an expanded tensor: call contiguous() first");
}

namespace {
// Elements lie in a range of memory without gaps and repetitions, in some order of dimensions.
bool fills_a_range(const Tensor& x) {
  bool used[kMaxDims] = {};
  int64_t next = 1;
  for (int i = 0; i < x.dim(); ++i) {
    int d = 0;
    while (d < x.dim() && (used[d] || (x.strides()[d] != next && x.size(d) != 1))) ++d;
    if (d == x.dim()) return false;
    used[d] = true;
    next *= x.size(d);
  }
  return true;
}
}  // namespace

void check_no_overlap(const char* op, const Tensor& out, const Tensor& in) {
  if (out.storage().get() != in.storage().get() || out.numel() == 0 || in.numel() == 0) return;
  const int64_t begin = out.storage_offset(), from = in.storage_offset();
  bool is_same = begin == from && out.sizes() == in.sizes();
  for (int i = 0; i < out.dim() && is_same; ++i)
    is_same = out.size(i) == 1 || out.strides()[i] == in.strides()[i];
  if (is_same) return;
  if (!fills_a_range(out) || !fills_a_range(in)) return;
  if (begin < from + in.numel() && from < begin + out.numel())
    fail("[", op, "_] the input shares memory with the tensor that is written, ", in.sizes(),
         " and ", out.sizes(), ", in another place or order: clone() it first");
}

void copy_raw(const Tensor& to, const Tensor& from) {
  const Tensor* in[] = {&from};
  Plan p = plan("copy", in, -1, kNumbers, false);
  if (!(broadcast(p.sizes, to.sizes(), "copy") == to.sizes()))
    fail("[copy] shape ", from.sizes(), " does not broadcast to ", to.sizes());
  // Between integers and floats the wider of the two is computed in; into an integer, the source's
  // own type.
  const DType common = is_float(from.dtype()) == is_float(to.dtype())
                           ? promote(from.dtype(), to.dtype())
                           : from.dtype();
  evaluate(Copy{}, to, common, from);
}

}  // namespace sherd
