// The differentiable operators, under PyTorch's names and with its semantics: broadcasting,
// promotion, negative dimensions. Each is a free function that records on the tape; those of a
// module's flavour (cross_entropy, ...) are also in nn/functional.h.
//
//     Tensor y = gelu(matmul(x, w) + b);
//     Tensor loss = mean((y - target) * (y - target));
//
// Legend: B batch, T time, S keys, C channels, H heads, D channels a head, V classes, N rows.
// Errors name the op in brackets and the shapes. How to add one: CONTRIBUTING.md.
#pragma once
#include <concepts>
#include <optional>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace sherd {

// ---- pointwise, two inputs (broadcast)
Tensor add(const Tensor& a, const Tensor& b, double alpha = 1);  // a + alpha b
Tensor sub(const Tensor& a, const Tensor& b, double alpha = 1);  // a - alpha b
Tensor mul(const Tensor& a, const Tensor& b);
Tensor div(const Tensor& a, const Tensor& b);  // true division: integers become float32
Tensor pow(const Tensor& a, const Tensor& b);
Tensor maximum(const Tensor& a, const Tensor& b);  // NaN wins; equal values share the gradient
Tensor minimum(const Tensor& a, const Tensor& b);
Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b);
Tensor masked_fill(const Tensor& x, const Tensor& mask, double value);  // value where mask is true

// ---- pointwise, one input
Tensor neg(const Tensor& x);
Tensor abs(const Tensor& x);
Tensor exp(const Tensor& x);
Tensor log(const Tensor& x);
Tensor sqrt(const Tensor& x);
Tensor tanh(const Tensor& x);
Tensor erf(const Tensor& x);
Tensor sigmoid(const Tensor& x);
Tensor clamp(const Tensor& x, double min, double max);
Tensor relu(const Tensor& x);
Tensor leaky_relu(const Tensor& x, double slope = 0.01);
Tensor silu(const Tensor& x);
// x Phi(x); approximate "none", or "tanh". Hendrycks, Gimpel: GELUs. arXiv 1606.08415.
Tensor gelu(const Tensor& x, const std::string& approximate = "none");

// ---- reductions; no dims: over all. Sums of integers are int64.
Tensor sum(const Tensor& x, const Dims& dims = {}, bool keepdim = false);
Tensor mean(const Tensor& x, const Dims& dims = {}, bool keepdim = false);
Tensor norm(const Tensor& x, const Dims& dims = {}, bool keepdim = false);  // 2-norm
Tensor amax(const Tensor& x, const Dims& dims = {},
            bool keepdim = false);  // ties share the gradient
Tensor argmax(const Tensor& x, const Dims& dims = {},
              bool keepdim = false);  // int64; first of equals
Tensor var(const Tensor& x, const Dims& dims = {}, double correction = 1, bool keepdim = false);

// ---- joining and cutting
Tensor cat(const std::vector<Tensor>& tensors, int64_t dim = 0);
Tensor stack(const std::vector<Tensor>& tensors, int64_t dim = 0);
std::vector<Tensor> split(const Tensor& x, int64_t size,
                          int64_t dim = 0);  // views; the last may be smaller
std::vector<Tensor> split(const Tensor& x, const Dims& sizes, int64_t dim = 0);
std::vector<Tensor> chunk(const Tensor& x, int64_t chunks, int64_t dim = 0);

// ---- products
// As torch.matmul: [.., M, K] x [.., K, N] with broadcast batches; vectors allowed on either side.
Tensor matmul(const Tensor& a, const Tensor& b);
// x [.., I] weight [O, I]^T + bias [O] -> [.., O]; bias may be undefined. A weight [I] gives [..].
Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias = {});

// ---- structured
Tensor softmax(const Tensor& x, int64_t dim);
Tensor log_softmax(const Tensor& x, int64_t dim);
// (x - mean) / sqrt(var + eps) weight + bias over the trailing dimensions `shape`; weight and bias
// may be undefined.
Tensor layer_norm(const Tensor& x, const Dims& shape, const Tensor& weight = {},
                  const Tensor& bias = {}, double eps = 1e-5);
// Rows of weight [V, C] by indices [..] (int64 or int32) -> [.., C]. The row padding_idx gets no
// gradient.
Tensor embedding(const Tensor& indices, const Tensor& weight,
                 std::optional<int64_t> padding_idx = {});

enum class Reduction { kNone, kMean, kSum };
struct CrossEntropyArguments {
  Tensor weight = {};  // [V]; undefined: all 1
  int64_t ignore_index = -100;
  Reduction reduction =
      Reduction::kMean;  // mean: over the weights of the targets that are not ignored
  double label_smoothing = 0;
};
// logits [N, V], [N, V, d1, ..] or [V]; targets: int64 class indices of the same shape without V,
// or probabilities of the same shape (their mean is over all rows; ignore_index has no meaning
// there).
Tensor cross_entropy(const Tensor& logits, const Tensor& targets,
                     const CrossEntropyArguments& arguments = {});
Tensor mse_loss(const Tensor& input, const Tensor& target, Reduction reduction = Reduction::kMean);

struct AttentionArguments {
  Tensor mask = {};      // added to the scores, or bool (true: visible); broadcasts to [B, H, T, S]
  double dropout_p = 0;  // of the attention weights
  bool is_causal = false;            // query t sees keys up to t; excludes a mask
  std::optional<double> scale = {};  // default 1 / sqrt(D)
};
// softmax(scale q k^T + mask) v. query [.., T, D], key [.., S, D], value [.., S, E] -> [.., T, E].
// A query that sees no key gives 0.
Tensor scaled_dot_product_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                    const AttentionArguments& arguments = {});
// The same of one packed projection [B, T, 3 C] (queries, keys, values side by side, `heads` heads)
// -> [B, T, C].
Tensor packed_self_attention(const Tensor& qkv, int64_t heads, const Tensor& mask = {},
                             bool is_causal = false);
// Zeroes elements with probability p and scales the others by 1 / (1 - p); the identity unless
// training.
Tensor dropout(const Tensor& x, double p = 0.5, bool training = true);

// ---- creation
Tensor arange(int64_t end);  // int64: 0, 1, ..
Tensor arange(double start, double end, double step = 1, DType dtype = kFloat32);
template <std::integral A, std::integral B, std::integral C = int>
Tensor arange(A start, B end, C step = 1, DType dtype = kInt64) {
  return arange(double(start), double(end), double(step), dtype);
}
Tensor rand(const Dims& sizes,
            DType dtype = kFloat32);  // uniform in [0, 1), from the context's generator
Tensor randn(const Dims& sizes, DType dtype = kFloat32);       // normal
Tensor randint(int64_t low, int64_t high, const Dims& sizes);  // int64 in [low, high)
Tensor causal_mask(int64_t t, DType dtype = kFloat32);  // [T, T]: -inf above the diagonal, else 0

// The composed definitions of fused operators, from public ops: what a graph of the gradient uses,
// and tests compare to.
Tensor softmax_composed(const Tensor& x, int64_t dim);
Tensor log_softmax_composed(const Tensor& x, int64_t dim);
Tensor layer_norm_composed(const Tensor& x, const Dims& shape, const Tensor& weight = {},
                           const Tensor& bias = {}, double eps = 1e-5);
Tensor cross_entropy_composed(const Tensor& logits, const Tensor& targets,
                              const CrossEntropyArguments& arguments = {});
Tensor scaled_dot_product_attention_composed(const Tensor& query, const Tensor& key,
                                             const Tensor& value,
                                             const AttentionArguments& arguments = {});

}  // namespace sherd
