// What must not change a bit of the trained weights: strategy, wrapping, recomputation, a second
// run; and of the start weights: the number of ranks. Whole files are compared.
#include <gtest/gtest.h>

#include "core/safetensors.h"
#include "tests/examples/big_model_run.h"

namespace examples {
namespace {

using namespace sherd;

class SameBits : public testing::TestWithParam<int /*ranks*/> {
 protected:
  // The weights' file after a run.
  std::string weights(const Flags& flags) {
    const std::string path = dist::new_folder() + "/weights.safetensors";
    const dist::Result r =
        big_model(small_run(GetParam()) + flags + Flags{"--save_weights=" + path});
    EXPECT_EQ(r.exit_code, 0) << r.err;
    const std::string bytes = dist::read_file(path);
    EXPECT_GT(bytes.size(), 1000u);
    return bytes;
  }
  void expect_same(const std::vector<Flags>& runs) {
    const std::string first = weights(runs.at(0));
    for (size_t i = 1; i < runs.size(); ++i)
      EXPECT_TRUE(weights(runs[i]) == first) << testing::PrintToString(runs[i]);
  }
};

TEST_P(SameBits, Strategies) {
  expect_same({{"--strategy=ddp"},
               {"--strategy=no_shard"},
               {"--strategy=shard_grad_op"},
               {"--strategy=full_shard"}});
}
TEST_P(SameBits, StrategiesWithAccumulation) {
  Flags three{"--accumulate=3", "--steps=6"};
  expect_same({three + Flags{"--strategy=ddp"}, three + Flags{"--strategy=no_shard"},
               three + Flags{"--strategy=shard_grad_op"}, three + Flags{"--strategy=full_shard"}});
}
TEST_P(SameBits, StrategiesInBf16) {
  Flags bf16{"--precision=bf16", "--steps=6"};
  expect_same({bf16 + Flags{"--strategy=ddp"}, bf16 + Flags{"--strategy=no_shard"},
               bf16 + Flags{"--strategy=shard_grad_op"}, bf16 + Flags{"--strategy=full_shard"}});
}
TEST_P(SameBits, HybridAndPrefetch) {
  const Flags six{"--steps=6"};
  Flags hybrid = six + Flags{"--strategy=hybrid_shard"},
        zero2 = six + Flags{"--strategy=hybrid_shard_zero2"};
  expect_same({six + Flags{"--strategy=full_shard"}, six + Flags{"--backward_prefetch=post"},
               six + Flags{"--backward_prefetch=none"}, six + Flags{"--cpu_offload"}, hybrid,
               hybrid + Flags{"--shard_group_size=1"}, zero2 + Flags{"--shard_group_size=2"}});
}
TEST_P(SameBits, StrategiesInFp16) {
  const Flags fp16{"--precision=fp16", "--steps=4"};
  expect_same({fp16 + Flags{"--strategy=ddp"}, fp16 + Flags{"--strategy=no_shard"},
               fp16 + Flags{"--strategy=shard_grad_op"}, fp16 + Flags{"--strategy=full_shard"},
               fp16 + Flags{"--strategy=hybrid_shard"}});
}
TEST_P(SameBits, Backends) {
  std::vector<Flags> runs;
  for (const char* strategy : {"--strategy=full_shard", "--strategy=ddp"})
    for (const char* backend : {"--backend=gloo", "--backend=shm", "--backend=mpi"})
      if (sherd::dist::has_mpirun() || std::string(backend) != "--backend=mpi")
        runs.push_back({strategy, backend, "--steps=6"});
  expect_same(runs);
}
TEST_P(SameBits, TheSameCommandTwice) {
  expect_same({{"--shuffle", "--seed=3"}, {"--shuffle", "--seed=3"}});
}
TEST_P(SameBits, ActivationCheckpointing) {
  for (const char* strategy : {"--strategy=full_shard", "--strategy=ddp"})
    expect_same(
        {{strategy, "--activation_checkpointing=false"}, {strategy, "--activation_checkpointing"}});
}
TEST_P(SameBits, ActivationCheckpointingOfPackedDocuments) {
  const Flags packed{"--pack_documents", "--end_id=5", "--steps=6"};
  for (const char* strategy : {"--strategy=full_shard", "--strategy=ddp"})
    expect_same({packed + Flags{strategy}, packed + Flags{strategy, "--activation_checkpointing"}});
}
TEST_P(SameBits, Wrapping) {
  expect_same({{"--wrap_min_params=0"},          // a unit a block
               {"--wrap_min_params=2000"},       // attentions, feed-forwards, embedding, head
               {"--wrap_min_params=1000000"}});  // the root alone
}
// Else all of the above would be easy.
TEST_P(SameBits, OtherRunsDiffer) {
  const std::string a = weights({"--seed=0"});
  EXPECT_FALSE(a == weights({"--seed=1"}));
  EXPECT_FALSE(a == weights({"--seed=0", "--steps=19"}));
  EXPECT_FALSE(a == weights({"--seed=0", "--shuffle"}));
}
INSTANTIATE_TEST_SUITE_P(Ranks, SameBits, testing::Values(2, 4),
                         [](const auto& p) { return concat(p.param, "_ranks"); });

TEST(StartWeights, DependOnTheSeedAlone) {
  const std::string folder = dist::new_folder();
  auto start = [&](int ranks, const Flags& flags) {
    const std::string path = folder + "/start.safetensors";
    const dist::Result r =
        big_model(small_run(ranks) + Flags{"--steps=0", "--save_weights=" + path} + flags);
    EXPECT_EQ(r.exit_code, 0) << r.err;
    return dist::read_file(path);
  };
  const std::string one = start(1, {"--seed=0"});
  EXPECT_GT(one.size(), 1000u);
  for (int ranks : {1, 2, 4})
    for (const char* strategy : {"full_shard", "shard_grad_op", "no_shard", "ddp"})
      EXPECT_TRUE(start(ranks, {"--seed=0", concat("--strategy=", strategy)}) == one)
          << ranks << " ranks, " << strategy;
  EXPECT_FALSE(start(2, {"--seed=1"}) == one);
}

}  // namespace
}  // namespace examples
