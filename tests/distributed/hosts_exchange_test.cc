// Groups that span hosts: ranks are threads of this process that share memory with those of their
// own "host" alone. Beside each such group there is one over Gloo, which must have the same bits.
#include "distributed/hosts_exchange.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

#include "core/context.h"
#include "core/threads.h"
#include "distributed/gloo/gloo_mesh.h"
#include "distributed/mesh_process_group.h"
#include "distributed/shm/shm_mesh.h"
#include "tests/errors.h"

namespace sherd::dist {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

struct Rank {
  int rank, size;
  Group group, flat;
};
struct HostsOptions {
  milliseconds timeout = std::chrono::seconds(20);
  bool leaves = true;
};

void run_hosts(int hosts, int per_host, const std::function<void(const Rank&)>& f,
               const HostsOptions& options = {}) {
  const int threads_before = num_threads();
  set_num_threads(1);
  auto store = std::make_shared<MemoryStore>();
  const int size = hosts * per_host;
  std::vector<int> all(size), numbers(per_host);
  std::iota(all.begin(), all.end(), 0);
  std::iota(numbers.begin(), numbers.end(), 0);
  std::mutex mutex;
  std::string errors;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      Context context;
      ContextGuard guard(context);
      try {
        const auto patience = std::chrono::seconds(20);
        const int host = rank / per_host, number = rank % per_host;
        PrefixStore host_store(concat("host", host), store);
        const auto node = Node::meet(host_store, number, per_host, patience);
        const auto group = [&](const std::string& name, bool by_hosts) {
          const auto own = std::make_shared<PrefixStore>(name, store);
          MeshProcessGroup::Init init{name,    name,    rank, all,
                                      nullptr, nullptr, own,  options.timeout};
          init.mesh = connect_gloo_mesh(rank, all, *own, "127.0.0.1", patience);
          if (by_hosts) {
            PrefixStore within_store("within", std::make_shared<PrefixStore>(concat(host), own));
            ShmTransport shm = connect_shm(node, number, numbers, within_store, patience);
            HostsTransport t =
                connect_hosts(std::move(init.mesh), {std::move(shm.mesh), std::move(shm.exchange)},
                              rank, size, per_host);
            init.mesh = std::move(t.mesh), init.exchange = std::move(t.exchange);
          }
          return std::make_shared<MeshProcessGroup>(std::move(init));
        };
        const Rank r{rank, size, group("hosts", true), group("flat", false)};
        f(r);
        if (!options.leaves) return;
        r.group->leave();
        r.flat->leave();
      } catch (const std::exception& e) {
        std::lock_guard lock(mutex);
        errors += concat(errors.empty() ? "" : "\n", "rank ", rank, ": ", e.what());
      }
    });
  for (auto& t : threads) t.join();
  set_num_threads(threads_before);
  if (!errors.empty()) throw Error(errors);
}

Tensor values(int rank, int64_t n, DType dtype, int salt = 0) {
  Tensor x = empty({n}, kFloat64);
  std::mt19937 random(uint32_t(1000 * salt + rank));
  for (int64_t i = 0; i < n; ++i) {
    const double v = double(random() % 1000);
    x.data<double>()[i] = is_float(dtype) ? v * 1.3 - 600 : double(int64_t(v) % 16);
  }
  return to_raw(x, dtype);
}
bool same(const Tensor& a, const Tensor& b) {
  const Tensor x = contiguous_raw(a), y = contiguous_raw(b);
  return x.numel() == y.numel() && x.dtype() == y.dtype() &&
         (x.numel() == 0 || std::memcmp(x.bytes(), y.bytes(), x.nbytes()) == 0);
}

// Runs `f(group)`, which returns tensors, on both groups.
void expect_same(const Rank& r, const std::function<std::vector<Tensor>(ProcessGroup&)>& f) {
  const auto a = f(*r.group), b = f(*r.flat);
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(same(a[i], b[i])) << "tensor " << i;
}

class Hosts : public testing::TestWithParam<std::pair<int, int>> {};
INSTANTIATE_TEST_SUITE_P(All, Hosts,
                         testing::Values(std::pair(2, 2), std::pair(3, 2), std::pair(2, 4)),
                         [](const auto& info) {
                           return concat(info.param.first, "_of_", info.param.second);
                         });

