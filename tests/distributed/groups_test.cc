// Groups cut out of groups, their sequence numbers, and the barrier that says who did not come.
#include <gtest/gtest.h>

#include <thread>

#include "tests/distributed/over_backends.h"
#include "tests/errors.h"

namespace sherd::dist {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

class Groups : public OverBackends {};
INSTANTIATE_TEST_SUITE_P(All, Groups, testing::Values("gloo", "shm"), name_of_backend);

double sum_of(double mine, const Group& group) {
  Tensor x = full({1}, mine, kFloat64);
  all_reduce(x, ReduceOp::kSum, {.group = group});
  return x.item();
}

TEST_P(Groups, O_015_SplitByLists) {
  over_ranks(5, [](int rank) {
    const Group g = split_group(nullptr, {{3, 0}, {1, 4}});
    EXPECT_EQ(g->rank(), std::vector<int>({1, 0, -1, 0, 1})[rank]);
    if (rank == 2) {
      EXPECT_HAS(error_of([&] { barrier({.group = g}); }), "this rank is not in group");
      EXPECT_HAS(error_of([&] { split_group(g, {{0}}); }), "this rank is not in group");
    } else {
      EXPECT_EQ(g->ranks(), rank % 3 ? std::vector<int>({1, 4}) : std::vector<int>({3, 0}));
      EXPECT_EQ(g->backend(), GetParam());
      EXPECT_EQ(sum_of(rank, g), rank % 3 ? 5 : 3);
      // A part of the part: ranks are those in the parent, and outsiders have no part in it.
      const Group alone = split_group(g, {{1}});
      EXPECT_EQ(alone->rank(), g->rank() == 1 ? 0 : -1);
      if (alone->rank() == 0) {
        EXPECT_EQ(alone->ranks(), std::vector<int>({g->ranks()[1]}));
        EXPECT_EQ(sum_of(rank, alone), rank);
      }
    }
    EXPECT_HAS(error_of([] { split_group(nullptr, {{0, 5}}); }), "rank 5 is none of group");
    EXPECT_HAS(error_of([] { split_group(nullptr, {{0}, {1, 0}}); }), "rank 0 was given twice");
    EXPECT_HAS(error_of([] { split_group(nullptr, {{}}); }), "a list of no ranks");
    barrier();
  });
}

TEST_P(Groups, O_015_SplitByColour) {
  over_ranks(4, [](int rank) {
    // Even ranks backwards, by key; rank 3 in none.
    const Group g = split_group(nullptr, rank == 3 ? -1 : rank % 2, -rank);
    EXPECT_EQ(g->rank(), std::vector<int>({1, 0, 0, -1})[rank]);
    if (rank == 3) {
      EXPECT_THROW(barrier({.group = g}), Error);
    } else {
      EXPECT_EQ(g->ranks(), rank == 1 ? std::vector<int>({1}) : std::vector<int>({2, 0}));
      EXPECT_EQ(sum_of(rank + 1, g), rank == 1 ? 2 : 4);
    }
    // Colours alone: in order of ranks. Two such groups, and the default one, do not mix.
    const Group half = split_group(nullptr, rank / 2);
    const Group pair = split_group(nullptr, rank % 2);
    EXPECT_EQ(half->rank(), rank % 2);
    EXPECT_EQ(pair->rank(), rank / 2);
    Tensor a = full({20000}, rank), b = full({20000}, rank), c = full({20000}, rank);
    const std::vector<Work> works = {all_reduce(a, ReduceOp::kSum, {.group = half, .async = true}),
                                     all_reduce(b, ReduceOp::kSum, {.group = pair, .async = true}),
                                     all_reduce(c, ReduceOp::kSum, {.async = true})};
    for (const Work& w : works) w.wait();
    EXPECT_EQ(a.data<float>()[19999], rank < 2 ? 1 : 5);
    EXPECT_EQ(b.data<float>()[19999], rank % 2 ? 4 : 2);
    EXPECT_EQ(c.data<float>()[19999], 6);
  });
}

TEST_P(Groups, O_015_RanksThatSplitDifferentlyAreToldSo) {
  std::vector<std::string> errors(3);
  over_ranks(3, [&](int rank) {
    errors[rank] = error_of([&] {
      split_group(nullptr, rank == 2 ? std::vector<std::vector<int>>{{0, 2}, {1}}
                                     : std::vector<std::vector<int>>{{0, 1}, {2}});
    });
  });
  for (auto& e : errors) {
    EXPECT_HAS(e, "'split_group {0, 1} {2}'");
    EXPECT_HAS(e, "'split_group {0, 2} {1}'");
  }
}

TEST_P(Groups, O_013_SequenceNumbers) {
  over_ranks(4, [](int rank) {
    const auto all_equal = [](uint64_t n) {
      Tensor mine = tensor<int64_t>({int64_t(n)}), all = zeros({4}, kInt64);
      all_gather_into_tensor(all, mine);
      for (int r = 0; r < 4; ++r)
        if (all.data<int64_t>()[r] != int64_t(n)) return false;
      return true;
    };
    const Group g = new_group({0, 1, 2, 3}), pair = new_group({1, 3});
    EXPECT_EQ(g->sequence_number(), 0u);
    Tensor x = zeros({3});
    for (uint64_t i = 1; i <= 10; ++i) {
      i % 2 ? all_reduce(x, ReduceOp::kSum, {.group = g}) : broadcast(x, 1, {.group = g});
      EXPECT_EQ(g->sequence_number(), i);
      EXPECT_TRUE(all_equal(g->sequence_number()));
    }
    // A subgroup counts by itself, and sends and refused calls count nowhere.
    if (pair->rank() >= 0) barrier({.group = pair});
    EXPECT_EQ(pair->sequence_number(), rank % 2);
    if (rank == 0) send(x, 1, 0, {.group = g});
    if (rank == 1) recv(x, 0, 0, {.group = g});
    EXPECT_THROW(broadcast(x, 9, {.group = g}), Error);
    EXPECT_EQ(g->sequence_number(), 10u);
    // Two ranks that skip one lag by exactly one.
    const bool skips = rank < 2;
    Work w;
    if (!skips) w = barrier({.group = g, .async = true});
    EXPECT_EQ(g->sequence_number(), skips ? 10u : 11u);
    barrier();  // the others' is under way
    if (skips) w = barrier({.group = g, .async = true});
    w.wait();
    EXPECT_EQ(g->sequence_number(), 11u);
  });
}

TEST_P(Groups, O_011_MonitoredBarrierListsEveryMissingRank) {
  const auto start = Clock::now();
  run_ranks(4,
            [&](int rank) {
              for (int i = 0; i < 3; ++i) monitored_barrier();
              const std::string text = "ranks 1, 3 did not come to monitored_barrier within 300 ms";
              const CallOptions options{.timeout = milliseconds(300)};
              if (rank % 2) std::this_thread::sleep_for(milliseconds(900));
              // On those that came, and on those that come later.
              EXPECT_HAS(error_of([&] { monitored_barrier(options); }), text);
              barrier();  // the group is as it was
              monitored_barrier();
              // Everyone but rank 0 away: only then it ends.
              if (rank == 0) {
                EXPECT_HAS(error_of([&] { monitored_barrier(options); }),
                           "ranks 1, 2, 3 did not come");
              }
              barrier();
            },
            {.backend = GetParam()});
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(10));
}

TEST_P(Groups, O_011_MonitoredBarrierOfASubgroupNamesRanksOfTheJob) {
  over_ranks(3, [](int rank) {
    const Group g = new_group({2, 1});
    if (rank == 2) {
      EXPECT_HAS(error_of([&] { monitored_barrier({.group = g, .timeout = milliseconds(200)}); }),
                 "group 'group1': rank 1 did not come");
    }
    barrier();
  });
}

TEST_P(Groups, MonitoredBarrierWaitsAndLeavesFewKeys) {
  std::atomic<bool> woke = false;
  over_ranks(3, [&](int rank) {
    if (rank == 1) {
      std::this_thread::sleep_for(milliseconds(200));
      woke = true;
    }
    monitored_barrier();
    EXPECT_TRUE(woke);
    barrier();
    const int64_t before = default_store()->num_keys();
    barrier();
    for (int i = 0; i < 20; ++i) monitored_barrier();
    barrier();
    EXPECT_LE(default_store()->num_keys(), before + 4);
    barrier();
  });
}

}  // namespace
}  // namespace sherd::dist
