// A dataset that the ranks do not divide, each sample once: an uneven sampler inside a Join.
#include <gtest/gtest.h>

#include "data/sampler.h"
#include "tests/distributed/scenario.h"

namespace sherd::scenario {
namespace {

TEST(JoinData, T_22_EachSampleOnceInAJoin) {
  for (const int64_t samples : {7, 2})  // over 3 ranks
    run_ranks(3, [&](int rank) {
      nn::Linear m(2, 1, {.bias = false});
      m.materialize();
      DistributedDataParallel ddp(m);
      const Tensor weight = m.weight;
      const float before = weight.data<float>()[0];
      optim::SGD sgd(ddp.parameters(), {.lr = 1});
      data::DistributedSampler sampler(
          samples, {.num_replicas = 3, .rank = rank, .shuffle = false, .uneven = true});
      {
        const auto join = ddp.join();
        for (const int64_t i : sampler.indices()) {
          sgd.zero_grad();
          ddp(full({1, 2}, double(i + 1))).sum().backward();  // its gradient is (i + 1, i + 1)
          sgd.step();
        }
      }
      // Everyone ends with the weight moved by each sample once, over the number of ranks.
      EXPECT_NEAR(weight.data<float>()[0], before - double(samples * (samples + 1)) / 2 / 3, 1e-5)
          << rank;
    });
}

}  // namespace
}  // namespace sherd::scenario
