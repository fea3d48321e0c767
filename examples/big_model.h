// BigModel: a decoder of N blocks between an embedding and a linear head. No distributed code: how
// it is spread over ranks is the training program's business (big_model.cc).
#pragma once
#include "sherd.h"

namespace examples {

using namespace sherd;

// x = LN(x + MHA(x)); x = x + FFN(x).
class LargeTransformerBlock : public nn::Module {
 public:
  LargeTransformerBlock(int64_t dim, int64_t ff_dim, int64_t heads = 8, bool causal = true)
      : layer_norm(add<nn::LayerNorm>("layer_norm", dim)),
        attention(add<nn::MultiheadAttention>("attention", dim, heads)),
        ffn(add<nn::Sequential>("ffn", nn::Linear(dim, ff_dim), nn::ReLU(),
                                nn::Linear(ff_dim, dim))),
        causal(causal) {}

  // x: [B, T, C] -> [B, T, C]. hidden: what a place does not see, instead of the causal mask.
  Tensor forward(const Tensor& x, const Tensor& hidden = {}) {
    const nn::MultiheadAttentionArguments mask{.attn_mask = hidden,
                                               .is_causal = causal && !hidden.defined()};
    Tensor h = layer_norm(x + attention(x, x, x, mask).output);
    return h + ffn(h);
  }

  nn::Child<nn::LayerNorm> layer_norm;
  nn::Child<nn::MultiheadAttention> attention;
  nn::Child<nn::Sequential> ffn;
  bool causal;
};

struct BigModelOptions {
  int64_t heads = 8;
  bool causal = true;  // without a mask the model sees its labels
  bool activation_checkpointing =
      false;  // keep only the blocks' inputs, compute the rest again in backward
};

class BigModel : public nn::Module {
 public:
  BigModel(int64_t layers, int64_t dim, int64_t ff_dim, int64_t vocab,
           const BigModelOptions& options = {})
      : embedding(add<nn::Embedding>("embedding", vocab, dim)),
        layers(add<nn::ModuleList<LargeTransformerBlock>>("layers")),
        output_head(add<nn::Linear>("output_head", dim, vocab)),
        checkpointed(options.activation_checkpointing) {
    for (int64_t i = 0; i < layers; ++i)
      this->layers->append(dim, ff_dim, options.heads, options.causal);
  }

  // ids: int64 [B, T] -> logits [B, T, V]. hidden: of data::hidden_documents, for packed documents.
  Tensor forward(const Tensor& ids, const Tensor& hidden = {}) {
    Tensor x = embedding(ids);
    for (auto& layer : *layers) {
      // Called again in backward, when the arguments of this call are gone.
      const auto call = [&layer, hidden](const Tensor& h) { return layer(h, hidden); };
      x = checkpointed ? checkpoint(call, x) : call(x);
    }
    return output_head(x);
  }

  nn::Child<nn::Embedding> embedding;
  nn::Child<nn::ModuleList<LargeTransformerBlock>> layers;
  nn::Child<nn::Linear> output_head;
  bool checkpointed;
};

}  // namespace examples