TEST_P(Hosts, SameBitsAsOverGloo) {
  run_hosts(GetParam().first, GetParam().second, [](const Rank& r) {
    const int w = r.size;
    for (DType dtype : {kFloat32, kBFloat16, kInt64})
      for (int64_t n : {0, 3, 50003, 400003}) {
        const bool large = n > 100000;  // of several chunks
        if (large && dtype != kFloat32) continue;
        SCOPED_TRACE(concat("rank ", r.rank, ", ", dtype, " [", n, "]"));
        const auto mine = [&](int salt = 0) { return values(r.rank, n, dtype, salt); };
        for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax, ReduceOp::kProduct,
                            ReduceOp::kBxor}) {
          if (is_float(dtype) ? op == ReduceOp::kBxor : op == ReduceOp::kAvg) continue;
          if ((large || dtype == kBFloat16) && op != ReduceOp::kSum && op != ReduceOp::kAvg)
            continue;
          SCOPED_TRACE(name_of(op));
          expect_same(r, [&](ProcessGroup& g) {
            const Tensor x = mine();
            g.all_reduce(x, op).wait();
            return std::vector{x};
          });
          expect_same(r, [&](ProcessGroup& g) {
            const std::vector<Tensor> list{mine(), values(r.rank, 3, kFloat32), mine(2)};
            if (op != ReduceOp::kBxor) g.all_reduce_coalesced(list, op).wait();
            return list;
          });
          expect_same(r, [&](ProcessGroup& g) {
            const Tensor x = mine();
            g.reduce(x, w - 1, op).wait();
            return std::vector{x};
          });
          expect_same(r, [&](ProcessGroup& g) {  // pieces of any sizes
            std::vector<Tensor> in;
            for (int i = 0; i < w; ++i) in.push_back(values(r.rank, n ? n + i : 0, dtype, i));
            const Tensor x = zeros({n ? n + r.rank : 0}, dtype);
            g.reduce_scatter(x, in, op).wait();
            in.push_back(x);  // and inputs are kept
            return in;
          });
        }
        for (bool in_place : {false, true})
          expect_same(r, [&](ProcessGroup& g) {
            std::vector<Tensor> full{values(r.rank, w * n, dtype), values(r.rank, 2 * w, kFloat32)};
            std::vector<Tensor> pieces{zeros({n}, dtype), zeros({2})};
            if (in_place)
              for (size_t i = 0; i < 2; ++i) {
                const int64_t c = pieces[i].numel();
                pieces[i] = full[i].as_strided_raw({c}, {1}, r.rank * c);
              }
            g.reduce_scatter_pieces(pieces, full).wait();
            std::vector<Tensor> gathered{zeros({w * n}, dtype), zeros({2 * w})};
            g.all_gather_pieces(gathered, pieces).wait();
            return gathered;
          });
        for (int root = 0; root < w; ++root)
          expect_same(r, [&](ProcessGroup& g) {
            const Tensor x = mine(), y = zeros({n}, dtype);
            g.broadcast(x, root).wait();
            std::vector<Tensor> list;
            for (int i = 0; r.rank == root && i < w; ++i) list.push_back(zeros({n}, dtype));
            g.gather(list, mine(1), root).wait();
            g.scatter(y, list, root).wait();
            list.insert(list.end(), {x, y});
            return list;
          });
        expect_same(r, [&](ProcessGroup& g) {
          std::vector<Tensor> all, in, out;
          for (int i = 0; i < w; ++i) {
            all.push_back(zeros({n + i}, dtype));
            in.push_back(values(r.rank, n + i, dtype, i));
            out.push_back(zeros({n + r.rank}, dtype));
          }
          g.all_gather(all, values(r.rank, n + r.rank, dtype)).wait();
          g.all_to_all(out, in).wait();
          g.barrier().wait();
          all.insert(all.end(), out.begin(), out.end());
          return all;
        });
      }
  });
}

