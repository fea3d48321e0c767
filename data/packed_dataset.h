// PackedDataset: documents side by side in sequences of one length, with what keeps them apart, so
// that short ones waste no computation. Krell et al.: Efficient Sequence Packing without
// Cross-contamination. arXiv 2107.02027.
//
//     auto packed = data::PackedDataset::from_tokens(tokens, /*end_id=*/0, {.sequence_length = 128});
//     for (auto& batch : loader) {
//       Tensor hidden = data::hidden_documents(batch.at("document_ids"), heads);
//       Tensor h = attention(x, x, x, {.attn_mask = hidden}).output;
//       ...
//       Tensor loss = F::cross_entropy(logits, batch.at("labels").view({-1}));   // -100: ignored
//
// A document of n tokens makes n - 1 places: a token and the one to predict. Documents of more than
// T places are cut in parts of T, of which no label is lost. Parts are packed by best fit, the
// longest first: which go together follows from their lengths alone.
#pragma once
#include <span>
#include <vector>

#include "data/dataset.h"

namespace sherd::data {

struct PackedOptions {
  int64_t sequence_length = 0;  // T, at least 1
  int64_t vocab_size = 65536;
  int64_t pad_id = 0;  // token of the places that are left over
};

class PackedDataset : public Dataset {
 public:
  // Documents of fewer than 2 tokens have nothing to predict, and are left out. Error if nothing is
  // left, or an id is not below vocab_size (names document and position).
  PackedDataset(std::vector<std::vector<uint16_t>> documents, const PackedOptions& options);
  // Of a run of tokens in which each document ends with end_id, which is predicted too.
  static PackedDataset from_tokens(std::span<const uint16_t> tokens, uint16_t end_id,
                                   const PackedOptions& options);

  int64_t size() const override { return int64_t(rows_.size()); }
  // int64 [T] each: input_ids; labels, -100 at what is left over; document_ids: 0, 1, … in this
  // sequence, -1 at what is left over; position_ids: of a place in its
  // part.
  Sample get(int64_t index) const override;
  uint64_t fingerprint() const override;  // of sequence_length and all tokens
  double fill() const;                    // share of places that are used

 private:
  struct Part {
    int64_t document, begin, length;  // places
  };
  std::vector<std::vector<uint16_t>> documents_;
  PackedOptions options_;
  std::vector<std::vector<Part>> rows_;
};

// Who sees whom: a place sees those of its own document, up to itself if causal; what is left over
// sees itself, so that no row is empty. document_ids: int64 [B, T], or [T] for B = 1.
//
// bool [B, 1, T, T], true: visible. For F::scaled_dot_product_attention.
Tensor visible_documents(const Tensor& document_ids, bool causal = true);
// bool [B H, T, T], true: hidden. For nn::MultiheadAttention's attn_mask.
Tensor hidden_documents(const Tensor& document_ids, int64_t heads, bool causal = true);

}  // namespace sherd::data
