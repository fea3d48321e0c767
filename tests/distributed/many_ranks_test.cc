// More ranks than cores, and than a small model has rows.
#include "tests/distributed/scenario.h"

namespace sherd::scenario {
namespace {

TEST(ManyRanks, ThirtyTwoTrainFullySharded) {
  Scenario s{.make = [] {
    return instance(std::make_shared<Mlp>(3), [](Mlp& m, int rank, int step) {
      return nn::call(m, random_input({2, 3}, rank, step)).sum();
    });
  }};
  s.steps = 3;
  const Result ddp = train(s, ddp_way(), 32);
  expect_same_bits(train(s, fsdp_way({.auto_wrap_policy = module_wrap_policy<nn::Linear>()}), 32),
                   ddp);
}

}  // namespace
}  // namespace sherd::scenario
