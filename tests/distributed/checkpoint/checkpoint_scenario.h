// A model that trains in a world of some ranks, and its checkpoints in a folder that the test
// removes.
#pragma once
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "core/generator.h"
#include "core/safetensors.h"
#include "distributed/checkpoint/checkpointer.h"
#include "distributed/ddp.h"
#include "distributed/fsdp.h"
#include "nn/nn.h"
#include "optim/adamw.h"
#include "tests/distributed/scenario.h"
#include "tests/errors.h"

namespace sherd::dist {

namespace fs = std::filesystem;
using scenario::Gpt;

class Checkpoints : public testing::Test {
 protected:
  void SetUp() override {
    const auto* t = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = fs::path(testing::TempDir()) / concat("checkpointer-", t->name(), "-", int(getpid()));
    fs::remove_all(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string folder(const char* name = "run") const { return folder_ / name; }

  fs::path folder_;
};

inline void expect_parts(const std::string& text, const std::vector<std::string>& parts) {
  for (auto& part : parts) EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
}

// How a model is spread over ranks.
struct Spread {
  int world;
  const char* name;
  std::optional<FsdpOptions> fsdp;  // none: DDP, or one plain process
};
inline FsdpOptions blocks(ShardingStrategy s = ShardingStrategy::kFullShard) {
  return {.auto_wrap_policy = module_wrap_policy<scenario::GptBlock>(), .sharding_strategy = s};
}

// A model and what trains it, on one rank of a spread. The batch is 24 sequences over all ranks.
class Rank {
 public:
  Rank(const Spread& spread, uint64_t seed, const scenario::GptOptions& o = {.layers = 2})
      : world_(spread.world), vocab_(o.vocab) {
    manual_seed(seed);
    model = std::make_unique<Gpt>(o);
    if (spread.fsdp) {
      FsdpOptions options = *spread.fsdp;
      if (is_hybrid(options.sharding_strategy)) options.device_mesh = scenario::hybrid_mesh(2);
      fsdp = std::make_unique<FsdpModule>(*model, options);
    } else if (world_ > 1) {
      ddp = std::make_unique<DistributedDataParallel<Gpt>>(*model);
    } else {
      model->materialize();
    }
    optimizer =
        std::make_unique<optim::AdamW>(fsdp ? fsdp->named_parameters() : model->named_parameters(),
                                       optim::AdamWOptions{.lr = 1e-2});
    scheduler = std::make_unique<optim::StepLR>(*optimizer, optim::StepOptions{.step_size = 2});
  }

  double loss(int step, bool backward) {
    const int rank = world_ > 1 ? dist::rank() : 0;
    const int64_t mine = 24 / world_;
    const Tensor all = scenario::random_ids({24, 9}, vocab_, 0, step),
                 ids = all.narrow(0, rank * mine, mine);
    Tensor l = F::cross_entropy(nn::call(*model, ids.narrow(1, 0, 8)).view({-1, vocab_}),
                                ids.narrow(1, 1, 8).reshape({-1}));
    if (backward) {
      optimizer->zero_grad();
      l.backward();
    }
    Tensor sum = tensor<double>({l.item() / world_});
    if (world_ > 1) all_reduce(sum);
    return sum.item();
  }
  double train(int step) {
    const double l = loss(step, true);
    optimizer->step();
    scheduler->step();
    return l;
  }

  TrainingState state() {
    return {.model = fsdp ? ModelState(*fsdp)
                          : ModelState(*model, world_ > 1 ? default_group() : nullptr),
            .optimizer = optimizer.get(),
            .scheduler = scheduler.get()};
  }
  // Everything, in PyTorch's names and whole shapes, as bytes; on rank 0.
  std::string everything(const std::string& scratch) {
    TrainingState s = state();
    save_weights(scratch + "-model", s.model);
    save_optimizer(scratch + "-optimizer", s.model, *optimizer);
    if (!s.model.is_rank0()) return "";
    std::string text;
    for (auto* file : {"-model", "-optimizer"})
      for (auto& [name, t] : load_safetensors(scratch + file))
        text += concat(name, t.dtype(), t.sizes(),
                       std::string_view(t.numel() ? t.bytes() : "", size_t(t.nbytes())));
    return text;
  }

  std::unique_ptr<Gpt> model;
  std::unique_ptr<FsdpModule> fsdp;
  std::unique_ptr<DistributedDataParallel<Gpt>> ddp;
  std::unique_ptr<optim::AdamW> optimizer;
  std::unique_ptr<optim::StepLR> scheduler;

 private:
  int world_;
  int64_t vocab_;
};

inline void in_world(const Spread& spread, const std::function<void(Group, int)>& f) {
  if (spread.world == 1 && !spread.fsdp)
    f(nullptr, 0);
  else
    run_ranks(spread.world, [&](int rank) { f(default_group(), rank); });
}

inline const std::vector<Spread>& spreads() {
  static const std::vector<Spread> all{
      {1, "one process", {}},
      {1, "FULL_SHARD", blocks()},
      {2, "FULL_SHARD", blocks()},
      {3, "FULL_SHARD", blocks()},
      {8, "FULL_SHARD", blocks()},
      {4, "root only", FsdpOptions{}},
      {3, "SHARD_GRAD_OP", blocks(ShardingStrategy::kShardGradOp)},
      {2, "NO_SHARD", blocks(ShardingStrategy::kNoShard)},
      {2, "DDP", {}},
      {4, "DDP", {}},
      {4, "HYBRID_SHARD", blocks(ShardingStrategy::kHybridShard)},
      {8, "HYBRID_SHARD_ZERO2", blocks(ShardingStrategy::kHybridShardZero2)},
  };
  return all;
}

}  // namespace sherd::dist
