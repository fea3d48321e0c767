// Scaled dot product attention, y = softmax(scale q k^T + mask) v, a block at a time: the [T, S]
// matrix of scores never exists.
// Dao: FlashAttention-2. arXiv 2307.08691. Rabe, Staats: Self-attention Does Not Need O(n^2)
// Memory.
//
//     attention_forward(q.device(), q.dtype())(q, k, v, {.causal = true, .scale = 0.125}, y, lse);
//     attention_backward(q.device(), q.dtype())(g, q, k, v, y, lse, options, dq, dk, dv);
//
// Legend: B batch, H heads, T queries, S keys, D channels a head, E channels a value.
#pragma once
#include "core/kernel.h"

namespace sherd {

struct AttentionOptions {
  bool causal = false;  // query t sees keys s <= t (PyTorch's is_causal: aligned at the top left)
  double scale = 1;     // usually 1 / sqrt(D)
  // Added to the scores: floating point, [B or 1, H or 1, T or 1, S or 1]; or bool, where false
  // hides a key. Undefined: none. It gets no gradient.
  Tensor mask = {};
};

// q [B, H, T, D], k [B, H, S, D], v [B, H, S, E] of one dtype: float32, bfloat16, float16 (both
// computed in float32) or float64. Any strides: the three may be views of one packed projection
// [B, T, 3 C], and k, v may be expanded over B or H. y [B, H, T, E], any strides, of the same
// dtype; lse [B, H, T] contiguous (log-sum-exp of each row of scores), float32 (float64 for
// float64). A query that sees no key at all gets y = 0 and lse = -inf, and passes no gradient
// (PyTorch's fused kernels; its composed form gives NaN). The same bits for any number of threads.
inline constinit Kernel<void(const Tensor& q, const Tensor& k, const Tensor& v,
                             const AttentionOptions& options, const Tensor& y, const Tensor& lse)>
    attention_forward{"scaled_dot_product_attention"};

// g, y [B, H, T, E]; dq as q, dk as k, dv as v: any strides (they may be views of one packed
// gradient), but no two elements in one place. All three are written.
inline constinit Kernel<void(const Tensor& g, const Tensor& q, const Tensor& k, const Tensor& v,
                             const Tensor& y, const Tensor& lse, const AttentionOptions& options,
                             const Tensor& dq, const Tensor& dk, const Tensor& dv)>
    attention_backward{"scaled_dot_product_attention backward"};

}  // namespace sherd
