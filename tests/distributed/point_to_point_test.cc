// Messages from rank to rank, and ranks that are processes, over each backend.
#include <gtest/gtest.h>

#include "tests/distributed/over_backends.h"

namespace sherd::dist {
namespace {

class PointToPoint : public OverBackends {};
class Processes : public OverBackends {};
INSTANTIATE_TEST_SUITE_P(All, PointToPoint, testing::Values("gloo", "shm", "mpi"), name_of_backend);
INSTANTIATE_TEST_SUITE_P(All, Processes, testing::Values("gloo", "shm", "mpi"), name_of_backend);

TEST_P(PointToPoint, O_014_OrdersTagsAndSources) {
  over_ranks(4, [](int rank) {
    // Every rank sends rank + 1 elements to each other, all at once.
    std::vector<Work> works;
    std::vector<Tensor> got;
    for (int r = 0; r < 4; ++r) {
      got.push_back(zeros({r + 1}));
      if (r == rank) continue;
      works.push_back(isend(full({rank + 1}, rank), r, rank));
      works.push_back(irecv(got[r], r, r));
    }
    for (const Work& w : works) w.wait();
    for (int r = 0; r < 4; ++r) {
      if (r == rank) continue;
      EXPECT_EQ(got[r].data<float>()[r], r);
    }
    // From any source; each names its sender and holds its value.
    if (rank == 0) {
      std::vector<bool> seen(4);
      for (int i = 0; i < 3; ++i) {
        Tensor x = zeros({2}, kInt64);
        const int source = recv(x);
        EXPECT_EQ(x.data<int64_t>()[1], source);
        seen[source] = true;
      }
      EXPECT_EQ(seen, (std::vector<bool>{false, true, true, true}));
    } else {
      send(full({2}, rank, kInt64), 0);
    }
    // Tags waited for in another order than sent; one tag keeps its order.
    if (rank == 1) {
      const Work a = isend(full({1000}, 1), 2, 1), b = isend(full({1000}, 2), 2, 2),
                 c = isend(full({1000}, 3), 2, 1);
      b.wait();
      c.wait();
      a.wait();
    } else if (rank == 2) {
      Tensor x = zeros({1000});
      recv(x, 1, 2);
      EXPECT_EQ(x.data<float>()[999], 2);
      recv(x, 1, 1);
      EXPECT_EQ(x.data<float>()[999], 1);
      recv(x, 1, 1);
      EXPECT_EQ(x.data<float>()[999], 3);
    }
  });
}

TEST_P(PointToPoint, DoesNotWaitForCollectives) {
  over_ranks(2, [](int rank) {
    Tensor x = full({10}, rank), sum = full({10}, 1);
    Work w;
    if (rank == 0) {
      w = all_reduce(sum, ReduceOp::kSum, {.async = true});  // the peer enters after the message
      send(x, 1);
    } else {
      recv(x, 0);
      w = all_reduce(sum, ReduceOp::kSum, {.async = true});
    }
    w.wait();
    EXPECT_EQ(x.data<float>()[3], 0);
    EXPECT_EQ(sum.data<float>()[3], 2);
  });
}

TEST_P(Processes, Collectives) {
  run_processes(3,
                [](int rank) {
                  EXPECT_EQ(rank, dist::rank());
                  EXPECT_EQ(local_rank(), rank);
                  EXPECT_EQ(local_world_size(), 3);
                  EXPECT_EQ(default_group()->backend(), GetParam());
                  for (int64_t n : {1, 50000, 3000000}) {
                    Tensor x = full({n}, rank + 1.0);
                    all_reduce(x);
                    EXPECT_EQ(x.data<float>()[n - 1], 6);
                    EXPECT_EQ(x.data<float>()[n / 2], 6);
                    Tensor whole = zeros({3 * n});
                    all_gather_into_tensor(whole, full({n}, rank));
                    EXPECT_EQ(whole.data<float>()[2 * n - 1], 1);
                    reduce_scatter_tensor(x, full({3 * n}, rank + 1.0));
                    EXPECT_EQ(x.data<float>()[n - 1], 6);
                    x = zeros({n});
                    if (rank == 0) recv(x);
                    if (rank == 2) send(full({n}, 8), 0);
                    EXPECT_EQ(x.data<float>()[n - 1], rank == 0 ? 8 : 0);
                  }
                },
                {.backend = GetParam()});
}

TEST_P(Processes, FailuresAreReported) {
  const auto results =
      run_processes(2, [](int rank) { EXPECT_EQ(rank, 0) << "as it should"; }, {.may_fail = true});
  EXPECT_TRUE(results[0].ok());
  EXPECT_EQ(results[1].exit_code, 1);
  EXPECT_NE(results[1].output.find("as it should"), std::string::npos);
  EXPECT_THROW(run_processes(2,
                             [](int rank) {
                               if (rank == 1) fail("on purpose");
                             }),
               Error);
}
}  // namespace
}  // namespace sherd::dist
