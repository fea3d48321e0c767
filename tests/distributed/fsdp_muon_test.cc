// Muon on sharded matrices: the bits of DDP, whoever orthogonalises what.
#include "tests/distributed/scenario.h"

namespace sherd::scenario {
namespace {

bool is_hidden(const std::string& name) {  // the blocks' matrices
  return name.find("layers") != std::string::npos && name.ends_with("weight") &&
         name.find("norm") == std::string::npos;
}

Optimizers muon_and_adamw(const nn::Module::NamedTensors& parameters) {
  optim::Optimizer::NamedTensors hidden, others;
  for (auto& [name, p] : parameters) (is_hidden(name) ? hidden : others).emplace_back(name, p);
  Optimizers result;
  result.push_back(std::make_unique<optim::Muon>(hidden, optim::MuonOptions{.lr = 0.02}));
  result.push_back(std::make_unique<optim::AdamW>(others, optim::AdamWOptions{.lr = 1e-2}));
  return result;
}

Scenario gpt() {
  return {.make =
              [] {
                return instance(std::make_shared<Gpt>(), [](Gpt& m, int rank, int step) {
                  const Tensor ids = random_ids({2, 9}, 8, rank, step);
                  const Tensor logits = nn::call(m, ids.narrow(1, 0, 8));
                  return F::cross_entropy(logits.view({-1, 8}), ids.narrow(1, 1, 8).reshape({-1}));
                });
              },
          .steps = 6,
          .optimizers = muon_and_adamw};
}

FsdpOptions blocks(ShardingStrategy strategy) {
  return {.auto_wrap_policy = module_wrap_policy<GptBlock>(), .sharding_strategy = strategy};
}

TEST(Muon, ShardedMatricesGetTheBitsOfDdp) {
  for (int world : {2, 3, 4}) {
    const Result ddp = train(gpt(), ddp_way(), world);
    for (ShardingStrategy strategy : kStrategies)
      expect_same_bits(train(gpt(), fsdp_way(blocks(strategy)), world), ddp);
    // One unit: its matrices are cut at other places.
    expect_same_bits(train(gpt(), fsdp_way({}), world), ddp);
  }
}

TEST(Muon, HybridShardsGetTheBitsOfDdp) {
  const Result ddp = train(gpt(), ddp_way(), 4);
  expect_same_bits(train(gpt(), hybrid_way(blocks(ShardingStrategy::kFullShard), 2), 4), ddp);
}

TEST(Muon, LearnsAsInOneProcess) {
  // Gradients differ in their last bits, and updates then by a rounding to bfloat16 of a direction:
  // 2^-8 of an lr of 0.02 in a step, in six of them.
  expect_close(train(gpt(), fsdp_way(blocks(ShardingStrategy::kFullShard)), 2),
               train(gpt(), one_process(), 2), 5e-3, 5e-4);
}

// A matrix without gradients in a step is left alone on all ranks, with its momentum: in even
// steps, before which gradients are set to none.
TEST(Muon, MatricesThatAStepDoesNotUse) {
  struct TwoWays : nn::Module {
    TwoWays() : a(add<nn::Linear>("layers_a", 6, 6)), b(add<nn::Linear>("layers_b", 6, 6)) {}
    nn::Child<nn::Linear> a, b;
    Tensor forward(const Tensor& x, int step) { return step % 2 ? b(a(x)) : a(x); }
  };
  Scenario s{.make =
                 [] {
                   return instance(std::make_shared<TwoWays>(), [](TwoWays& m, int rank, int step) {
                     const Tensor y = nn::call(m, random_input({4, 6}, rank, step), step);
                     return (y * y).mean();
                   });
                 },
             .steps = 5,
             .optimizers = muon_and_adamw};
  const Way way = fsdp_way({.auto_wrap_policy = module_wrap_policy<nn::Linear>()});
  expect_close(train(s, way, 2), train(s, one_process(), 2), 5e-3, 5e-4);
}

TEST(Muon, NamesTheParameterThatIsNoMatrix) {
  run_ranks(2, [](int) {
    Gpt gpt;
    const FsdpModule sharded(gpt, {});
    expect_error([&] { optim::Muon muon(sharded.parameters()); },
                 {"[muon] parameter ", "has shape [16]", "AdamW"});
  });
}

}  // namespace
}  // namespace sherd::scenario
