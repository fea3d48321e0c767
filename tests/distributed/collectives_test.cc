// Collectives over each backend beyond the matrix of collectives_matrix_test.cc: many in flight,
// strides, versions, timeouts, and what is refused.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <random>
#include <thread>

#include "tests/distributed/collectives_reference.h"
#include "tests/distributed/over_backends.h"
#include "tests/errors.h"

namespace sherd::dist {
namespace {

class Collectives : public OverBackends {};
INSTANTIATE_TEST_SUITE_P(All, Collectives, testing::Values("gloo", "shm", "mpi"), name_of_backend);

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
}  // namespace
}  // namespace sherd::dist
