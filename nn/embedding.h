// Embedding: rows of a table by index.
#pragma once
#include <optional>

#include "nn/module.h"

namespace sherd::nn {

struct EmbeddingOptions {
  std::optional<int64_t> padding_idx = {};  // starts as zeros and gets no gradient
  DType dtype = kFloat32;
};

// weight [num_embeddings, embedding_dim], normal(0, 1), as PyTorch's.
class Embedding : public Module {
 public:
  using Options = EmbeddingOptions;
  Embedding(int64_t num_embeddings, int64_t embedding_dim, const Options& options = {});
  Tensor forward(const Tensor& indices);  // int64 [..] -> [.., embedding_dim]
  std::string extra_repr() const override;

  Parameter weight;

 private:
  int64_t num_embeddings_, embedding_dim_;
  std::optional<int64_t> padding_idx_;
};

}  // namespace sherd::nn
