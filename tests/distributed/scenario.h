// Scenarios: one model and recipe, trained in one process, by DDP, and by FSDP in many ways, whose
// results are compared. Ranks are threads; each has inputs of its own.
//
//     Scenario s{.make = [] { return instance(std::make_shared<Mlp>(8), loss); }};
//     const Result ddp = train(s, ddp_way(), 4);
//     expect_same_bits(train(s, fsdp_way({.auto_wrap_policy = ...}), 4), ddp);
//     expect_close(ddp, train(s, one_process(), 4));
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "distributed/ddp.h"
#include "distributed/distributed.h"
#include "distributed/fsdp.h"
#include "nn/nn.h"
#include "optim/optim.h"
#include "tests/distributed/spawn.h"

namespace sherd::scenario {

using dist::run_ranks;

// ---- models
class Mlp : public nn::Module {
 public:
  explicit Mlp(int64_t dim, bool bias = true)
      : up(add<nn::Linear>("up", dim, 4 * dim, nn::LinearOptions{.bias = bias})),
        down(add<nn::Linear>("down", 4 * dim, dim, nn::LinearOptions{.bias = bias})) {}
  Tensor forward(const Tensor& x) { return relu(down(relu(up(x)))); }
  nn::Child<nn::Linear> up, down;
};

struct GptOptions {
  int64_t layers = 3, dim = 16, vocab = 8, positions = 16;
  bool tied = false;          // the output's weight is the token embedding's
  bool checkpointed = false;  // blocks are recomputed
};
class GptBlock : public nn::Module {
 public:
  explicit GptBlock(int64_t dim);
  Tensor forward(const Tensor& x);
  nn::Child<nn::LayerNorm> norm1, norm2;
  nn::Child<nn::MultiheadAttention> attention;
  nn::Child<Mlp> ffn;
};
class Gpt : public nn::Module {
 public:
  explicit Gpt(const GptOptions& options = {});
  Tensor forward(const Tensor& ids);  // [B, T] -> [B, T, V]
  nn::Child<nn::Embedding> tokens, places;
  nn::Child<nn::ModuleList<GptBlock>> layers;
  nn::Child<nn::LayerNorm> norm;
  nn::Child<nn::Linear> output;
  bool checkpointed;
};

// ---- inputs, the same for the same arguments
Tensor random_input(const Dims& sizes, int rank, int step);
Tensor random_ids(const Dims& sizes, int64_t vocab, int rank, int step);

std::vector<float> floats(const Tensor& t);
// Zeros where there is none.
Tensor gradient_of(const Tensor& parameter);

// ---- what is trained
struct Instance {
  std::shared_ptr<nn::Module> module;
  std::function<Tensor(int rank, int step)> loss;  // a scalar, of that rank's input
};
template <class M, class F>
Instance instance(std::shared_ptr<M> module, F loss) {
  return {module, [module, loss](int rank, int step) { return loss(*module, rank, step); }};
}

class Trainee;
using Optimizers = std::vector<std::unique_ptr<optim::Optimizer>>;
struct Scenario {
  std::function<Instance()> make;
  int steps = 10;
  std::function<Optimizers(const nn::Module::NamedTensors&)> optimizers = nullptr;  // Adam, 1e-2
  // Default: clears gradients (to none on even steps, to zeros on odd ones), backward, all
  // optimizers' steps.
  std::function<void(Trainee&, int step)> step = nullptr;
  bool optimizer_before_wrapping = false;
};

// ---- how
struct Way {
  bool one_process = false;
  std::optional<DdpOptions> ddp = {};
  std::optional<FsdpOptions> fsdp = {};
  int shard_group_size = 0;                      // a mesh of "replicate" x "shard"; 0: none
  std::function<void(Trainee&)> wrap = nullptr;  // by hand, into trainee.fsdp
};
inline Way one_process() { return {.one_process = true}; }
inline Way ddp_way(const DdpOptions& o = {.bucket_cap_mb = 512.0 / (1 << 20),
                                          .first_bucket_bytes = 64}) {
  return {.ddp = o};
}
inline Way fsdp_way(const FsdpOptions& o) { return {.fsdp = o}; }
// Over replicas of `shard_group_size` ranks each.
inline Way hybrid_way(FsdpOptions o, int shard_group_size,
                      ShardingStrategy s = ShardingStrategy::kHybridShard) {
  o.sharding_strategy = s;
  return {.fsdp = std::move(o), .shard_group_size = shard_group_size};
}
// The mesh of such a way.
dist::DeviceMesh hybrid_mesh(int shard_group_size);
inline constexpr ShardingStrategy kStrategies[] = {
    ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp, ShardingStrategy::kNoShard};
inline constexpr ShardingStrategy kHybridStrategies[] = {ShardingStrategy::kHybridShard,
                                                         ShardingStrategy::kHybridShardZero2};

// One rank's; or, in one process, all ranks' at once.
class Trainee {
 public:
  Trainee(const Scenario& scenario, const Way& way, int rank, int world);

  // Of this rank's input for that step; in one process of each rank's, with 1/world of the
  // gradient. Adds the losses to `losses`.
  void backward(int step);
  Tensor loss(int rank, int step) { return instance_.loss(rank, step); }
  double forward(int step);  // without backward: the loss (in one process, the mean)
  // While the result lives, backwards do not exchange; null in one process.
  std::shared_ptr<void> no_sync();
  // Whole, in float32, on rank 0: those that have no gradient are missing.
  using Values = std::map<std::string, std::vector<float>>;
  Values parameters();
  Values gradients();

  nn::Module& module() { return *instance_.module; }
  std::vector<Tensor> stepped() const;  // what optimizers see
  int rank, world;
  std::unique_ptr<FsdpModule> fsdp;
  std::shared_ptr<dist::DdpReducer> ddp;
  Optimizers optimizers;
  std::vector<std::vector<double>> losses;  // [rank][...]; of other ranks empty

 private:
  Values whole(const std::function<Tensor(const Tensor& parameter)>& of);
  Instance instance_;
  bool one_process_;
};

struct Result {
  std::vector<std::vector<double>> losses;  // [rank][step]
  Trainee::Values parameters, gradients;
  std::vector<FsdpStats> stats;       // by rank, of FSDP
  std::vector<uint64_t> collectives;  // by rank
};
// Trains, and calls `inspect` on each rank at the end.
Result train(const Scenario& scenario, const Way& way, int world,
             const std::function<void(Trainee&)>& inspect = nullptr);

// ---- comparisons
void expect_same_bits(const Result& a, const Result& b);
// |a - b| <= atol + rtol |b|; the default is that of float32.
void expect_close(const Result& a, const Result& b, double rtol = 1.3e-6, double atol = 1e-5);
void expect_close(const Trainee::Values& a, const Trainee::Values& b, double rtol = 1.3e-6,
                  double atol = 1e-5);

// `f` throws an Error whose text has all of these.
void expect_error(const std::function<void()>& f, const std::vector<std::string>& texts);

}  // namespace sherd::scenario
