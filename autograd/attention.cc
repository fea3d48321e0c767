#include "core/attention.h"

#include <cmath>

#include "autograd/engine.h"
#include "autograd/ops.h"
#include "autograd/record.h"

namespace sherd {
using autograd::alias, autograd::kOutput, autograd::Needs, autograd::record, autograd::Saved;
namespace {

double scale_of(const Tensor& q, const AttentionArguments& a) {
  return a.scale.value_or(1 / std::sqrt(double(std::max<int64_t>(1, q.size(-1)))));
}

// [.., T, D] as [B, H, T, D]: missing leading dimensions are 1, further ones are folded into B.
Tensor four(const Tensor& x) {
  if (x.dim() == 4) return x;
  if (x.dim() == 3) return x.unsqueeze(1);
  if (x.dim() == 2) return x.unsqueeze(0).unsqueeze(0);
  return x.reshape({-1, x.size(-3), x.size(-2), x.size(-1)});
}

// The leading dimensions, broadcast.
Dims lead_of(const Tensor& q, const Tensor& k, const Tensor& v) {
  auto lead = [](const Tensor& x) { return Dims(std::span(x.sizes().d, size_t(x.dim() - 2))); };
  constexpr auto op = "scaled_dot_product_attention";
  return broadcast(broadcast(lead(q), lead(k), op), lead(v), op);
}

void check(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionArguments& a) {
  constexpr auto op = "[scaled_dot_product_attention] ";
  if (q.dim() < 2 || k.dim() < 2 || v.dim() < 2)
    fail(op, "inputs need at least two dimensions: ", q.sizes(), ", ", k.sizes(), ", ", v.sizes());
  if (q.dtype() != k.dtype() || q.dtype() != v.dtype() || !is_float(q.dtype()))
    fail(op, "query, key and value must have one floating point dtype, got ", q.dtype(), ", ",
         k.dtype(), ", ", v.dtype());
  if (q.size(-1) != k.size(-1))
    fail(op, "query ", q.sizes(), " and key ", k.sizes(), " differ in their last size");
  if (k.size(-2) != v.size(-2))
    fail(op, "key ", k.sizes(), " and value ", v.sizes(), " differ in length");
  if (a.mask.defined() && a.is_causal)
    fail(op, "a mask and is_causal exclude each other: put the causal mask into the mask");
  if (a.mask.defined() && a.mask.dtype() != kBool && !is_float(a.mask.dtype()))
    fail(op, "the mask must be bool or floating point, got ", a.mask.dtype());
  if (a.mask.defined()) {
    Dims scores = lead_of(q, k, v);
    scores.push(q.size(-2)), scores.push(k.size(-2));
    if (!(broadcast(a.mask.sizes(), scores, "scaled_dot_product_attention") == scores))
      fail(op, "the mask ", a.mask.sizes(), " does not broadcast to the scores' shape ", scores);
  }
  if (a.dropout_p < 0 || a.dropout_p > 1)
    fail(op, "dropout_p must be in [0, 1], got ", a.dropout_p);
}

}  // namespace

Tensor scaled_dot_product_attention_composed(const Tensor& q, const Tensor& k, const Tensor& v,
                                             const AttentionArguments& a) {
  check(q, k, v, a);
  if (size_of(q.dtype()) < 4)  // large scores in 16 bits lose what tells keys apart
    return scaled_dot_product_attention_composed(q.to(kFloat32), k.to(kFloat32), v.to(kFloat32), a)
        .to(q.dtype());
  if (k.size(-2) == 0) return matmul(matmul(q, k.transpose(-1, -2)), v);  // nothing to see: zeros
  Tensor scores = matmul(q, k.transpose(-1, -2)) * scale_of(q, a);
  const int64_t t = q.size(-2), s = k.size(-2);
  Tensor hidden;  // true where a key is not seen
  if (a.is_causal)
    hidden = arange(t).to(q.device()).unsqueeze(1) < arange(s).to(q.device()).unsqueeze(0);
  else if (a.mask.defined() && a.mask.dtype() == kBool)
    hidden = a.mask == Tensor(false);
  else if (a.mask.defined())
    scores = scores + a.mask.to(scores.dtype());
  if (hidden.defined()) scores = where(hidden, Tensor(-INFINITY), scores);
  // A row without any visible key: its weights are 0, and so is its gradient.
  const Tensor blind = amax(scores, {-1}, true).detach() == Tensor(-INFINITY);
  Tensor weights =
      where(blind, Tensor(0.0), softmax_composed(where(blind, Tensor(0.0), scores), -1));
  if (a.dropout_p > 0) weights = dropout(weights, a.dropout_p);
  return matmul(weights, v);
}

Tensor scaled_dot_product_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                    const AttentionArguments& a) {
  check(query, key, value, a);
  const int64_t t = query.size(-2), s = key.size(-2);
  if (a.dropout_p > 0 || (a.mask.defined() && a.mask.requires_grad()) || s == 0 ||
      query.size(-1) == 0)
    return scaled_dot_product_attention_composed(query, key, value, a);
  const Dims lead = lead_of(query, key, value);
  auto with = [&](const Tensor& x) {
    Dims d = lead;
    d.push(x.size(-2)), d.push(x.size(-1));
    return x.sizes() == d ? x : x.expand(d);
  };
  const Tensor qx = with(query), kx = with(key), vx = with(value);
  const Tensor q = four(qx), k = four(kx), v = four(vx);
  AttentionOptions options{a.is_causal, scale_of(query, a), {}};
  if (a.mask.defined()) {
    Dims full = lead;
    full.push(t), full.push(s);
    NoGrad off;
    const Tensor m = a.mask.detach();
    options.mask = (m.dim() <= 4 && lead.n <= 2 && lead.n != 1) ? m : m.expand(full);
    if (lead.n == 1 || lead.n > 2) options.mask = four(options.mask);
    while (options.mask.dim() < 4) options.mask = options.mask.unsqueeze(0);
    options.mask = options.mask.detach();
  }
  Tensor y = empty({q.size(0), q.size(1), t, v.size(-1)}, q.dtype(), q.device());
  Tensor lse =
      empty({q.size(0), q.size(1), t}, q.dtype() == kFloat64 ? kFloat64 : kFloat32, q.device());
  if (y.numel())
    attention_forward(q.device(), q.dtype())(q.detach(), k.detach(), v.detach(), options, y, lse);
  const Tensor result = record<3>(
      "scaled_dot_product_attention", y, {&q, &k, &v},
      [q = Saved(q), k = Saved(k), v = Saved(v), mask = Saved(a.mask), y = Saved(y, kOutput), lse,
       options, a](const Tensor& g, Needs needs) {
        const Tensor qv = q.get(), kv = k.get(), vv = v.get();
        mask.get();  // unchanged since, or an error
        std::array<Tensor, 3> r;
        if (grad_enabled()) {
          AttentionArguments four_dims = a;
          four_dims.mask = options.mask;
          four_dims.scale = options.scale;
          const Tensor in[] = {alias(qv), alias(kv), alias(vv)};
          const Tensor out = scaled_dot_product_attention_composed(in[0], in[1], in[2], four_dims);
          std::vector<Tensor> inputs;
          for (int i = 0; i < 3; ++i)
            if (needs[i]) inputs.push_back(in[i]);
          auto grads = grad({out}, inputs, {g}, {.create_graph = true});
          for (int i = 0, j = 0; i < 3; ++i)
            if (needs[i]) r[i] = grads[j++];
          return r;
        }
        r = {empty(qv.sizes(), qv.dtype(), qv.device()), empty(kv.sizes(), kv.dtype(), kv.device()),
             empty(vv.sizes(), vv.dtype(), vv.device())};
        if (y.get().numel() == 0 || qv.numel() == 0)  // nothing flows back
          for (auto& t : r) copy_raw(t, Tensor(0.0));
        else
          attention_backward(qv.device(), qv.dtype())(g.detach(), qv.detach(), kv.detach(),
                                                      vv.detach(), y.get(), lse, options, r[0],
                                                      r[1], r[2]);
        return r;
      });
  Dims sizes = lead;
  sizes.push(t), sizes.push(value.size(-1));
  return result.sizes() == sizes ? result : result.reshape(sizes);
}

