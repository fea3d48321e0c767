// Every collective against what it should give, at several world sizes.
#include <gtest/gtest.h>

#include "tests/distributed/spawn.h"

namespace sherd::dist {
namespace {

TEST(Spawn, TwoRanksAddUp) {
  run_ranks(2, [](int rank) {
    Tensor x = full({4}, rank + 1.0);
    all_reduce(x);
    EXPECT_EQ(x.data<float>()[3], 3);
    barrier();
  });
}

class Pieces : public testing::TestWithParam<std::tuple<int, int64_t>> {};

TEST_P(Pieces, GatherAndReduceInPlace) {
  const auto [ranks, n] = GetParam();
  run_ranks(ranks, [&, ranks = ranks, n = n](int rank) {
    Tensor whole = full({ranks * n}, -1);
    Tensor piece = whole.as_strided_raw({n}, {1}, rank * n);
    for (int64_t i = 0; i < n; ++i) piece.data<float>()[i] = float(rank * 1000 + i % 997);
    default_group()->all_gather_pieces({whole}, {piece}).wait();
    for (int64_t i = 0; i < ranks * n; ++i)
      ASSERT_EQ(whole.data<float>()[i], float(i / n * 1000 + i % n % 997)) << i;
    default_group()->reduce_scatter_pieces({piece}, {whole}, ReduceOp::kAvg).wait();
    for (int64_t i = 0; i < n; ++i)
      ASSERT_EQ(piece.data<float>()[i], float(rank * 1000 + i % 997)) << i;
  });
}
INSTANTIATE_TEST_SUITE_P(All, Pieces,
                         testing::Combine(testing::Values(1, 2, 3, 4),
                                          testing::Values(0, 1, 1000, 100003, 1000003)));

}  // namespace
}  // namespace sherd::dist
