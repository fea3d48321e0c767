#include "nn/multihead_attention.h"

#include <cmath>

#include "nn/functional.h"

namespace sherd::nn {

MultiheadAttention::MultiheadAttention(int64_t embed_dim, int64_t num_heads, const Options& options)
    : dim_(embed_dim), heads_(num_heads), dropout_(options.dropout) {
  if (num_heads < 1 || embed_dim < 1 || embed_dim % num_heads != 0)
    fail("[MultiheadAttention] embed_dim ", embed_dim, " must be a multiple of num_heads ",
         num_heads);
  in_proj_weight = parameter("in_proj_weight", {3 * dim_, dim_},
                             init::xavier_uniform(dim_, 3 * dim_), options.dtype);
  if (options.bias)
    in_proj_bias = parameter("in_proj_bias", {3 * dim_}, init::zeros(), options.dtype);
  // PyTorch's out_proj starts as a Linear, but for its bias, which it sets to zero.
  Linear out(dim_, dim_, {.bias = options.bias, .dtype = options.dtype});
  if (options.bias) out.bias.slot().init = init::zeros();
  out_proj = adopt("out_proj", std::make_unique<Linear>(std::move(out)));
}

MultiheadAttention::Result MultiheadAttention::forward(const Tensor& query, const Tensor& key,
                                                       const Tensor& value, const Arguments& a) {
  if (query.dim() == 2 && key.dim() == 2 && value.dim() == 2) {
    Arguments batched = a;
    if (a.key_padding_mask.defined()) batched.key_padding_mask = a.key_padding_mask.unsqueeze(0);
    Result r = forward(query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), batched);
    return {r.output.squeeze(0), r.weights.defined() ? r.weights.squeeze(0) : Tensor()};
  }
  if (query.dim() != 3 || key.dim() != 3 || value.dim() != 3 || query.size(2) != dim_ ||
      key.size(2) != dim_ || value.size(2) != dim_ || !(key.sizes() == value.sizes()) ||
      key.size(0) != query.size(0))
    fail("[MultiheadAttention] ", full_name(), ": query ", query.sizes(), ", key ", key.sizes(),
         " and value ", value.sizes(), " do not fit: expected [B, T, ", dim_, "], [B, S, ", dim_,
         "] and [B, S, ", dim_, "]");
  const int64_t b = query.size(0), t = query.size(1), s = key.size(1), d = dim_ / heads_;
  const Tensor w = in_proj_weight, bias = in_proj_bias.defined() ? in_proj_bias.get() : Tensor();

  for (const Tensor* m : {&a.attn_mask, &a.key_padding_mask})
    if (m->defined() && m->dtype() != kBool && !is_float(m->dtype()))
      fail("[MultiheadAttention] ", full_name(), ": a mask is ", m->dtype(),
           ", should be bool (true hides) or floating point (added to the scores)");
  // One additive mask of all that hides keys.
  Tensor mask;
  auto hide = [&](const Tensor& m) {
    const Tensor added = m.dtype() == kBool
                             ? where(m, Tensor(-INFINITY), Tensor(0.0)).to(query.dtype())
                             : m.to(query.dtype());
    mask = mask.defined() ? mask + added : added;
  };
  if (a.attn_mask.defined()) {
    const Dims &shape = a.attn_mask.sizes(), all{b * heads_, t, s};
    if (!(shape == all) && !(shape == Dims{t, s}))
      fail("[MultiheadAttention] ", full_name(), ": attn_mask ", shape, " does not fit: expected ",
           Dims{t, s}, " or ", all);
    hide(shape.n == 3 ? a.attn_mask.reshape({b, heads_, t, s}) : a.attn_mask);
  }
  if (a.key_padding_mask.defined()) {
    if (!(a.key_padding_mask.sizes() == Dims{b, s}))
      fail("[MultiheadAttention] ", full_name(), ": key_padding_mask ", a.key_padding_mask.sizes(),
           " does not fit: expected ", Dims{b, s});
    hide(a.key_padding_mask.reshape({b, 1, 1, s}));
  }
  bool causal = a.is_causal;
  if (causal && (mask.defined() || a.need_weights)) {
    hide(arange(t).to(query.device()).unsqueeze(1) < arange(s).to(query.device()).unsqueeze(0));
    causal = false;
  }

  const double dropout_p = is_training() ? dropout_ : 0;
  const bool self = query.is_same(key) && key.is_same(value);
  if (self && !a.need_weights && dropout_p == 0 && (!mask.defined() || !mask.requires_grad())) {
    const Tensor y = packed_self_attention(F::linear(query, w, bias), heads_, mask, causal);
    return {out_proj(y), {}};
  }
  auto project = [&](const Tensor& x, int i) {  // [B, n, C] -> [B, H, n, D]
    const Tensor y = F::linear(x, w.narrow(0, i * dim_, dim_),
                               bias.defined() ? bias.narrow(0, i * dim_, dim_) : Tensor());
    return y.view({b, x.size(1), heads_, d}).transpose(1, 2);
  };
  const Tensor q = project(query, 0), k = project(key, 1), v = project(value, 2);
  Result result;
  Tensor y;
  if (a.need_weights) {
    Tensor scores = sherd::matmul(q, k.transpose(-1, -2)) * (1 / std::sqrt(double(d)));
    if (mask.defined()) scores = scores + mask;
    Tensor p = softmax(scores, -1);
    if (dropout_p > 0) p = F::dropout(p, dropout_p);
    y = sherd::matmul(p, v);
    result.weights = a.average_attn_weights ? p.mean({1}) : p;
  } else {
    y = F::scaled_dot_product_attention(
        q, k, v, {.mask = mask, .dropout_p = dropout_p, .is_causal = causal});
  }
  result.output = out_proj(y.transpose(1, 2).reshape({b, t, dim_}));
  return result;
}

}  // namespace sherd::nn