Tensor packed_self_attention(const Tensor& qkv, int64_t heads, const Tensor& mask, bool is_causal) {
  if (qkv.dim() != 3 || heads < 1 || qkv.size(2) % (3 * heads) != 0)
    fail("[packed_self_attention] expected [B, T, 3 C] with C a multiple of ", heads,
         " heads, got ", qkv.sizes());
  if (!is_float(qkv.dtype()))
    fail("[packed_self_attention] needs a floating point tensor, not ", qkv.dtype());
  const int64_t b = qkv.size(0), t = qkv.size(1), c = qkv.size(2) / 3, d = c / heads;
  if (mask.defined() && is_causal)
    fail(
        "[packed_self_attention] a mask and is_causal exclude each other: put the causal mask into "
        "the mask");
  if (mask.defined() &&
      !(broadcast(mask.sizes(), {b, heads, t, t}, "packed_self_attention") == Dims{b, heads, t, t}))
    fail("[packed_self_attention] mask ", mask.sizes(), " does not broadcast to ",
         Dims{b, heads, t, t});
  const Tensor x = qkv.contiguous();
  auto part = [=](const Tensor& p, int i) {  // [B, H, T, D] of the packed [B, T, 3 C]
    return p.as_strided_raw({b, heads, t, d}, {t * 3 * c, d, 3 * c, 1}, p.storage_offset() + i * c);
  };
  auto merged = [=](const Tensor& p) {  // [B, H, T, D] of [B, T, C]
    return p.as_strided_raw({b, heads, t, d}, {t * c, d, c, 1}, p.storage_offset());
  };
  AttentionOptions options{is_causal, 1 / std::sqrt(double(std::max<int64_t>(1, d))), {}};
  if (mask.defined()) {
    NoGrad off;
    options.mask = mask.detach();
    while (options.mask.dim() < 4) options.mask = options.mask.unsqueeze(0).detach();
  }
  Tensor y = empty({b, t, c}, x.dtype(), x.device());
  Tensor lse = empty({b, heads, t}, x.dtype() == kFloat64 ? kFloat64 : kFloat32, x.device());
  if (y.numel())
    attention_forward(x.device(), x.dtype())(part(x, 0), part(x, 1), part(x, 2), options, merged(y),
                                             lse);
  return record<1>("packed_self_attention", y, {&x},
                   [x = Saved(x), mask = Saved(mask), y = Saved(y, kOutput), lse, options, part,
                    merged, heads, b, t, c, d](const Tensor& g, Needs) {
                     const Tensor xv = x.get();
                     mask.get();
                     if (grad_enabled()) {
                       const Tensor own = alias(xv);
                       auto in = own.reshape({b, t, 3, heads, d}).permute({2, 0, 3, 1, 4});
                       AttentionArguments a{options.mask, 0, options.causal, options.scale};
                       const Tensor out = scaled_dot_product_attention_composed(
                                              in.select(0, 0), in.select(0, 1), in.select(0, 2), a)
                                              .transpose(1, 2)
                                              .reshape({b, t, c});
                       return std::array{grad({out}, {own}, {g}, {.create_graph = true})[0]};
                     }
                     Tensor dx = empty(xv.sizes(), xv.dtype(), xv.device());
                     if (dx.numel())
                       attention_backward(xv.device(), xv.dtype())(
                           merged(contiguous_raw(g)), part(xv, 0), part(xv, 1), part(xv, 2),
                           merged(y.get()), lse, options, part(dx, 0), part(dx, 1), part(dx, 2));
                     return std::array{dx};
                   });
}

}  // namespace sherd
