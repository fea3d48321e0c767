// Every collective against what it should give: all dtypes, world sizes 1 to 4, sizes from none to
// many, waited for and not, on one and on several groups.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <thread>

#include "core/context.h"
#include "distributed/tree_sum.h"
#include "tests/distributed/spawn.h"

namespace sherd::dist {
namespace {

constexpr DType kAll[] = {kBool, kUInt8, kInt32, kInt64, kFloat16, kBFloat16, kFloat32, kFloat64};
constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kProduct, ReduceOp::kMin,
                             ReduceOp::kMax};

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

class Matrix : public testing::TestWithParam<std::tuple<int, int64_t>> {
 protected:
  // Calls f on every rank for each dtype, waited for and not; for many elements, for some of them.
  void for_each(const std::function<void(int rank, DType dtype, CallOptions options)>& f) {
    run_ranks(ranks(), [&](int rank) {
      for (bool async : {false, true})
        for (DType dtype : kAll) {
          const bool often = dtype == kFloat32 || dtype == kBFloat16 || dtype == kUInt8;
          if (n() > 1000 && async != often) continue;
          if (n() > 1000 && !often && dtype != kInt64) continue;
          SCOPED_TRACE(concat("rank ", rank, ", ", dtype, async ? ", async" : ""));
          f(rank, dtype, {.async = async});
        }
    });
  }
  static int ranks() { return std::get<0>(GetParam()); }
  static int64_t n() { return std::get<1>(GetParam()); }
  static std::vector<Tensor> all_values(DType dtype, int salt = 0) {
    std::vector<Tensor> list;
    for (int r = 0; r < ranks(); ++r) list.push_back(values(r, n(), dtype, salt));
    return list;
  }
};

TEST_P(Matrix, Broadcast) {
  for_each([](int rank, DType dtype, const CallOptions& options) {
    for (int root = 0; root < ranks(); ++root) {
      Tensor x = values(rank, n(), dtype);
      broadcast(x, root, options).wait();
      EXPECT_TRUE(same_bytes(x, values(root, n(), dtype)));
    }
  });
}

TEST_P(Matrix, AllReduceAndReduce) {
  for_each([](int rank, DType dtype, const CallOptions& options) {
    for (ReduceOp op : kOps) {
      if (op == ReduceOp::kAvg && !is_float(dtype)) {
        EXPECT_THROW(all_reduce(values(rank, n(), dtype), op, options), Error);
        continue;
      }
      const Tensor want = expected(op, all_values(dtype));
      Tensor x = values(rank, n(), dtype);
      all_reduce(x, op, options).wait();
      EXPECT_TRUE(same_bytes(x, want)) << name_of(op);
      const int root = ranks() - 1;
      x = values(rank, n(), dtype);
      reduce(x, root, op, options).wait();
      EXPECT_TRUE(same_bytes(x, rank == root ? want : values(rank, n(), dtype))) << name_of(op);
    }
  });
}

TEST_P(Matrix, AllGather) {
  for_each([](int rank, DType dtype, const CallOptions& options) {
    std::vector<Tensor> out;
    for (int r = 0; r < ranks(); ++r) out.push_back(zeros({n() + r}, dtype));
    all_gather(out, values(rank, n() + rank, dtype), options).wait();
    for (int r = 0; r < ranks(); ++r)
      EXPECT_TRUE(same_bytes(out[r], values(r, n() + r, dtype))) << r;
    Tensor whole = zeros({ranks(), n()}, dtype);
    all_gather_into_tensor(whole, values(rank, n(), dtype), options).wait();
    for (int r = 0; r < ranks(); ++r)
      EXPECT_TRUE(same_bytes(whole.as_strided_raw({n()}, {1}, r * n()), values(r, n(), dtype)));
  });
}

TEST_P(Matrix, GatherAndScatter) {
  for_each([](int rank, DType dtype, const CallOptions& options) {
    for (int root = 0; root < ranks(); ++root) {
      std::vector<Tensor> list;
      if (rank == root)
        for (int r = 0; r < ranks(); ++r) list.push_back(zeros({n()}, dtype));
      gather(list, values(rank, n(), dtype), root, options).wait();
      for (size_t r = 0; r < list.size(); ++r)
        EXPECT_TRUE(same_bytes(list[r], values(int(r), n(), dtype)));
      if (rank == root) list = all_values(dtype, root);
      Tensor x = zeros({n()}, dtype);
      scatter(x, list, root, options).wait();
      EXPECT_TRUE(same_bytes(x, values(rank, n(), dtype, root)));
    }
  });
}

TEST_P(Matrix, ReduceScatter) {
  for_each([](int rank, DType dtype, const CallOptions& options) {
    for (ReduceOp op : kOps) {
      if (op == ReduceOp::kAvg && !is_float(dtype)) continue;
      auto size = [](int r) { return n() > 0 ? n() + r : 0; };
      std::vector<Tensor> in, mine;
      for (int r = 0; r < ranks(); ++r) {
        in.push_back(values(rank, size(r), dtype, r));
        mine.push_back(values(r, size(rank), dtype, rank));
      }
      Tensor x = zeros({size(rank)}, dtype);
      reduce_scatter(x, in, op, options).wait();
      EXPECT_TRUE(same_bytes(x, expected(op, mine))) << name_of(op);
      for (int r = 0; r < ranks(); ++r)  // inputs are kept
        EXPECT_TRUE(same_bytes(in[r], values(rank, size(r), dtype, r)));
    }
    Tensor x = zeros({n()}, dtype);
    reduce_scatter_tensor(x, values(rank, ranks() * n(), dtype), ReduceOp::kMax, options).wait();
    std::vector<Tensor> mine;
    for (int r = 0; r < ranks(); ++r)
      mine.push_back(
          copy_of(values(r, ranks() * n(), dtype).as_strided_raw({n()}, {1}, rank * n())));
    EXPECT_TRUE(same_bytes(x, expected(ReduceOp::kMax, mine)));
  });
}

TEST_P(Matrix, AllToAll) {
  for_each([](int rank, DType dtype, const CallOptions& options) {
    std::vector<Tensor> in, out;
    for (int r = 0; r < ranks(); ++r) {
      in.push_back(values(rank, n() + r, dtype, r));
      out.push_back(zeros({n() + rank}, dtype));
    }
    all_to_all(out, in, options).wait();
    for (int r = 0; r < ranks(); ++r)
      EXPECT_TRUE(same_bytes(out[r], values(r, n() + rank, dtype, rank)));
  });
}

TEST_P(Matrix, Pieces) {
  for_each([](int rank, DType dtype, const CallOptions&) {
    for (bool in_place : {true, false}) {
      // Two buffers of two dtypes in one call, as FSDP has them.
      std::vector<Tensor> full{zeros({ranks() * n()}, dtype), zeros({ranks() * 3}, kFloat32)};
      std::vector<Tensor> pieces{values(rank, n(), dtype), values(rank, 3, kFloat32)};
      if (in_place)
        for (size_t i = 0; i < 2; ++i) {
          const int64_t size = pieces[i].numel();
          Tensor place = full[i].as_strided_raw({size}, {1}, rank * size);
          copy_raw(place, pieces[i]);
          pieces[i] = place;
        }
      default_group()->all_gather_pieces(full, pieces).wait();
      for (int r = 0; r < ranks(); ++r) {
        EXPECT_TRUE(same_bytes(full[0].as_strided_raw({n()}, {1}, r * n()), values(r, n(), dtype)));
        EXPECT_TRUE(same_bytes(full[1].as_strided_raw({3}, {1}, r * 3), values(r, 3, kFloat32)));
      }
      for (auto& f : full) copy_raw(f, values(rank, f.numel(), f.dtype(), 5));
      default_group()->reduce_scatter_pieces(pieces, full).wait();
      for (size_t i = 0; i < 2; ++i) {
        const int64_t size = pieces[i].numel();
        std::vector<Tensor> mine;
        for (int r = 0; r < ranks(); ++r)
          mine.push_back(copy_of(values(r, full[i].numel(), full[i].dtype(), 5)
                                     .as_strided_raw({size}, {1}, rank * size)));
        EXPECT_TRUE(same_bytes(pieces[i], expected(ReduceOp::kSum, mine)));
      }
    }
  });
}

TEST_P(Matrix, SendAndRecv) {
  for_each([](int rank, DType dtype, const CallOptions& options) {
    if (ranks() == 1) return;
    const int next = (rank + 1) % ranks(), before = (rank + ranks() - 1) % ranks();
    Tensor x = zeros({n()}, dtype);
    const Work receive = irecv(x, before, 3, options);
    const Work sent = isend(values(rank, n(), dtype), next, 3, options);
    sent.wait();
    receive.wait();
    EXPECT_EQ(receive.source(), before);
    EXPECT_TRUE(same_bytes(x, values(before, n(), dtype)));
  });
}
INSTANTIATE_TEST_SUITE_P(All, Matrix,
                         testing::Combine(testing::Values(1, 2, 3, 4),
                                          testing::Values(0, 1, 3, 1000, 100003)),
                         [](const auto& info) {
                           return concat("ranks_", std::get<0>(info.param), "_size_",
                                         std::get<1>(info.param));
                         });

TEST(Collectives, LargeOnesInManyChunks) {
  run_ranks(3, [](int rank) {
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

TEST(Collectives, TensorsOfAnyStrides) {
  run_ranks(3, [](int rank) {
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

TEST(Collectives, RaiseTheVersionOfWhatTheyWrite) {
  run_ranks(2, [](int rank) {
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

TEST(Collectives, AllToAllSingle) {
  for (int ranks : {2, 3}) {
    run_ranks(ranks, [ranks](int rank) {
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

TEST(Collectives, AThousandInFlight) {
  run_ranks(4, [](int rank) {
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

TEST(Collectives, OnePairOfDtypesAndGroupsAtOnce) {
  run_ranks(4, [](int rank) {
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

TEST(Collectives, GroupsMayBeUsedInAnyOrderBetweenThem) {
  run_ranks(2, [](int rank) {
    const Group a = new_group({0, 1}), b = new_group({0, 1});
    Tensor x = full({100}, 1), y = full({100}, 2);
    const Work first = (rank == 0 ? a : b)->all_reduce(rank == 0 ? x : y);
    const Work second = (rank == 0 ? b : a)->all_reduce(rank == 0 ? y : x);
    first.wait();
    second.wait();
    EXPECT_EQ(x.data<float>()[0] * 10 + y.data<float>()[0], 24);
  });
}

TEST(Collectives, StartAndEndAreTold) {
  run_ranks(2, [](int rank) {
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

TEST(Collectives, ScratchIsSmallAndCountedAsCommunication) {
  for (int ranks : {2, 4}) {
    run_ranks(ranks, [ranks](int rank) {
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
      EXPECT_GT(after.peak, before.allocated);
      EXPECT_LE(after.peak_by_category[int(MemoryCategory::kCommunication)],
                before[MemoryCategory::kCommunication] + (1 << 20));
      EXPECT_EQ(after[MemoryCategory::kActivations], before[MemoryCategory::kActivations]);
    });
  }
}

TEST(Collectives, BarrierWaits) {
  std::atomic<bool> woke = false;
  run_ranks(3, [&](int rank) {
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

TEST(Collectives, WrongArgumentsAreRefusedBeforeAnythingIsSent) {
  run_ranks(2, [](int rank) {
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
    run_ranks(2, [](int rank) {
      scatter(zeros({4}), rank == 0 ? std::vector<Tensor>(3, zeros({4})) : std::vector<Tensor>(),
              0);
    });
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("[scatter] got 3 inputs, should be 2"), std::string::npos)
        << e.what();
  }
}

TEST(PointToPoint, OrdersTagsAndSources) {
  run_ranks(4, [](int rank) {
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

TEST(PointToPoint, DoesNotWaitForCollectives) {
  run_ranks(2, [](int rank) {
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

TEST(Processes, Collectives) {
  run_processes(3, [](int rank) {
    EXPECT_EQ(rank, dist::rank());
    EXPECT_EQ(local_rank(), rank);
    EXPECT_EQ(local_world_size(), 3);
    for (int64_t n : {1, 50000}) {
      Tensor x = full({n}, rank + 1.0);
      all_reduce(x);
      EXPECT_EQ(x.data<float>()[n - 1], 6);
    }
    Tensor x = zeros({3});
    if (rank == 0) recv(x);
    if (rank == 2) send(full({3}, 8), 0);
    EXPECT_EQ(x.data<float>()[2], rank == 0 ? 8 : 0);
  });
}

TEST(Processes, FailuresAreReported) {
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