TEST_P(Hosts, ManyInFlightOfAllKindsAndTransfersBetween) {
  run_hosts(GetParam().first, GetParam().second, [](const Rank& r) {
    std::mt19937 random(5);
    std::vector<Work> works;
    std::vector<std::pair<Tensor, double>> want;
    const double w = r.size, sum = w * (w - 1) / 2;
    const Tensor got = zeros({7});
    works.push_back(r.group->recv(got, (r.rank + 1) % r.size, 9));
    for (int i = 0; i < 200; ++i) {
      const int64_t n = std::array{0, 4, 3000, 60000}[random() % 4];
      const int root = int(random() % r.size);
      Tensor x = full({n}, r.rank);
      switch (random() % 4) {
        case 0:
          works.push_back(r.group->all_reduce(x));
          want.emplace_back(x, sum);
          break;
        case 1:
          works.push_back(r.group->broadcast(x, root));
          want.emplace_back(x, root);
          break;
        case 2: {
          std::vector<Tensor> out;
          for (int k = 0; k < r.size; ++k) want.emplace_back(zeros({n}), k);
          for (int k = 0; k < r.size; ++k) out.push_back(want[want.size() - r.size + k].first);
          works.push_back(r.group->all_gather(out, x));
          break;
        }
        default:
          works.push_back(r.group->barrier());
      }
    }
    works.push_back(r.group->send(full({7}, r.rank), (r.rank + r.size - 1) % r.size, 9));
    for (const Work& work : works) work.wait();
    EXPECT_EQ(got.data<float>()[6], (r.rank + 1) % r.size);
    for (auto& [x, value] : want)
      for (int64_t i = 0; i < x.numel(); i += 97) ASSERT_EQ(x.data<float>()[i], value);
  });
}

// Whoever differs, and wherever it is, all ranks are told who.
TEST(HostsFaults, RanksInDifferentCollectivesAreNamed) {
  for (int other : {0, 1, 3}) {
    std::vector<std::string> errors(4);
    const auto start = Clock::now();
    run_hosts(2, 2, [&](const Rank& r) {
      const Tensor x = zeros({1000}), y = zeros({4000});
      errors[r.rank] = error_of([&] {
        r.group->all_reduce(x).wait();
        if (r.rank == other)
          r.group->barrier().wait();
        else
          r.group->all_gather_pieces({y}, {x}).wait();
        r.group->barrier().wait();
      });
    });
    EXPECT_LT(Clock::now() - start, milliseconds(15000));
    for (auto& e : errors) {
      EXPECT_HAS(e, "ranks are in different collectives");
      EXPECT_HAS(e, concat("rank ", other, " entered #2 barrier"));
      EXPECT_HAS(e, "entered #2 all_gather of float32 [1000]");
    }
  }
}

TEST(HostsFaults, ADeadlineSaysWhoDidNotArrive) {
  std::vector<std::string> errors(4);
  run_hosts(2, 2,
            [&](const Rank& r) {
              const Tensor x = zeros({5});
              r.group->barrier().wait();
              if (r.rank == 2) std::this_thread::sleep_for(milliseconds(1500));
              errors[r.rank] = error_of([&] { r.group->all_reduce(x).wait(); });
            },
            {.timeout = milliseconds(600)});
  for (auto& e : errors) {
    EXPECT_HAS(e, "waited 600 ms in #2 all_reduce SUM of float32 [5]");
    EXPECT_HAS(e, "Arrived: ranks 0, 1, 3");
    EXPECT_HAS(e, "rank 2 has entered nothing since #1 barrier");
  }
}

TEST(HostsFaults, ARankThatEndsIsMissedOnAllHosts) {
  std::vector<std::string> errors(4);
  const auto start = Clock::now();
  run_hosts(2, 2,
            [&](const Rank& r) {
              r.group->barrier().wait();
              if (r.rank == 3) {
                std::this_thread::sleep_for(milliseconds(200));
                return;  // its groups are destroyed without a goodbye
              }
              errors[r.rank] = error_of([&] {
                for (;;) r.group->all_reduce(zeros({100000})).wait();
              });
            },
            {.leaves = false});
  EXPECT_LT(Clock::now() - start, milliseconds(15000));
  for (int r : {0, 1, 2}) {
    EXPECT_HAS(errors[r], "rank 3 left");
    EXPECT_HAS(errors[r], "#2 all_reduce");
  }
}

TEST(HostsFaults, OfNoPowerOfTwoAreRefused) {
  EXPECT_HAS(error_of([] { connect_hosts(nullptr, {}, 0, 6, 3); }), "a power of two");
  EXPECT_HAS(error_of([] { connect_hosts(nullptr, {}, 0, 6, 4); }), "that divides them");
}

}  // namespace
}  // namespace sherd::dist
