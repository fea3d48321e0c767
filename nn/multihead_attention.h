// MultiheadAttention: attention of several heads with projections, batch first.
// Vaswani et al.: Attention Is All You Need. arXiv 1706.03762.
//
//     auto attention = add<nn::MultiheadAttention>("attention", dim, heads);
//     Tensor y = attention(x, x, x, {.is_causal = true}).output;
//
// Legend: B batch, T queries, S keys, C channels, H heads.
#pragma once
#include "nn/linear.h"

namespace sherd::nn {

struct MultiheadAttentionOptions {
  bool bias = true;
  double dropout = 0;  // of the attention weights, in training
  DType dtype = kFloat32;
};

struct MultiheadAttentionArguments {
  // [T, S] or [B H, T, S]: added to the scores, or bool where true HIDES a key (PyTorch's)
  Tensor attn_mask = {};
  Tensor key_padding_mask = {};  // [B, S], bool: true hides a key
  bool is_causal = false;        // query t sees keys up to t
  bool need_weights = false;
  bool average_attn_weights = true;
};

struct MultiheadAttentionResult {
  Tensor output;   // [B, T, C]
  Tensor weights;  // with need_weights: [B, T, S], or [B, H, T, S] if not averaged
};

// Parameters under PyTorch's names: in_proj_weight [3 C, C] (queries, keys, values), in_proj_bias
// [3 C], out_proj.weight [C, C], out_proj.bias [C]; weights Xavier uniform (out_proj as Linear's),
// biases 0.
class MultiheadAttention : public Module {
 public:
  using Options = MultiheadAttentionOptions;
  using Arguments = MultiheadAttentionArguments;
  using Result = MultiheadAttentionResult;
  MultiheadAttention(int64_t embed_dim, int64_t num_heads, const Options& options = {});
  // query [B, T, C], key and value [B, S, C]; or without B.
  Result forward(const Tensor& query, const Tensor& key, const Tensor& value,
                 const Arguments& arguments = {});

  Parameter in_proj_weight, in_proj_bias;
  Child<Linear> out_proj;

 private:
  int64_t dim_, heads_;
  double dropout_;
};

}  // namespace sherd::nn
