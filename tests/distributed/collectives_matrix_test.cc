// Every collective against what it should give, over each backend: all dtypes, 1 to 7 ranks, sizes
// from none to many, waited for and not, on one and on several groups.
//
// The largest sizes are tried with some dtypes and operations alone; SHERD_TEST_ALL=1 tries all.
#include <gtest/gtest.h>

#include <cstdlib>

#include "tests/distributed/collectives_reference.h"
#include "tests/distributed/over_backends.h"

namespace sherd::dist {
namespace {

constexpr DType kAll[] = {kBool, kUInt8, kInt32, kInt64, kFloat16, kBFloat16, kFloat32, kFloat64};
constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAvg,  ReduceOp::kProduct, ReduceOp::kMin,
                             ReduceOp::kMax, ReduceOp::kBand, ReduceOp::kBor,     ReduceOp::kBxor};
bool is_bitwise(ReduceOp op) { return op >= ReduceOp::kBand; }

bool tries_all() { return std::getenv("SHERD_TEST_ALL") != nullptr; }

std::vector<int> ranks_over_mpi() {
  if (tries_all()) return {1, 2, 3, 4, 7};
  return {2, 3, 4};
}

std::vector<int> ranks_of_large_ones() {
  if (tries_all()) return {1, 2, 3, 4, 7};
  return {2, 3};
}

struct Case {
  int rank, ranks;  // in the group
  int64_t n;
  DType dtype;
  CallOptions options;
  bool few;  // many elements: one operation will do

