#include "nn/embedding.h"

#include "nn/functional.h"

namespace sherd::nn {
namespace {

// Normal, with zeros in the elements [begin, end).
Initializer normal_but_for(int64_t zero_begin, int64_t zero_end) {
  const Initializer normal = init::normal();
  return {[=](uint64_t key, int64_t begin, const Tensor& t) {
    normal.fill(key, begin, t);
    const int64_t lo = std::max(zero_begin, begin), hi = std::min(zero_end, begin + t.numel());
    if (lo < hi)
      copy_raw(t.as_strided_raw({hi - lo}, {1}, t.storage_offset() + lo - begin), Tensor(0));
  }};
}

}  // namespace

Embedding::Embedding(int64_t num_embeddings, int64_t embedding_dim, const Options& options)
    : num_embeddings_(num_embeddings),
      embedding_dim_(embedding_dim),
      padding_idx_(options.padding_idx) {
  if (num_embeddings < 0 || embedding_dim < 0)
    fail("[Embedding] num_embeddings ", num_embeddings, " and embedding_dim ", embedding_dim,
         " must not be negative");
  Initializer init = init::normal();
  if (padding_idx_) {
    if (*padding_idx_ < -num_embeddings || *padding_idx_ >= num_embeddings)
      fail("[Embedding] padding_idx ", *padding_idx_, " is out of range for ", num_embeddings,
           " rows");
    if (*padding_idx_ < 0) *padding_idx_ += num_embeddings;
    init = normal_but_for(*padding_idx_ * embedding_dim, (*padding_idx_ + 1) * embedding_dim);
  }
  weight = parameter("weight", {num_embeddings, embedding_dim}, init, options.dtype);
}

Tensor Embedding::forward(const Tensor& indices) {
  return F::embedding(indices, weight, padding_idx_);
}

std::string Embedding::extra_repr() const {
  const std::string padding = padding_idx_ ? concat(", padding_idx=", *padding_idx_) : "";
  return concat(num_embeddings_, ", ", embedding_dim_, padding);
}

}  // namespace sherd::nn
