// Every combination of FSDP's options against one reference: at one number of ranks and one
// precision, all of them end in the same bits.
#include <gtest/gtest.h>

#include <optional>

#include "examples/big_model.h"
#include "tests/distributed/spawn.h"

namespace examples {
namespace {

using namespace sherd;

enum class Precision { kFp32, kBf16, kBf16ReducedInBf16 };
enum class Wrap { kNone, kBlocks, kSizes };

const char* name_of(Precision p) {
  return p == Precision::kFp32 ? "fp32" : p == Precision::kBf16 ? "bf16" : "bf16_reduced_in_bf16";
}

struct Combination {
  FsdpOptions options;
  Wrap wrap = Wrap::kBlocks;
  bool checkpointed = false;

  std::string describe() const {
    return concat(sherd::name_of(options.sharding_strategy), ", backward_prefetch ",
                  int(options.backward_prefetch), ", forward_prefetch ", options.forward_prefetch,
                  ", gather_in_backward ", int(options.gather_in_backward), ", reshard_root ",
                  options.reshard_root_after_forward, ", max_gathered_bytes ",
                  options.max_gathered_bytes, ", wrap ", int(wrap), ", checkpointed ",
                  checkpointed);
  }
};

std::vector<Combination> all_runs() {
  std::vector<Combination> runs;
  for (auto strategy :
       {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp, ShardingStrategy::kNoShard,
        ShardingStrategy::kHybridShard, ShardingStrategy::kHybridShardZero2})
    for (auto backward : {BackwardPrefetch::kNone, BackwardPrefetch::kPre, BackwardPrefetch::kPost})
      for (int forward : {0, 1, 2})
        for (auto gather : {GatherInBackward::kAlways, GatherInBackward::kIfSaved})
          for (bool reshard_root : {false, true})
            for (int64_t bytes : {0, 1})
              for (auto wrap : {Wrap::kNone, Wrap::kBlocks, Wrap::kSizes})
                for (bool checkpointed : {false, true}) {
                  Combination r;
                  r.options.sharding_strategy = strategy;
                  r.options.backward_prefetch = backward;
                  r.options.forward_prefetch = forward;
                  r.options.gather_in_backward = gather;
                  r.options.reshard_root_after_forward = reshard_root;
                  r.options.max_gathered_bytes = bytes;
                  r.wrap = wrap;
                  r.checkpointed = checkpointed;
                  runs.push_back(r);
                }
  return runs;
}

constexpr int64_t kVocabulary = 11, kTime = 5, kBatch = 2, kSteps = 3;

// The weights after some steps, on rank 0; elsewhere nothing. No run: DistributedDataParallel.
// `mesh`: of hybrid strategies.
std::vector<std::vector<float>> train(const Combination* run, Precision precision,
                                      int64_t accumulate, const dist::DeviceMesh& mesh) {
  manual_seed(3);
  BigModel model(3, 16, 24, kVocabulary,
                 {.heads = 2, .activation_checkpointing = run && run->checkpointed});
  std::optional<FullyShardedDataParallel<BigModel>> fsdp;
  std::optional<DistributedDataParallel<BigModel>> ddp;
  if (run) {
    FsdpOptions o = run->options;
    if (is_hybrid(o.sharding_strategy)) o.device_mesh = mesh;
    if (run->wrap == Wrap::kBlocks)
      o.auto_wrap_policy = module_wrap_policy<LargeTransformerBlock>();
    if (run->wrap == Wrap::kSizes) o.auto_wrap_policy = size_based_auto_wrap_policy(300);
    if (precision != Precision::kFp32)
      o.mixed_precision = {.param_dtype = kBFloat16,
                           .reduce_dtype = precision == Precision::kBf16 ? kFloat32 : kBFloat16};
    fsdp.emplace(model, o);
  } else {
    ddp.emplace(model, DdpOptions{.bucket_cap_mb = 2000.0 / (1 << 20), .first_bucket_bytes = 500});
  }
  optim::AdamW optimizer(model.parameters(), {.lr = 1e-2});
  Generator data;
  data.seed(5, uint64_t(dist::rank()));
  for (int64_t step = 0; step < kSteps; ++step) {
    for (int64_t micro = 0; micro < accumulate; ++micro) {
      std::optional<FsdpModule::NoSync> fsdp_waits;
      std::optional<DistributedDataParallel<BigModel>::NoSync> ddp_waits;
      if (micro + 1 < accumulate && fsdp) fsdp_waits.emplace(fsdp->runtime());
      if (micro + 1 < accumulate && ddp) ddp_waits.emplace(ddp->reducer());
      Tensor ids, labels;
      {
        GeneratorGuard guard(data);
        ids = randint(0, kVocabulary, {kBatch, kTime});
        labels = randint(0, kVocabulary, {kBatch, kTime});
      }
      const Tensor logits = nn::call(model, ids).view({-1, kVocabulary}).to(kFloat32);
      F::cross_entropy(logits, labels.view({-1})).backward();
    }
    optim::clip_grad_norm_(model.parameters(), 0.5);
    optimizer.step();
    optimizer.zero_grad();
  }
  std::vector<std::vector<float>> weights;
  const nn::StateDict state = fsdp ? fsdp->full_state_dict() : model.state_dict();
  if (dist::rank() == 0)
    for (auto& [name, t] : state) {
      const Tensor c = contiguous_raw(t);
      weights.emplace_back(c.data<float>(), c.data<float>() + c.numel());
    }
  return weights;
}

class BitsMatrix : public testing::TestWithParam<std::tuple<int /*ranks*/, Precision, int>> {};

TEST_P(BitsMatrix, AllOptionsGiveTheSameBits) {
  const auto [ranks, precision, accumulate] = GetParam();
  const std::vector<Combination> runs = all_runs();
  dist::run_ranks(
      ranks, [&, ranks = ranks, precision = precision, accumulate = accumulate](int rank) {
        // Two that share a copy; of an odd number of ranks, each has its own. One mesh for all:
        // groups stay, each with a thread, until the process group is destroyed.
        const int shard = ranks % 2 ? 1 : 2;
        const auto mesh = dist::init_device_mesh({ranks / shard, shard}, {"replicate", "shard"});
        // Below float32 there is no DDP to compare with: the first run is the reference.
        const auto reference =
            train(precision == Precision::kFp32 ? nullptr : &runs[0], precision, accumulate, mesh);
        int different = 0;
        for (const Combination& run : runs) {
          const auto weights = train(&run, precision, accumulate, mesh);
          if (rank != 0 || weights == reference) continue;
          if (++different <= 5) ADD_FAILURE() << run.describe();
        }
        if (rank == 0) {
          EXPECT_EQ(reference.size(), 3u + 3 * 10);  // BigModel's names
          EXPECT_EQ(different, 0) << "of " << runs.size();
        }
      });
}

INSTANTIATE_TEST_SUITE_P(All, BitsMatrix,
                         testing::Combine(testing::Values(1, 2, 3, 4),
                                          testing::Values(Precision::kFp32, Precision::kBf16,
                                                          Precision::kBf16ReducedInBf16),
                                          testing::Values(1, 2)),
                         [](const auto& p) {
                           return concat(std::get<0>(p.param), "_ranks_",
                                         name_of(std::get<1>(p.param)), "_accumulate_",
                                         std::get<2>(p.param));
                         });

}  // namespace
}  // namespace examples