  ProcessGroup& group() const { return *options.group; }
  std::vector<Tensor> all_values(int salt = 0) const {
    std::vector<Tensor> list;
    for (int r = 0; r < ranks; ++r) list.push_back(values(r, n, dtype, salt));
    return list;
  }
  Tensor mine(int salt = 0) const { return values(rank, n, dtype, salt); }
  std::vector<ReduceOp> ops() const {
    std::vector<ReduceOp> list;
    for (ReduceOp op : kOps)
      if (is_float(dtype) ? !is_bitwise(op) : op != ReduceOp::kAvg) list.push_back(op);
    if (few) list = {dtype == kBFloat16 ? ReduceOp::kAvg : ReduceOp::kSum};
    return list;
  }
};

// Calls f for each group that this rank is in and each dtype, waited for and not.
void for_each_case(int rank, int world, int64_t n, const std::function<void(const Case&)>& f) {
  std::vector<Group> groups{default_group()};
  std::vector<int> turned, odd;  // other orders, and not all
  for (int r = world - 1; r >= 0; --r) {
    turned.push_back(r);
    if (r % 2) odd.push_back(r);
  }
  if (world > 1) groups.push_back(new_group(turned));
  if (world > 3) groups.push_back(new_group(odd));
  for (size_t g = 0; g < groups.size(); ++g) {
    if (groups[g]->rank() < 0) continue;
    for (bool async : {false, true})
      for (DType dtype : kAll) {
        const bool few = n > 1000 && !tries_all();
        const bool often = dtype == kFloat32 || dtype == kBFloat16 || dtype == kUInt8;
        if (few && (g > 0 || async != often || (!often && dtype != kInt64))) continue;
        if (g > 0 && !often && !tries_all()) continue;
        SCOPED_TRACE(concat("rank ", rank, ", group ", groups[g]->name(), ", ", dtype,
                            async ? ", async" : ""));
        f({groups[g]->rank(),
           groups[g]->size(),
           n,
           dtype,
           {.group = groups[g], .async = async},
           few});
      }
  }
}

void try_broadcast(const Case& c) {
  for (int root = 0; root < c.ranks; ++root) {
    Tensor x = c.mine();
    broadcast(x, root, c.options).wait();
    EXPECT_TRUE(same_bytes(x, values(root, c.n, c.dtype)));
  }
}

void try_all_reduce_and_reduce(const Case& c) {
  for (ReduceOp op : kOps) {
    if (is_float(c.dtype) ? !is_bitwise(op) : op != ReduceOp::kAvg) continue;
    EXPECT_THROW(all_reduce(c.mine(), op, c.options), Error);
    EXPECT_THROW(reduce(c.mine(), 0, op, c.options), Error);
    EXPECT_THROW(all_reduce_coalesced({c.mine()}, op, c.options), Error);
    EXPECT_THROW(
        reduce_scatter_tensor(c.mine(), values(c.rank, c.ranks * c.n, c.dtype), op, c.options),
        Error);
  }
  for (ReduceOp op : c.ops()) {
    const Tensor want = expected(op, c.all_values());
    Tensor x = c.mine();
    all_reduce(x, op, c.options).wait();
    EXPECT_TRUE(same_bytes(x, want)) << name_of(op);
    const int root = c.ranks - 1;
    x = c.mine();
    reduce(x, root, op, c.options).wait();
    EXPECT_TRUE(same_bytes(x, c.rank == root ? want : c.mine())) << name_of(op);
  }
}

void try_all_gather(const Case& c) {
  std::vector<Tensor> out;
  for (int r = 0; r < c.ranks; ++r) out.push_back(zeros({c.n + r}, c.dtype));
  all_gather(out, values(c.rank, c.n + c.rank, c.dtype), c.options).wait();
  for (int r = 0; r < c.ranks; ++r)
    EXPECT_TRUE(same_bytes(out[r], values(r, c.n + r, c.dtype))) << r;
  Tensor whole = zeros({c.ranks, c.n}, c.dtype);
  all_gather_into_tensor(whole, c.mine(), c.options).wait();
  for (int r = 0; r < c.ranks; ++r)
    EXPECT_TRUE(same_bytes(whole.as_strided_raw({c.n}, {1}, r * c.n), values(r, c.n, c.dtype)));
}

void try_gather_and_scatter(const Case& c) {
  for (int root = 0; root < c.ranks; ++root) {
    std::vector<Tensor> list;
    if (c.rank == root)
      for (int r = 0; r < c.ranks; ++r) list.push_back(zeros({c.n}, c.dtype));
    gather(list, c.mine(), root, c.options).wait();
    for (size_t r = 0; r < list.size(); ++r)
      EXPECT_TRUE(same_bytes(list[r], values(int(r), c.n, c.dtype)));
    if (c.rank == root) list = c.all_values(root);
    Tensor x = zeros({c.n}, c.dtype);
    scatter(x, list, root, c.options).wait();
    EXPECT_TRUE(same_bytes(x, c.mine(root)));
  }
}

void try_reduce_scatter(const Case& c) {
  for (ReduceOp op : c.ops()) {
    auto size = [&](int r) { return c.n > 0 ? c.n + r : 0; };
    std::vector<Tensor> in, mine;
    for (int r = 0; r < c.ranks; ++r) {
      in.push_back(values(c.rank, size(r), c.dtype, r));
      mine.push_back(values(r, size(c.rank), c.dtype, c.rank));
    }
    Tensor x = zeros({size(c.rank)}, c.dtype);
    reduce_scatter(x, in, op, c.options).wait();
    EXPECT_TRUE(same_bytes(x, expected(op, mine))) << name_of(op);
    for (int r = 0; r < c.ranks; ++r)  // inputs are kept
      EXPECT_TRUE(same_bytes(in[r], values(c.rank, size(r), c.dtype, r)));
  }
  Tensor x = zeros({c.n}, c.dtype);
  const int64_t all = c.ranks * c.n;
  reduce_scatter_tensor(x, values(c.rank, all, c.dtype), ReduceOp::kMax, c.options).wait();
  std::vector<Tensor> mine;
  for (int r = 0; r < c.ranks; ++r)
    mine.push_back(copy_of(values(r, all, c.dtype).as_strided_raw({c.n}, {1}, c.rank * c.n)));
  EXPECT_TRUE(same_bytes(x, expected(ReduceOp::kMax, mine)));
}

void try_all_to_all(const Case& c) {
  std::vector<Tensor> in, out;
  for (int r = 0; r < c.ranks; ++r) {
    in.push_back(values(c.rank, c.n + r, c.dtype, r));
    out.push_back(zeros({c.n + c.rank}, c.dtype));
  }
  all_to_all(out, in, c.options).wait();
  for (int r = 0; r < c.ranks; ++r)
    EXPECT_TRUE(same_bytes(out[r], values(r, c.n + c.rank, c.dtype, c.rank)));
}

void try_pieces(const Case& c) {
  for (bool in_place : {true, false}) {
    // Two buffers of two dtypes in one call, as FSDP has them.
    std::vector<Tensor> full{zeros({c.ranks * c.n}, c.dtype), zeros({c.ranks * 3}, kFloat32)};
    std::vector<Tensor> pieces{c.mine(), values(c.rank, 3, kFloat32)};
    if (in_place)
      for (size_t i = 0; i < 2; ++i) {
        const int64_t size = pieces[i].numel();
        Tensor place = full[i].as_strided_raw({size}, {1}, c.rank * size);
        copy_raw(place, pieces[i]);
        pieces[i] = place;
      }
    c.group().all_gather_pieces(full, pieces).wait();
    for (int r = 0; r < c.ranks; ++r) {
      EXPECT_TRUE(same_bytes(full[0].as_strided_raw({c.n}, {1}, r * c.n), values(r, c.n, c.dtype)));
      EXPECT_TRUE(same_bytes(full[1].as_strided_raw({3}, {1}, r * 3), values(r, 3, kFloat32)));
    }
    for (auto& f : full) copy_raw(f, values(c.rank, f.numel(), f.dtype(), 5));
    c.group().reduce_scatter_pieces(pieces, full).wait();
    for (size_t i = 0; i < 2; ++i) {
      const int64_t size = pieces[i].numel();
      std::vector<Tensor> mine;
      for (int r = 0; r < c.ranks; ++r)
        mine.push_back(copy_of(values(r, full[i].numel(), full[i].dtype(), 5)
                                   .as_strided_raw({size}, {1}, c.rank * size)));
      EXPECT_TRUE(same_bytes(pieces[i], expected(ReduceOp::kSum, mine)));
    }
  }
}

void try_send_and_recv(const Case& c) {
  if (c.ranks == 1) return;
  const int next = (c.rank + 1) % c.ranks, before = (c.rank + c.ranks - 1) % c.ranks;
  Tensor x = zeros({c.n}, c.dtype);
  const Work receive = irecv(x, before, 3, c.options);
  const Work sent = isend(c.mine(), next, 3, c.options);
  sent.wait();
  receive.wait();
  EXPECT_EQ(receive.source(), before);
  EXPECT_TRUE(same_bytes(x, values(before, c.n, c.dtype)));
}

class Matrix : public testing::TestWithParam<std::tuple<const char*, int, int64_t>> {
 protected:
  void for_each(const std::function<void(const Case&)>& f) {
    const auto [backend, world, n] = GetParam();
    run_over(backend, world,
             [&, world = world, n = n](int rank) { for_each_case(rank, world, n, f); });
  }
};
TEST_P(Matrix, O_002_Broadcast) { for_each(try_broadcast); }
TEST_P(Matrix, O_001_T_02_AllReduceAndReduce) { for_each(try_all_reduce_and_reduce); }
TEST_P(Matrix, O_009_AllGather) { for_each(try_all_gather); }
TEST_P(Matrix, GatherAndScatter) { for_each(try_gather_and_scatter); }
TEST_P(Matrix, O_005_ReduceScatter) { for_each(try_reduce_scatter); }
TEST_P(Matrix, AllToAll) { for_each(try_all_to_all); }
TEST_P(Matrix, Pieces) { for_each(try_pieces); }
TEST_P(Matrix, SendAndRecv) { for_each(try_send_and_recv); }

// One start of mpirun for all of them.
class MpiMatrix : public testing::TestWithParam<int> {};
TEST_P(MpiMatrix, AllCollectives) {
  if (const auto why = why_no_mpi(); !why.empty()) GTEST_SKIP() << why;
  const int world = GetParam();
  run_over("mpi", world, [&](int rank) {
    std::vector<int64_t> sizes{0, 1, 3, 1000};
    if (tries_all() || world == 3) sizes.push_back(1000003);
    for (const int64_t n : sizes)
      for (const auto& f :
           {try_broadcast, try_all_reduce_and_reduce, try_all_gather, try_gather_and_scatter,
            try_reduce_scatter, try_all_to_all, try_pieces, try_send_and_recv}) {
        SCOPED_TRACE(n);
        for_each_case(rank, world, n, f);
      }
  });
}
INSTANTIATE_TEST_SUITE_P(All, MpiMatrix, testing::ValuesIn(ranks_over_mpi()),
                         [](const auto& info) { return concat("ranks_", info.param); });

std::string name_of_case(const testing::TestParamInfo<Matrix::ParamType>& info) {
  const auto [backend, ranks, n] = info.param;
  return concat(backend, "_ranks_", ranks, "_size_", n);
}
INSTANTIATE_TEST_SUITE_P(All, Matrix,
                         testing::Combine(testing::Values("gloo", "shm"),
                                          testing::Values(1, 2, 3, 4, 7),
                                          testing::Values(0, 1, 3, 1000)),
                         name_of_case);
INSTANTIATE_TEST_SUITE_P(Large, Matrix,
                         testing::Combine(testing::Values("gloo", "shm"),
                                          testing::ValuesIn(ranks_of_large_ones()),
                                          testing::Values(1000003)),
                         name_of_case);

}  // namespace
}  // namespace sherd::dist
