// The training program that the API is made for compiles and runs as written (with small sizes, on
// one rank).
#include <gtest/gtest.h>

#include "sherd.h"

namespace {
using namespace sherd;

class LargeTransformerBlock : public nn::Module {
 public:
  LargeTransformerBlock(int64_t dim, int64_t ff_dim)
      : layer_norm(add<nn::LayerNorm>("layer_norm", dim)),
        attention(add<nn::MultiheadAttention>("attention", dim, 8)),
        ffn(add<nn::Sequential>("ffn", nn::Linear(dim, ff_dim), nn::ReLU(),
                                nn::Linear(ff_dim, dim))) {}

  Tensor forward(const Tensor& x) {
    Tensor h = layer_norm(x + attention(x, x, x).output);
    return h + ffn(h);
  }

  nn::Child<nn::LayerNorm> layer_norm;
  nn::Child<nn::MultiheadAttention> attention;
  nn::Child<nn::Sequential> ffn;
};

class BigModel : public nn::Module {
 public:
  BigModel(int64_t layers, int64_t dim, int64_t ff_dim, int64_t vocab)
      : embedding(add<nn::Embedding>("embedding", vocab, dim)),
        layers(add<nn::ModuleList<LargeTransformerBlock>>("layers")),
        output_head(add<nn::Linear>("output_head", dim, vocab)) {
    for (int64_t i = 0; i < layers; ++i) this->layers->append(dim, ff_dim);
  }
  Tensor forward(const Tensor& ids) {
    Tensor x = embedding(ids);
    for (auto& layer : *layers) x = layer(x);
    return output_head(x);
  }
  nn::Child<nn::Embedding> embedding;
  nn::Child<nn::ModuleList<LargeTransformerBlock>> layers;
  nn::Child<nn::Linear> output_head;
};

TEST(Api, TheTrainingProgramOfTheDesign) {
  const int64_t vocab = 50, epochs = 2;
  std::vector<uint16_t> tokens;
  for (int i = 0; i < 16 * 16 + 1; ++i) tokens.push_back(uint16_t(i * 7 % vocab));
  data::TokenDataset dataset(tokens, {.sequence_length = 16, .vocab_size = vocab});

  dist::init_process_group({.backend = "gloo", .rank = 0, .world_size = 1});
  Device device = dist::local_device();
  BigModel model(/*layers=*/2, /*dim=*/32, /*ff_dim=*/64, vocab);
  FullyShardedDataParallel fsdp(
      model, {.auto_wrap_policy = size_based_auto_wrap_policy(1'000),
              .sharding_strategy = ShardingStrategy::kFullShard,
              .mixed_precision = {.param_dtype = kBFloat16, .reduce_dtype = kFloat32},
              .device = device});
  optim::AdamW optimizer(fsdp.parameters(), {.lr = 1e-2});
  data::DistributedSampler sampler(dataset.size(),
                                   {.num_replicas = dist::world_size(), .rank = dist::rank()});
  data::DataLoader loader(
      dataset, {.batch_size = 8, .sampler = &sampler, .num_workers = 4, .pin_memory = true});
  std::vector<double> losses;
  for (int64_t epoch = 0; epoch < epochs; ++epoch) {
    sampler.set_epoch(epoch);
    for (auto& batch : loader) {
      optimizer.zero_grad();
      Tensor logits = fsdp(batch.at("input_ids").to(device));
      Tensor loss =
          F::cross_entropy(logits.view({-1, vocab}), batch.at("labels").to(device).view({-1}));
      loss.backward();
      fsdp.clip_grad_norm_(1.0);
      optimizer.step();
      losses.push_back(loss.item());
    }
  }
  dist::destroy_process_group();
  EXPECT_EQ(losses.size(), 4u);
  EXPECT_LT(losses.back(), losses.front());
  for (auto& [name, p] : fsdp.named_parameters())
    EXPECT_EQ(p.dtype(), kFloat32) << name;  // master weights
}

}  // namespace
