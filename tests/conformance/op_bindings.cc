#include <cmath>

#include "tests/conformance/bind.h"

namespace sherd::test {
namespace {

void bind_pointwise(Bindings& b) {
  b.bind("add", "input other alpha=1", add);
  b.bind("sub", "input other alpha=1", sub);
  b.binary("mul", "input other", mul);
  b.binary("div", "input other", div);
  b.binary("pow", "input exponent", pow);
  b.binary("maximum", "input other", maximum);
  b.binary("minimum", "input other", minimum);
  b.binary("eq", "input other", operator==);
  b.binary("ne", "input other", operator!=);
  b.binary("lt", "input other", operator<);
  b.binary("gt", "input other", operator>);
  b.binary("le", "input other", operator<=);
  b.binary("ge", "input other", operator>=);
  b.binary("logical_and", "input other", operator&);
  b.binary("logical_or", "input other", operator|);
  b.bind("where", "input condition other",
         [](const Tensor& a, const Tensor& c, const Tensor& o) { return where(c, a, o); });
  b.bind("masked_fill", "input mask value", masked_fill);
  b.bind("clamp", "input min=none max=none",
         [](const Tensor& x, std::optional<double> lo, std::optional<double> hi) {
           return clamp(x, lo.value_or(-INFINITY), hi.value_or(INFINITY));
         });
  b.unary("neg", neg);
  b.unary("abs", abs);
  b.unary("exp", exp);
  b.unary("log", log);
  b.unary("sqrt", sqrt);
  b.unary("tanh", tanh);
  b.unary("erf", erf);
  b.unary("sigmoid", sigmoid);
  b.unary("nn.functional.relu", relu);
  b.unary("nn.functional.silu", silu);
  b.bind("nn.functional.leaky_relu", "input negative_slope=0.01", leaky_relu);
  b.bind("nn.functional.gelu", "input approximate=unset",
         [](const Tensor& x, const std::string& a) { return gelu(x, a == "unset" ? "none" : a); });
}

void bind_reductions(Bindings& b) {
  b.bind("sum", "input dim=none keepdim=false",
         [](const Tensor& x, const Dims& d, bool k) { return sum(x, d, k); });
  b.bind("mean", "input dim=none keepdim=false",
         [](const Tensor& x, const Dims& d, bool k) { return mean(x, d, k); });
  b.bind("amax", "input dim=none keepdim=false", amax);
  b.bind("argmax", "input dim=none keepdim=false", argmax);
  b.bind("var", "input dim=none correction=1 keepdim=false", var);
  b.bind("linalg.vector_norm", "input ord=2 dim=none keepdim=false",
         [](const Tensor& x, double ord, const Dims& d, bool k) {
           if (ord != 2) throw Unsupported("ord other than 2");
           return norm(x, d, k);
         });
}

void bind_views(Bindings& b) {
  b.bind("view", "input size", [](const Tensor& x, const Dims& s) { return x.view(s); });
  b.bind("reshape", "input shape", [](const Tensor& x, const Dims& s) { return x.reshape(s); });
  b.bind("flatten", "input start_dim=0 end_dim=-1",
         [](const Tensor& x, int64_t s, int64_t e) { return x.flatten(s, e); });
  b.bind("transpose", "input dim0 dim1",
         [](const Tensor& x, int64_t i, int64_t j) { return x.transpose(i, j); });
  b.bind("t", "input", [](const Tensor& x) { return x.t(); });
  b.bind("permute", "input dims", [](const Tensor& x, const Dims& d) { return x.permute(d); });
  b.bind("expand", "input size", [](const Tensor& x, const Dims& s) { return x.expand(s); });
  b.bind("squeeze", "input dim=none",
         [](const Tensor& x, std::optional<int64_t> d) { return d ? x.squeeze(*d) : x.squeeze(); });
  b.bind("unsqueeze", "input dim", [](const Tensor& x, int64_t d) { return x.unsqueeze(d); });
  b.bind("narrow", "input dim start length",
         [](const Tensor& x, int64_t d, int64_t s, int64_t n) { return x.narrow(d, s, n); });
  b.bind("select", "input dim index",
         [](const Tensor& x, int64_t d, int64_t i) { return x.select(d, i); });
  b.bind("contiguous", "input", [](const Tensor& x) { return x.contiguous(); });
  b.bind("clone", "input", [](const Tensor& x) { return x.clone(); });
  b.bind("cat", "tensors dim=0", cat);
  b.bind("stack", "tensors dim=0", stack);
  b.bind("split", "input split_size dim=0", [](const Tensor& x, const Dims& s, int64_t d) {
    return s.n == 1 ? split(x, s[0], d) : split(x, s, d);
  });
  b.bind("split_with_sizes", "input split_sizes dim=0",
         [](const Tensor& x, const Dims& s, int64_t d) { return split(x, s, d); });
  b.bind("chunk", "input chunks dim=0", chunk);
  b.bind("zero_", "input", [](const Tensor& x) {
    Tensor y = x.clone();
    return y.zero_();
  });
  b.bind("fill", "input value", [](const Tensor& x, double v) {
    Tensor y = x.clone();
    return y.fill_(v);
  });
}

void bind_structured(Bindings& b) {
  b.binary("matmul", "input other", matmul);
  b.bind("nn.functional.linear", "input weight bias=none", linear);
  b.bind("softmax", "input dim", softmax);
  b.bind("log_softmax", "input dim", log_softmax);
  b.bind("nn.functional.layer_norm", "input normalized_shape weight=none bias=none eps=1e-5",
         layer_norm);
  b.bind("nn.functional.embedding", "weight indices padding_idx=none",
         [](const Tensor& w, const Tensor& i, std::optional<int64_t> p) {
           return embedding(i, w, p);
         });
  b.bind("nn.functional.cross_entropy",
         "input target weight=none ignore_index=-100 reduction=mean label_smoothing=0.0",
         [](const Tensor& x, const Tensor& t, const Tensor& w, int64_t ignore, Reduction r,
            double smoothing) {
           return cross_entropy(x, t, {w, ignore, r, smoothing});
         });
  b.bind("nn.functional.mse_loss", "input target reduction=mean", mse_loss);
  b.bind("nn.functional.scaled_dot_product_attention",
         "query key value attn_mask=none dropout_p=0.0 is_causal=false scale=none enable_gqa=false",
         [](const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask, double p,
            bool causal, std::optional<double> scale, bool gqa) {
           if (gqa) throw Unsupported("enable_gqa");
           return scaled_dot_product_attention(q, k, v, {mask, p, causal, scale});
         });
}

void bind_creation(Bindings& b) {
  // Of integers, C++ chooses the form that gives int64.
  b.bind("arange", "start end=none step=1 dtype=none device=none",
         [](const Tensor& start, const Tensor& end, const Tensor& step, std::optional<DType> d,
            std::optional<std::string>) {
           const Tensor from = end.defined() ? start : Tensor(0), to = end.defined() ? end : start;
           if (is_float(from.dtype()) || is_float(to.dtype()) || is_float(step.dtype()))
             return arange(from.item(), to.item(), step.item(), d.value_or(kFloat32));
           return arange(from.item<int64_t>(), to.item<int64_t>(), step.item<int64_t>(),
                         d.value_or(kInt64));
         });
  b.bind("full", "size fill_value dtype=none device=none",
         [](const Dims& s, double v, std::optional<DType> d, std::optional<std::string>) {
           return full(s, v, d.value_or(kFloat32));
         });
  b.bind("ones", "size dtype=none device=none",
         [](const Dims& s, std::optional<DType> d, std::optional<std::string>) {
           return ones(s, d.value_or(kFloat32));
         });
  b.bind("zeros", "size dtype=none device=none",
         [](const Dims& s, std::optional<DType> d, std::optional<std::string>) {
           return zeros(s, d.value_or(kFloat32));
         });
}

}  // namespace

const Bindings& op_bindings() {
  static const Bindings all = [] {
    Bindings b;
    bind_pointwise(b), bind_reductions(b), bind_views(b), bind_structured(b), bind_creation(b);
    return b;
  }();
  return all;
}

}  // namespace sherd::test
