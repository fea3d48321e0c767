// Collectives of several tensors at once, and batches of sends and receives.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/distributed/over_backends.h"
#include "tests/errors.h"

namespace sherd::dist {
namespace {

class Coalesced : public OverBackends {};
INSTANTIATE_TEST_SUITE_P(All, Coalesced, testing::Values("gloo", "shm"), name_of_backend);

bool all_are(const Tensor& x, double value) {
  const Tensor d = contiguous_raw(to_raw(x, kFloat64));
  for (int64_t i = 0; i < d.numel(); ++i)
    if (d.data<double>()[i] != value) return false;
  return true;
}

TEST_P(Coalesced, O_007_AllReduce) {
  over_ranks(3, [](int rank) {
    const double r = rank + 1;
    struct Case {
      ReduceOp op;
      double first, second;
    };
    for (const Case& c : {Case{ReduceOp::kSum, 6, 14}, Case{ReduceOp::kProduct, 6, 36},
                          Case{ReduceOp::kMin, 1, 1}, Case{ReduceOp::kMax, 3, 9}})
      for (bool async : {false, true})
        for (int64_t n : {1, 7, 40000}) {
          const Tensor a = full({n}, r), b = full({3, n}, r * r), none = zeros({0}),
                       wide = full({n, 4}, -1), column = wide.as_strided_raw({n}, {4}, 1);
          copy_raw(column, full({n}, r));
          const auto before = default_group()->counts().all_reduce.calls;
          all_reduce_coalesced({a, none, b, column}, c.op, {.async = async}).wait();
          EXPECT_EQ(default_group()->counts().all_reduce.calls, before + 1);
          EXPECT_TRUE(all_are(a, c.first)) << name_of(c.op);
          EXPECT_TRUE(all_are(b, c.second)) << name_of(c.op);
          EXPECT_TRUE(all_are(column, c.first)) << name_of(c.op);
          EXPECT_TRUE(all_are(wide.as_strided_raw({n}, {4}, 2), -1));  // beside the column
        }
    EXPECT_HAS(error_of([] { all_reduce_coalesced({}); }), "got no tensors");
    EXPECT_HAS(error_of([] {
                 all_reduce_coalesced({zeros({2}), zeros({2}, kInt32)});
               }),
               "[all_reduce_coalesced] tensors[1] is int32, should be float32 as the others");
    EXPECT_HAS(error_of([] {
                 all_reduce_coalesced({zeros({2}), Tensor()});
               }),
               "tensors[1] is an undefined tensor");
    barrier();
  });
}

// Rank r's element i of a tensor whose first is `salt`.
double value(int rank, int64_t i, int salt) { return 100 * rank + double(i % 50) + salt; }
Tensor values(int rank, const Dims& sizes, int salt) {
  Tensor x = empty(sizes);
  for (int64_t i = 0; i < x.numel(); ++i) x.data<float>()[i] = float(value(rank, i, salt));
  return x;
}

TEST_P(Coalesced, O_005_ReduceScatterAndAllGatherOfThreeShapes) {
  over_ranks(3, [](int rank) {
    const int64_t w = 3;
    for (bool async : {false, true}) {
      std::vector<Tensor> out, in, whole;
      for (int64_t n : {5, 10, 15}) {
        out.push_back(empty({n, n}));
        in.push_back(values(rank, {w * n, n}, int(n)));
        whole.push_back(zeros({w * n, n}));
      }
      const auto before = default_group()->sequence_number();
      reduce_scatter_tensor_coalesced(out, in, ReduceOp::kSum, {.async = async}).wait();
      EXPECT_EQ(default_group()->sequence_number(), before + 1);
      for (size_t k = 0; k < 3; ++k) {
        const int salt = 5 * (int(k) + 1);
        for (int64_t i = 0; i < out[k].numel(); ++i)  // the sum, cut
          ASSERT_EQ(out[k].data<float>()[i], 300 + 3 * value(0, rank * out[k].numel() + i, salt));
        for (int64_t i = 0; i < in[k].numel(); ++i)  // inputs are kept
          ASSERT_EQ(in[k].data<float>()[i], float(value(rank, i, salt)));
      }
      all_gather_into_tensor_coalesced(whole, out, {.async = async}).wait();
      for (size_t k = 0; k < 3; ++k)
        for (int64_t i = 0; i < whole[k].numel(); ++i)
          ASSERT_EQ(whole[k].data<float>()[i], 300 + 3 * value(0, i, 5 * (int(k) + 1)));
    }
    // An input of any strides.
    const Tensor wide = values(rank, {6, 2}, 0), column = wide.as_strided_raw({6}, {2}, 0),
                 all = zeros({3, 6});
    all_gather_into_tensor_coalesced({all}, {column});
    EXPECT_EQ(all.data<float>()[2 * 6 + 3], float(value(2, 6, 0)));
    EXPECT_HAS(error_of([] { all_gather_into_tensor_coalesced({zeros({7})}, {zeros({2})}); }),
               "outputs[0] has shape [7] and inputs[0] [2]: should be 3 times its elements");
    EXPECT_HAS(error_of([] { reduce_scatter_tensor_coalesced({zeros({2})}, {zeros({7})}); }),
               "inputs[0] has shape [7] and outputs[0] [2]: should be 3 times its elements");
    EXPECT_HAS(error_of([] { reduce_scatter_tensor_coalesced({}, {}); }), "one at least");
    barrier();
  });
}

TEST_P(Coalesced, O_014_ABatchOfSendsAndReceivesEnds) {
  over_ranks(4, [](int rank) {
    std::vector<Tensor> got;
    std::vector<P2POp> ops;
    for (int r = 0; r < 4; ++r) {
      got.push_back(zeros({r + 1}));
      if (r == rank) continue;
      ops.push_back({isend, full({rank + 1}, 10 * rank + r), r});
      ops.push_back({irecv, got[r], r});
    }
    if (rank % 2) std::reverse(ops.begin(), ops.end());
    for (const Work& w : batch_isend_irecv(ops)) w.wait();
    for (int r = 0; r < 4; ++r) {
      if (r == rank) continue;
      EXPECT_TRUE(all_are(got[r], 10 * r + rank)) << r;
    }
    const Group other = new_group({0, 1, 2, 3});
    const int next = (rank + 1) % 4;
    const Tensor x = zeros({1});
    EXPECT_HAS(error_of([&] { batch_isend_irecv({}); }), "got no operations");
    EXPECT_HAS(error_of([&] {
                 batch_isend_irecv({{isend, x, next}, {irecv, x, next, other}});
               }),
               "operation 1 is of group 'group1', should be of group 'default' as the others");
    EXPECT_HAS(error_of([&] {
                 batch_isend_irecv({{isend, x, next}, {isend, x, rank}});
               }),
               "is no other rank");
    Work (*const something_else)(const Tensor&, int, int, const CallOptions&) =
        [](const Tensor&, int, int, const CallOptions&) { return Work(); };
    EXPECT_HAS(error_of([&] {
                 batch_isend_irecv({{isend, x, next}, {something_else, x, next}});
               }),
               "operation 1 is neither isend nor irecv");
    // Nothing of the refused batches was sent.
    Tensor y = zeros({1}), z = full({1}, rank);
    const auto works = batch_isend_irecv({{isend, z, next}, {irecv, y, -1}});
    for (const Work& w : works) w.wait();
    EXPECT_EQ(works[1].source(), (rank + 3) % 4);
    EXPECT_EQ(y.item(), (rank + 3) % 4);
  });
}

}  // namespace
}  // namespace sherd::dist
