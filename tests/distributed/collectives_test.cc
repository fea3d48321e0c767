// Every collective against what it should give, over each backend: all dtypes, 1 to 7 ranks, sizes
// from none to many, waited for and not, on one and on several groups.
//
// The largest sizes are tried with some dtypes and operations alone; SHERD_TEST_ALL=1 tries all.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

#include "core/context.h"
#include "distributed/tree_sum.h"
#include "tests/distributed/over_backends.h"
#include "tests/errors.h"

namespace sherd::dist {
namespace {

constexpr DType kAll[] = {kBool, kUInt8, kInt32, kInt64, kFloat16, kBFloat16, kFloat32, kFloat64};
constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAvg,  ReduceOp::kProduct, ReduceOp::kMin,
                             ReduceOp::kMax, ReduceOp::kBand, ReduceOp::kBor,     ReduceOp::kBxor};
bool is_bitwise(ReduceOp op) { return op >= ReduceOp::kBand; }

// Values that a rank has, the same wherever they are computed: small whole numbers and halves, so
// that every dtype holds them; products and sums of float types round.
Tensor values(int rank, int64_t n, DType dtype, int salt = 0) {
  Tensor x = empty({n}, kFloat64);
  uint64_t state = 0x9e3779b97f4a7c15 * (1 + rank + 100 * salt);
  for (int64_t i = 0; i < n; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const auto v = int64_t(state >> 60);  // 0 to 15
    x.data<double>()[i] = dtype == kBool ? v & 1 : is_float(dtype) ? 1.3 * double(v) - 7 : v;
  }
  return to_raw(x, dtype);
}

bool same_bytes(const Tensor& a, const Tensor& b) {
  const Tensor x = contiguous_raw(a), y = contiguous_raw(b);
  return x.dtype() == y.dtype() && x.numel() == y.numel() &&
         (x.numel() == 0 || std::memcmp(x.bytes(), y.bytes(), x.nbytes()) == 0);
}

Tensor copy_of(const Tensor& x) {
  Tensor y = empty(x.sizes(), x.dtype());
  copy_raw(y, x);
  return y;
}

// The tree over ranks, from the definition: one node at a time, each rounded to the dtype.
Tensor expected(ReduceOp op, const std::vector<Tensor>& inputs) {
  const DType dtype = inputs[0].dtype();
  auto node = [&](auto& self, size_t a, size_t b) -> Tensor {
    if (b - a == 1) return to_raw(inputs[a], kFloat64);
    const size_t h = std::bit_floor(b - a - 1);
    const Tensor l = self(self, a, a + h), r = self(self, a + h, b);
    Tensor out = empty(l.sizes(), kFloat64);
    for (int64_t i = 0; i < l.numel(); ++i) {
      const double x = l.data<double>()[i], y = r.data<double>()[i];
      out.data<double>()[i] = op == ReduceOp::kProduct ? x * y
                              : op == ReduceOp::kMin   ? std::min(x, y)
                              : op == ReduceOp::kMax   ? std::max(x, y)
                              : op == ReduceOp::kBand  ? double(int64_t(x) & int64_t(y))
                              : op == ReduceOp::kBor   ? double(int64_t(x) | int64_t(y))
                              : op == ReduceOp::kBxor  ? double(int64_t(x) ^ int64_t(y))
                                                       : x + y;
    }
    // float32 pairs: the exact sum or product fits a double or rounds twice to the same.
    if (dtype == kFloat16 || dtype == kBFloat16) out = to_raw(out, kFloat32);
    return to_raw(to_raw(out, dtype), kFloat64);
  };
  Tensor sum = node(node, 0, inputs.size());
  if (op == ReduceOp::kAvg)
    for (int64_t i = 0; i < sum.numel(); ++i) sum.data<double>()[i] /= double(inputs.size());
  return to_raw(sum, dtype);
}

constexpr const char* kBackends[] = {"gloo", "shm", "mpi"};

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

// Each over each backend.
class Collectives : public OverBackends {};
class PointToPoint : public OverBackends {};
class Processes : public OverBackends {};
INSTANTIATE_TEST_SUITE_P(All, Collectives, testing::ValuesIn(kBackends), name_of_backend);
INSTANTIATE_TEST_SUITE_P(All, PointToPoint, testing::ValuesIn(kBackends), name_of_backend);
INSTANTIATE_TEST_SUITE_P(All, Processes, testing::ValuesIn(kBackends), name_of_backend);

// Collectives of random kinds and sizes, issued before any is waited for, and waited for in an
// order that is each rank's own.
TEST_P(Collectives, AHundredInFlightWaitedForInRandomOrder) {
  constexpr int kRanks = 4, kCalls = 100;
  over_ranks(kRanks, [](int rank) {
    std::mt19937 same(3), own(100 + rank);
    struct Call {
      std::vector<Tensor> out, want;
      Work work;
    };
    std::vector<Call> calls(kCalls);
    for (int i = 0; i < kCalls; ++i) {
      const int64_t n = std::array{0, 5, 3000, 40000, 200001}[same() % 5];
      const DType dtype = std::array{kFloat32, kBFloat16, kInt64}[same() % 3];
      const int kind = int(same() % 5), root = int(same() % kRanks);
      const Group& g = default_group();
      Call& call = calls[i];
      Tensor x = values(rank, n, dtype, i);
      std::vector<Tensor> all;
      for (int r = 0; r < kRanks; ++r) all.push_back(values(r, n, dtype, i));
      if (kind == 0) {
        call.out = {x}, call.want = {all[root]};
        call.work = g->broadcast(x, root);
      } else if (kind == 1) {
        call.out = {x}, call.want = {expected(ReduceOp::kSum, all)};
        call.work = g->all_reduce(x);
      } else if (kind == 2) {
        for (int r = 0; r < kRanks; ++r) call.out.push_back(zeros({n}, dtype));
        call.want = all;
        call.work = g->all_gather(call.out, x);
      } else if (kind == 3) {
        std::vector<Tensor> in, mine;
        for (int r = 0; r < kRanks; ++r) {
          in.push_back(values(rank, n, dtype, i + r));
          mine.push_back(values(r, n, dtype, i + rank));
        }
        call.out = {zeros({n}, dtype)}, call.want = {expected(ReduceOp::kMax, mine)};
        call.work = g->reduce_scatter(call.out[0], in, ReduceOp::kMax);
      } else {
        std::vector<Tensor> in;
        for (int r = 0; r < kRanks; ++r) {
          in.push_back(values(rank, n, dtype, i + r));
          call.out.push_back(zeros({n}, dtype));
          call.want.push_back(values(r, n, dtype, i + rank));
        }
        call.work = g->all_to_all(call.out, in);
      }
    }
    std::shuffle(calls.begin(), calls.end(), own);
    for (const Call& call : calls) {
      call.work.wait();
      for (size_t k = 0; k < call.out.size(); ++k)
        EXPECT_TRUE(same_bytes(call.out[k], call.want[k]));
    }
  });
}

TEST_P(Collectives, LargeOnesInManyChunks) {
  over_ranks(3, [](int rank) {
    const int64_t n = 1000003;  // many chunks, of odd sizes, at an odd address
    auto at_odd_place = [&](int r) {
      Tensor x = zeros({n + 1}).as_strided_raw({n}, {1}, 1);
      copy_raw(x, values(r, n, kFloat32));
      return x;
    };
    const Tensor want =
        expected(ReduceOp::kSum, {at_odd_place(0), at_odd_place(1), at_odd_place(2)});
    Tensor x = at_odd_place(rank);
    all_reduce(x);
    EXPECT_TRUE(same_bytes(x, want));
    x = at_odd_place(rank);
    reduce(x, 1);
    EXPECT_TRUE(same_bytes(x, rank == 1 ? want : at_odd_place(rank)));
    x = at_odd_place(rank);
    broadcast(x, 2);
    EXPECT_TRUE(same_bytes(x, at_odd_place(2)));
  });
}

TEST_P(Collectives, O_004_TensorsOfAnyStrides) {
  over_ranks(3, [](int rank) {
    auto column = [](int r) {  // of a [50, 4] tensor; the other columns must stay as they are
      Tensor whole = full({50, 4}, -1);
      Tensor c = whole.as_strided_raw({50}, {4}, 2);
      copy_raw(c, values(r, 50, kFloat32));
      return std::pair(whole, c);
    };
    auto untouched = [](const Tensor& whole) {
      for (int64_t i = 0; i < 200; ++i)
        if (i % 4 != 2 && whole.data<float>()[i] != -1) return false;
      return true;
    };
    const std::vector<Tensor> all{values(0, 50, kFloat32), values(1, 50, kFloat32),
                                  values(2, 50, kFloat32)};
    auto [whole, x] = column(rank);
    all_reduce(x);
    EXPECT_TRUE(same_bytes(x, expected(ReduceOp::kSum, all)) && untouched(whole));
    std::tie(whole, x) = column(rank);
    reduce(x, 2);
    EXPECT_TRUE(same_bytes(x, rank == 2 ? expected(ReduceOp::kSum, all) : all[rank]));
    std::tie(whole, x) = column(rank);
    broadcast(x, 1);
    EXPECT_TRUE(same_bytes(x, all[1]) && untouched(whole));
    std::tie(whole, x) = column(rank);
    std::vector<std::pair<Tensor, Tensor>> columns;
    std::vector<Tensor> out;
    for (int r = 0; r < 3; ++r) {
      columns.push_back(column(9));
      out.push_back(columns[r].second);
    }
    all_gather(out, x);
    for (int r = 0; r < 3; ++r)
      EXPECT_TRUE(same_bytes(out[r], all[r]) && untouched(columns[r].first));
    gather(rank == 0 ? out : std::vector<Tensor>(), x, 0);
    scatter(x, rank == 0 ? out : std::vector<Tensor>(), 0);
    EXPECT_TRUE(same_bytes(x, all[rank]) && untouched(whole));
    reduce_scatter(x, out);
    for (float* v = x.data<float>(); v < x.data<float>() + 200; v += 4)
      EXPECT_FLOAT_EQ(*v, 3 * all[rank].data<float>()[(v - x.data<float>()) / 4]);
    if (rank == 0) send(column(7).second, 1);
    if (rank == 1) {
      recv(x, 0);
      EXPECT_TRUE(same_bytes(x, values(7, 50, kFloat32)) && untouched(whole));
    }
  });
}

TEST_P(Collectives, RaiseTheVersionOfWhatTheyWrite) {
  over_ranks(2, [](int rank) {
    Tensor x = zeros({4}), y = zeros({4});
    x.family(), y.family();
    all_reduce(x);
    EXPECT_EQ(x.version(), 1u);
    broadcast(x, 0);
    EXPECT_EQ(x.version(), rank == 0 ? 1u : 2u);
    all_gather({x, y}, x.as_strided_raw({4}, {1}, 0));
    EXPECT_EQ(y.version(), 1u);
    const auto before = y.version();
    default_group()->all_gather_pieces({y}, {y.as_strided_raw({2}, {1}, 2 * rank)}).wait();
    EXPECT_EQ(y.version(), before);
  });
}

TEST_P(Collectives, O_006_AllToAllSingle) {
  for (int ranks : {2, 3}) {
    over_ranks(ranks, [ranks](int rank) {
      // Rank r sends i + 1 rows to rank i, and receives r + 1 from each.
      std::vector<int64_t> in_splits, out_splits(ranks, rank + 1);
      for (int i = 0; i < ranks; ++i) in_splits.push_back(i + 1);
      const int64_t rows = ranks * (ranks + 1) / 2;
      Tensor in = full({rows, 2}, rank), out = full({ranks * (rank + 1), 2}, -1);
      all_to_all_single(out, in, out_splits, in_splits);
      for (int64_t i = 0; i < out.numel(); ++i)
        EXPECT_EQ(out.data<float>()[i], float(i / (2 * (rank + 1))));
      Tensor even_in = full({2 * ranks}, rank, kInt64), even = zeros({2 * ranks}, kInt64);
      all_to_all_single(even, even_in);
      for (int64_t i = 0; i < even.numel(); ++i) EXPECT_EQ(even.data<int64_t>()[i], i / 2);

      EXPECT_THROW(all_to_all_single(out, in, out_splits, std::vector<int64_t>(ranks, 1)), Error);
      EXPECT_THROW(all_to_all_single(out, in, {1}, in_splits), Error);
      EXPECT_THROW(all_to_all_single(zeros({2 * ranks + 1}), zeros({2 * ranks + 1})), Error);
      EXPECT_THROW(all_to_all_single(zeros({}), zeros({})), Error);
      const Group g = new_group({ranks - 1, 0});
      if (g->rank() >= 0) {
        Tensor a = full({2}, rank), b = zeros({2});
        all_to_all_single(b, a, {}, {}, {.group = g});
        EXPECT_EQ(b.data<float>()[0], ranks - 1);
        EXPECT_EQ(b.data<float>()[1], 0);
      }
    });
  }
}

TEST_P(Collectives, O_003_AThousandInFlight) {
  over_ranks(4, [](int rank) {
    std::vector<Tensor> x;
    std::vector<std::vector<Tensor>> lists;
    std::vector<Work> works;
    for (int i = 0; i < 1000; ++i) {
      x.push_back(full({5}, i + rank, kInt64));
      lists.emplace_back();
      const Group& g = default_group();
      const int root = i % 4;
      auto list = [&] {
        for (int r = 0; r < 4; ++r) lists[i].push_back(full({5}, i + 10 * r, kInt64));
        return lists[i];
      };
      switch (i % 5) {
        case 0:
          works.push_back(g->broadcast(x[i], root));
          break;
        case 1:
          works.push_back(g->all_reduce(x[i]));
          break;
        case 2:
          works.push_back(g->gather(rank == root ? list() : std::vector<Tensor>(), x[i], root));
          break;
        case 3:
          works.push_back(g->scatter(x[i], rank == root ? list() : std::vector<Tensor>(), root));
          break;
        default:
          works.push_back(g->all_gather(list(), x[i]));
      }
    }
    EXPECT_EQ(default_group()->sequence_number(), 1000u);
    for (int i = 0; i < 1000; ++i) {
      works[i].wait();
      EXPECT_TRUE(works[i].is_completed());
      const int64_t first = x[i].data<int64_t>()[4];
      const int root = i % 4;
      switch (i % 5) {
        case 0:
          EXPECT_EQ(first, i + root);
          break;
        case 1:
          EXPECT_EQ(first, 4 * i + 6);
          break;
        case 3:
          EXPECT_EQ(first, i + 10 * rank);
          break;
        default:
          for (size_t r = 0; r < lists[i].size(); ++r)
            EXPECT_EQ(lists[i][r].data<int64_t>()[0], i + int64_t(r));
      }
    }
    const CollectiveCounts counts = default_group()->counts();
    EXPECT_EQ(counts.broadcast.calls, 200);
    EXPECT_EQ(counts.all_reduce.bytes, 200 * 40);
    EXPECT_EQ(counts.all_gather.bytes, 200 * 160);
    EXPECT_EQ(counts.other.calls, 400);
  });
}

TEST_P(Collectives, O_015_SeveralDtypesAndGroupsAtOnce) {
  over_ranks(4, [](int rank) {
    const Group all = new_group({0, 1, 2, 3}), turned = new_group({3, 1, 2, 0}),
                even = new_group({0, 2}), odd = new_group({3, 1}), one = new_group({2});
    EXPECT_EQ(turned->rank(), rank == 0 ? 3 : rank == 3 ? 0 : rank);
    EXPECT_EQ(even->rank(), rank % 2 ? -1 : rank / 2);
    EXPECT_EQ(odd->ranks(), (std::vector<int>{3, 1}));
    EXPECT_EQ(one->size(), 1);
    EXPECT_EQ(one->rank(), rank == 2 ? 0 : -1);
    const Group mine = rank % 2 ? odd : even;
    std::vector<Work> works;
    std::vector<Tensor> a, b, c;
    for (int i = 0; i < 50; ++i) {
      a.push_back(full({20000}, rank + i));
      b.push_back(full({3}, rank + i, kInt32));
      c.push_back(full({7}, rank, kBFloat16));
      works.push_back(all_reduce(a[i], ReduceOp::kSum, {.group = mine, .async = true}));
      works.push_back(all_reduce(b[i], ReduceOp::kSum, {.async = true}));
      works.push_back(broadcast(c[i], 0, {.group = turned, .async = true}));
    }
    for (const Work& w : works) w.wait();
    for (int i = 0; i < 50; ++i) {
      EXPECT_EQ(a[i].data<float>()[19999], float(2 * i + (rank % 2 ? 4 : 2)));
      EXPECT_EQ(b[i].data<int32_t>()[2], 4 * i + 6);
      EXPECT_EQ(to_raw(c[i], kFloat32).data<float>()[6], 3);
    }
    EXPECT_EQ(mine->sequence_number(), 50u);
    EXPECT_EQ(all->sequence_number(), 0u);
    if (rank == 2) {
      Tensor x = full({2}, 5);
      all_reduce(x, ReduceOp::kAvg, {.group = one});
      EXPECT_EQ(x.data<float>()[1], 5);
    } else {
      EXPECT_THROW(barrier({.group = one}), Error);
      EXPECT_THROW(one->barrier(), Error);
      EXPECT_THROW(one->all_gather({zeros({1})}, zeros({1})), Error);
      EXPECT_THROW(one->send(zeros({1}), 0), Error);
    }
    destroy_process_group(turned);
    EXPECT_THROW(turned->barrier(), Error);
    EXPECT_THROW(new_group({}), Error);
    EXPECT_THROW(new_group({0, 0}), Error);
    EXPECT_THROW(new_group({0, 4}), Error);
  });
}

TEST_P(Collectives, GroupsMayBeUsedInAnyOrderBetweenThem) {
  over_ranks(2, [](int rank) {
    const Group a = new_group({0, 1}), b = new_group({0, 1});
    Tensor x = full({100}, 1), y = full({100}, 2);
    const Work first = (rank == 0 ? a : b)->all_reduce(rank == 0 ? x : y);
    const Work second = (rank == 0 ? b : a)->all_reduce(rank == 0 ? y : x);
    first.wait();
    second.wait();
    EXPECT_EQ(x.data<float>()[0] * 10 + y.data<float>()[0], 24);
  });
}

TEST_P(Collectives, StartAndEndAreTold) {
  over_ranks(2, [](int rank) {
    // What FSDP does: bytes come when the operation starts, and go when it has ended.
    constexpr int64_t kPiece = 100000;
    const Group& g = default_group();
    barrier();
    reset_peak_memory();
    const int64_t before = memory_stats().allocated;
    std::vector<Work> works;
    std::vector<Ref<Storage>> storages;
    for (int i = 0; i < 10; ++i) {
      storages.push_back(Storage::without_bytes(2 * kPiece * 4, kCPU, MemoryCategory::kParameters));
      const Tensor whole = over_storage(storages[i], {2 * kPiece}, kFloat32);
      const Tensor piece = whole.as_strided_raw({kPiece}, {1}, rank * kPiece);
      CollectiveOptions options;
      options.on_start = [=, s = storages[i]] {
        s->reallocate();
        for (int64_t k = 0; k < kPiece; ++k) piece.data<float>()[k] = float(i + rank);
      };
      options.on_end = [=, s = storages[i]] {
        EXPECT_EQ(whole.data<float>()[kPiece * (2 - rank) - 1], float(i + 1 - rank));
        s->release();
      };
      works.push_back(g->all_gather_pieces({whole}, {piece}, options));
    }
    for (const Work& w : works) w.wait();
    EXPECT_EQ(memory_stats().allocated, before);
    EXPECT_EQ(memory_stats().peak - before, 2 * kPiece * 4);  // one at a time, and no copy
  });
}

TEST_P(Collectives, ScratchIsSmallAndCountedAsCommunication) {
  for (int ranks : {2, 4}) {
    over_ranks(ranks, [ranks](int rank) {
      const int64_t n = 1 << 20;
      Tensor whole = full({ranks * n}, 1);
      barrier();
      reset_peak_memory();
      const MemoryStats before = memory_stats();
      default_group()
          ->reduce_scatter_pieces({whole.as_strided_raw({n}, {1}, rank * n)}, {whole})
          .wait();
      all_reduce(whole);
      const MemoryStats after = memory_stats();
      EXPECT_EQ(after.allocated, before.allocated);
      EXPECT_LE(after.peak - before.allocated, 1 << 20);
      if (default_group()->backend() != "shm") {
        EXPECT_GT(after.peak, before.allocated);
      }
      EXPECT_LE(after.peak_by_category[int(MemoryCategory::kCommunication)],
                before[MemoryCategory::kCommunication] + (1 << 20));
      EXPECT_EQ(after[MemoryCategory::kActivations], before[MemoryCategory::kActivations]);
    });
  }
}

TEST_P(Collectives, O_017_BarrierWaits) {
  // For ranks that are processes, too.
  void* shared = mmap(nullptr, 1, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(shared, MAP_FAILED);
  auto& woke = *new (shared) std::atomic<bool>(false);
  over_ranks(3, [&](int rank) {
    const Group pair = new_group({0, 1});
    if (rank == 2) {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      woke = true;
    } else {
      barrier({.group = pair});  // does not wait for rank 2
      EXPECT_FALSE(woke);
    }
    barrier();
    EXPECT_TRUE(woke);
  });
}

TEST_P(Collectives, O_008_WrongArgumentsAreRefusedBeforeAnythingIsSent) {
  over_ranks(2, [](int rank) {
    const Tensor x = zeros({4}), y = zeros({4}, kInt32);
    const std::vector<Tensor> two{zeros({4}), zeros({4})};
    EXPECT_THROW(broadcast(x, -1), Error);
    EXPECT_THROW(broadcast(x, 2), Error);
    EXPECT_THROW(reduce(x, 2), Error);
    EXPECT_THROW(broadcast(Tensor(), 0), Error);
    EXPECT_THROW(all_reduce(Tensor()), Error);
    EXPECT_THROW(all_reduce(empty({4}, kFloat32, kMeta)), Error);
    EXPECT_THROW(all_reduce(y, ReduceOp::kAvg), Error);
    EXPECT_THROW(all_gather({}, x), Error);
    EXPECT_THROW(all_gather({x}, x), Error);
    EXPECT_THROW(all_gather({x, x, x}, x), Error);
    EXPECT_THROW(all_gather({x, y}, x), Error);
    EXPECT_THROW(all_gather({zeros({5}), zeros({5})}, x), Error);
    EXPECT_THROW(gather(rank == 0 ? std::vector<Tensor>() : two, x, 0), Error);
    EXPECT_THROW(scatter(x, rank == 0 ? std::vector<Tensor>() : two, 0), Error);
    EXPECT_THROW(scatter(x, rank == 0 ? std::vector<Tensor>{x} : two, 0), Error);
    EXPECT_THROW(reduce_scatter(x, {x}), Error);
    EXPECT_THROW(reduce_scatter(zeros({3}), two), Error);
    EXPECT_THROW(reduce_scatter_tensor(x, zeros({9})), Error);
    EXPECT_THROW(all_gather_into_tensor(zeros({9}), x), Error);
    EXPECT_THROW(all_gather_into_tensor(zeros({4, 2}).as_strided_raw({2, 4}, {1, 2}, 0), x), Error);
    EXPECT_THROW(all_to_all({}, {}), Error);
    EXPECT_THROW(all_to_all(two, {x}), Error);
    EXPECT_THROW(send(x, rank), Error);
    EXPECT_THROW(send(x, -1), Error);
    EXPECT_THROW(send(x, 2), Error);
    EXPECT_THROW(recv(x, rank), Error);
    EXPECT_THROW(default_group()->all_gather_pieces({}, {}), Error);
    EXPECT_THROW(default_group()->all_gather_pieces({zeros({9})}, {x}), Error);
    EXPECT_THROW(default_group()->reduce_scatter_pieces({x}, {zeros({8}, kInt32)}), Error);
    EXPECT_EQ(default_group()->sequence_number(), 0u);
    all_reduce(x);  // all is well
  });
  try {
    over_ranks(2, [](int rank) {
      scatter(zeros({4}), rank == 0 ? std::vector<Tensor>(3, zeros({4})) : std::vector<Tensor>(),
              0);
    });
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("[scatter] got 3 inputs, should be 2"), std::string::npos)
        << e.what();
  }
}

TEST_P(Collectives, O_008_OutputsThatShareMemoryAreRefused) {
  over_ranks(2, [](int rank) {
    const Tensor x = zeros({2, 3}), all = zeros({5, 3}), wide = zeros({2, 8}),
                 expanded = zeros({2, 1}).as_strided_raw({2, 3}, {1, 0}, 0);
    const auto rows = [&](int64_t from) { return all.as_strided_raw({2, 3}, {3, 1}, 3 * from); };
    const auto columns = [&](int64_t from) { return wide.as_strided_raw({2, 3}, {8, 1}, from); };
    const auto refused = [](const std::string& text, const std::function<void()>& f) {
      EXPECT_HAS(error_of(f), text);
    };
    refused("[all_gather] outputs[0] and outputs[1] share memory", [&] { all_gather({x, x}, x); });
    refused("[all_gather] outputs[0] and outputs[1] share memory", [&] {
      all_gather({rows(1), rows(0)}, x);
    });
    refused("[all_gather] outputs[0] and outputs[1] share memory", [&] {
      all_gather({columns(0), columns(2)}, x);
    });
    refused("[all_gather] several elements of outputs[1] lie in one place", [&] {
      all_gather({x, expanded}, x);
    });
    refused("[all_reduce] several elements of tensor", [&] { all_reduce(expanded); });
    refused("[all_reduce] several elements of tensor", [&] {
      all_reduce(all.as_strided_raw({3, 3}, {2, 1}, 0));
    });
    refused("[all_reduce_coalesced] tensors[0] and tensors[2]", [&] {
      all_reduce_coalesced({x, zeros({2}), x});
    });
    refused("[all_to_all] outputs[0] and outputs[1]", [&] { all_to_all({x, x}, {x, x}); });
    refused("[all_gather_into_tensor_coalesced] outputs[0] and outputs[1]", [&] {
      all_gather_into_tensor_coalesced(
          {rows(0).as_strided_raw({6}, {1}, 0), rows(1).as_strided_raw({6}, {1}, 3)},
          {zeros({3}), zeros({3})});
    });
    refused("[reduce_scatter_tensor_coalesced] outputs[0] and outputs[1]", [&] {
      reduce_scatter_tensor_coalesced({x, x}, {zeros({4, 3}), zeros({4, 3})});
    });
    refused("[reduce_scatter] several elements of output", [&] {
      reduce_scatter(expanded, {x, x});
    });
    refused("[recv] several elements of tensor", [&] { recv(expanded, 1 - rank); });
    if (rank == 0) {
      refused("[gather] outputs[0] and outputs[1]", [&] { gather({x, x}, x, 0); });
      refused("[reduce] several elements of tensor", [&] { reduce(expanded, 0); });
      refused("[broadcast] several elements of tensor", [&] { broadcast(expanded, 1); });
      refused("[scatter] several elements of output", [&] { scatter(expanded, {}, 1); });
    }
    EXPECT_EQ(default_group()->sequence_number(), 0u);
    // Beside each other, also where they lie between each other; and what is read alone.
    const Tensor one = full({2, 3}, rank + 1.0);
    all_gather({rows(3), rows(0)}, one);
    all_gather({columns(0), columns(3)}, one);
    for (int64_t c = 0; c < 8; ++c) EXPECT_EQ(wide.data<float>()[8 + c], c < 3 ? 1 : c < 6 ? 2 : 0);
    broadcast(rank == 0 ? expanded : one, 0);
    EXPECT_EQ(one.data<float>()[5], rank == 0);
    const Tensor t = all.as_strided_raw({3, 2}, {1, 3}, 0), none = zeros({0});
    all_reduce_coalesced({t, none, none, rows(2)});
  });
}

TEST_P(Collectives, O_017_TimeoutsMayBeAsLongAsTheirTypeAllows) {
  constexpr Milliseconds kEver = Milliseconds::max();
  over_ranks(2, [&](int rank) {
    const Group pair = new_group({0, 1}, kEver);
    const Tensor x = full({4}, rank);
    all_reduce(x, ReduceOp::kSum, {.group = pair});
    all_reduce(x, ReduceOp::kSum, {.timeout = kEver});
    EXPECT_EQ(x.data<float>()[0], 2);
    if (rank == 0)
      send(x, 1, 0, {.timeout = kEver});
    else
      EXPECT_EQ(recv(x, 0, 0, {.timeout = kEver}), 0);
    monitored_barrier({.timeout = kEver});
    const auto refused = [](const std::string& op, const std::function<void()>& f) {
      EXPECT_HAS(error_of(f), concat("[", op, "] timeout is 0 ms, should be above 0"));
    };
    const CallOptions none{.timeout = Milliseconds(0)};
    const auto before = default_group()->sequence_number();
    refused("all_reduce", [&] { all_reduce(x, ReduceOp::kSum, none); });
    refused("barrier", [&] { barrier(none); });
    refused("monitored_barrier", [&] { monitored_barrier(none); });
    refused("send", [&] { send(x, 1 - rank, 0, none); });
    refused("recv", [&] { recv(x, 1 - rank, 0, none); });
    refused("new_group", [&] { new_group({0}, Milliseconds(0)); });
    EXPECT_HAS(error_of([&] { all_reduce(x, ReduceOp::kSum, {.timeout = Milliseconds(-5)}); }),
               "timeout is -5 ms");
    EXPECT_EQ(default_group()->sequence_number(), before);
    barrier();
    destroy_process_group(pair);
  });
}

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
