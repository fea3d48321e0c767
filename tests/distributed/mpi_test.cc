// What is MPI's own: who may be a rank, messages of several pieces, a mesh that closes in the
// middle of a transfer, groups and jobs one after another. Collectives and faults over MPI are in
// collectives_test.cc and faults_test.cc, with those of the other backends.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <random>

#include "distributed/launcher/mpi_world.h"
#include "distributed/mpi/mpi_job.h"
#include "tests/distributed/spawn.h"
#include "tests/errors.h"

namespace sherd::dist {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::seconds;

class Mpi : public testing::Test {
 protected:
  void SetUp() override {
    if (!why_no_mpi().empty()) GTEST_SKIP() << why_no_mpi();
  }
  // Ranks under one mpirun.
  static void over_mpi(int ranks, const std::function<void(int)>& f, bool init = true) {
    run_processes(ranks, f, {.timeout = seconds(60), .init = init, .backend = "mpi"});
  }
};

// ---- who may be a rank

TEST(MpiRanks, MayNotBeThreads) {
  const std::string e = error_of([] { run_ranks(2, [](int) {}, {.backend = "mpi"}); });
  for (int r : {0, 1}) EXPECT_HAS(e, concat("rank ", r, ": [init_process_group] backend 'mpi'"));
  EXPECT_HAS(e, "needs a process a rank, and ranks 0, 1 are threads of one: use shm or gloo");
}

TEST(MpiRanks, AreStartedByMpirun) {
  run_processes(3,
                [](int) {
                  const std::string e = error_of([] { init_process_group({.backend = "mpi"}); });
                  EXPECT_HAS(e, "mpirun started, and it did not start ranks 0, 1, 2");
                  EXPECT_HAS(e, "sherdrun --backend=mpi");
                },
                {.init = false});
}

TEST(MpiRanks, OneAloneNeedsNoMpi) {
  run_processes(1,
                [](int) {
                  init_process_group({.backend = "mpi"});
                  Tensor x = full({3}, 2);
                  all_reduce(x);
                  EXPECT_EQ(x.data<float>()[2], 2);
                  EXPECT_EQ(default_group()->backend(), "mpi");
                  destroy_process_group();
                },
                {.init = false});
}

TEST_F(Mpi, RanksAreAllOfOneMpirun) {
  const auto refused = [](const char* variable, const char* value, int changed,
                          const std::string& text) {
    over_mpi(
        2,
        [=](int rank) {
          if (changed < 0 || rank == changed) setenv(variable, value, 1);
          EXPECT_HAS(error_of([] { init_process_group({.backend = "mpi"}); }), text);
          _exit(testing::Test::HasFailure());  // MPI was not begun
        },
        false);
  };
  refused("PMIX_NAMESPACE", "other", 1, "ranks 0 and 1 come from two");
  refused("PMIX_NAMESPACE", "", 0, "it did not start rank 0:");
  refused("PMIX_RANK", "0", 1, "ranks 0 and 1 are both MPI's process 0");
  refused("OMPI_COMM_WORLD_SIZE", "4", -1,
          "mpirun started 4 processes, and the job has a world size of 2");
}

TEST_F(Mpi, AutoNeverPicksIt) {
  over_mpi(
      2,
      [](int) {
        unsetenv("SHERD_BACKEND");
        init_process_group();
        EXPECT_EQ(default_group()->backend(), "shm");
        Tensor x = full({3}, 1);
        all_reduce(x);
        EXPECT_EQ(x.data<float>()[0], 2);
        destroy_process_group();
        _exit(testing::Test::HasFailure());
      },
      false);
}

TEST(MpiWorld, SaysWhatIsMissing) {
  const std::string path = std::getenv("PATH");
  setenv("PATH", "/nowhere", 1);
  const std::string e = error_of([] { MpiWorld world(2); });
  setenv("PATH", path.c_str(), 1);
  EXPECT_HAS(e, "backend 'mpi' needs mpirun, which is in no folder of PATH: install openmpi-bin");
}

TEST_F(Mpi, WorldSaysWhatMpirunSaid) {
  const std::string folder = testing::TempDir() + concat("no_mpirun_", getpid());
  std::filesystem::create_directory(folder);
  {
    FILE* script = std::fopen((folder + "/mpirun").c_str(), "w");
    std::fputs("#!/bin/sh\necho there are not enough slots; exit 3\n", script);
    std::fclose(script);
    std::filesystem::permissions(folder + "/mpirun", std::filesystem::perms::owner_all);
  }
  const std::string path = std::getenv("PATH");
  setenv("PATH", concat(folder, ":", path).c_str(), 1);
  const std::string e = error_of([] { MpiWorld world(2); });
  setenv("PATH", path.c_str(), 1);
  EXPECT_HAS(e, "mpirun ended before it had started 2 processes. It says:\n");
  EXPECT_HAS(e, "there are not enough slots");
}

TEST_F(Mpi, WorldsLeaveNothingBehind) {
  std::string folder;
  {
    MpiWorld world(3);
    for (int r = 0; r < 3; ++r) {
      const auto& e = world.environment(r);
      EXPECT_TRUE(std::count(e.begin(), e.end(), concat("OMPI_COMM_WORLD_RANK=", r)));
      EXPECT_TRUE(std::count(e.begin(), e.end(), "OMPI_COMM_WORLD_SIZE=3"));
      for (const std::string& entry : e)
        if (entry.starts_with("OMPI_MCA_orte_jobfam_session_dir="))
          folder = entry.substr(entry.find('=') + 1);
    }
    EXPECT_TRUE(std::filesystem::exists(folder)) << folder;
  }
  EXPECT_FALSE(std::filesystem::exists(folder)) << folder;
}

// ---- the mesh

// One more mesh of all ranks, beside the default group's.
std::unique_ptr<Mesh> own_mesh(int rank, int size, const std::string& name, int64_t largest) {
  PrefixStore store(name, default_store());
  auto job = MpiJob::meet(store, rank, size, seconds(60));
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return connect_mpi_mesh(job, rank, ranks, store, seconds(60), largest);
}
TimePoint in(seconds s) { return Clock::now() + s; }

TEST_F(Mpi, MessagesTravelInPieces) {
  over_mpi(3, [](int rank) {
    auto mesh = own_mesh(rank, 3, "pieces", 1000);
    const int next = (rank + 1) % 3, before = (rank + 2) % 3;
    for (const int64_t bytes : {0, 1, 999, 1000, 1001, 54321}) {
      std::vector<uint8_t> out(bytes + 1), got(bytes + 1, 255);
      for (int64_t i = 0; i < bytes; ++i) out[i] = uint8_t(i * 7 + rank);
      auto send = mesh->buffer(out.data(), bytes), receive = mesh->buffer(got.data(), bytes);
      receive->recv(before, 2, 0, bytes);
      send->send(next, 2, 0, bytes);
      EXPECT_EQ(receive->wait_recv(in(seconds(60))), before);
      send->wait_send(in(seconds(60)));
      for (int64_t i = 0; i < bytes; ++i) ASSERT_EQ(got[i], uint8_t(i * 7 + before)) << i;
      EXPECT_EQ(got[bytes], 255);
    }
    barrier();
    mesh->close();
  });
}

TEST_F(Mpi, AReceiveIsWokenAndTakesFromAny) {
  over_mpi(3, [](int rank) {
    auto mesh = own_mesh(rank, 3, "any", 1 << 20);
    int64_t number = rank;
    auto buffer = mesh->buffer(&number, sizeof number);
    if (rank > 0) {
      barrier();
      buffer->send(0, 3, 0, sizeof number);
      buffer->wait_send(in(seconds(60)));
    } else {
      buffer->recv_any(3, 0, sizeof number);
      buffer->wake();
      EXPECT_EQ(buffer->wait_recv(in(seconds(60))), -1);
      barrier();
      for (int sum = 0, i = 0; i < 2; ++i) {
        const int source = buffer->wait_recv(in(seconds(60)));
        EXPECT_EQ(source, number);
        sum += source;
        if (i == 0) {
          buffer->recv_any(3, 0, sizeof number);
        } else {
          EXPECT_EQ(sum, 3);
        }
      }
    }
    barrier();
    mesh->close();
  });
}

// Memory may be freed as soon as its buffer is, whatever was posted, and MPI stays usable.
TEST_F(Mpi, AClosedMeshLetsGoOfItsBytes) {
  over_mpi(2, [](int rank) {
    constexpr int64_t kBytes = 8 << 20;
    for (int round = 0; round < 3; ++round) {
      auto mesh = own_mesh(rank, 2, concat("closed", round), 1 << 30);
      auto sent = std::make_unique<std::vector<char>>(kBytes, 'a');
      auto taken = std::make_unique<std::vector<char>>(kBytes, 'b');
      {
        auto out = mesh->buffer(sent->data(), kBytes), in_ = mesh->buffer(taken->data(), kBytes);
        out->send(1 - rank, 2, 0, kBytes);                  // nobody takes it in round 0
        if (round == 1) in_->recv(1 - rank, 1, 0, kBytes);  // never sent
        if (round == 2) in_->recv(1 - rank, 2, 0, kBytes);  // may be half way
        if (rank == 0) mesh->close();
        if (rank == 1) {
          const auto receive_for_ever = [&] {
            for (;;) {
              in_->recv(0, 3, 0, kBytes);
              in_->wait_recv(in(seconds(60)));
            }
          };
          EXPECT_THROW(receive_for_ever(), ConnectionLost);
          EXPECT_EQ(mesh->lost_peers(), std::vector<int>{0});
          mesh->close();
        }
        EXPECT_THROW(out->send(1 - rank, 2, 0, 1), ConnectionLost);
      }
      sent.reset(), taken.reset();
    }
    Tensor x = full({1 << 20}, rank + 1);
    all_reduce(x);
    EXPECT_EQ(x.data<float>()[12345], 3);
  });
}

TEST_F(Mpi, ADeadlineClosesTheMesh) {
  over_mpi(2, [](int rank) {
    auto mesh = own_mesh(rank, 2, "deadline", 1 << 30);
    int number = 0;
    auto buffer = mesh->buffer(&number, sizeof number);
    buffer->recv(1 - rank, 2, 0, sizeof number);
    if (rank == 0) {
      EXPECT_THROW(buffer->wait_recv(Clock::now() + std::chrono::milliseconds(100)),
                   DeadlinePassed);
      EXPECT_THROW(buffer->recv(1, 2, 0, sizeof number), ConnectionLost);
    } else {
      EXPECT_THROW(buffer->wait_recv(in(seconds(60))), ConnectionLost);  // by rank 0's notice
    }
  });
}

// ---- groups

TEST_F(Mpi, JobsAndGroupsOneAfterAnother) {
  over_mpi(3, [](int rank) {
    for (int job = 0; job < 3; ++job) {
      std::vector<Group> groups;
      for (int i = 0; i < 8; ++i) groups.push_back(new_group({i % 3, (i + 1) % 3}));
      for (int i = 0; i < 8; ++i) {
        if (groups[i]->rank() < 0) continue;
        Tensor x = full({100}, i + rank, kInt64);
        all_reduce(x, ReduceOp::kSum, {.group = groups[i]});
        EXPECT_EQ(x.data<int64_t>()[99], 2 * i + i % 3 + (i + 1) % 3);
      }
      if (job == 2) return;
      destroy_process_group();
      init_process_group(
          {.backend = "mpi",
           .init_method = concat("file://", testing::TempDir(), "mpi_store_", getppid(), "_", job,
                                 "?rank=", rank, "&world_size=3"),
           .timeout = seconds(60)});
    }
  });
}

TEST_F(Mpi, ManySendsWaitedForInRandomOrder) {
  over_mpi(3, [](int rank) {
    constexpr int kSends = 300;
    std::vector<Work> works;
    std::vector<Tensor> got;
    std::mt19937 random(rank);
    for (int i = 0; i < kSends; ++i) {
      const int64_t n = i % 10 == 0 ? 50000 : i % 7;
      works.push_back(isend(full({n}, i + 1000 * rank), (rank + 1) % 3, i));
      got.push_back(full({n}, -1));
    }
    std::vector<int> order(kSends);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    for (int i : order) works.push_back(irecv(got[i], (rank + 2) % 3, i));
    std::shuffle(works.begin(), works.end(), random);
    for (const Work& w : works) w.wait();
    for (int i = 0; i < kSends; ++i)
      for (int64_t k = 0; k < got[i].numel(); ++k)
        ASSERT_EQ(got[i].data<float>()[k], float(i + 1000 * ((rank + 2) % 3)));
  });
}

// The same bits as over the other backends, of sums that round.
TEST_F(Mpi, SameBitsAsGlooAndShm) {
  std::vector<std::string> said;
  for (const char* backend : {"gloo", "shm", "mpi"}) {
    const auto results = run_processes(3,
                                       [](int rank) {
                                         std::mt19937 random(7 + rank);
                                         std::normal_distribution<float> normal;
                                         uint64_t hash = 14695981039346656037u;
                                         for (const int64_t n : {1000, 300000}) {
                                           Tensor x = empty({3 * n}), piece = empty({n});
                                           for (int64_t i = 0; i < 3 * n; ++i)
                                             x.data<float>()[i] = normal(random);
                                           const Tensor half = to_raw(x, kBFloat16);
                                           reduce_scatter_tensor(piece, x);
                                           all_reduce(x, ReduceOp::kAvg);
                                           all_reduce(half);
                                           for (const Tensor& t : {x, piece, half})
                                             for (int64_t i = 0; i < t.nbytes(); ++i)
                                               hash =
                                                   (hash ^ uint8_t(t.bytes()[i])) * 1099511628211u;
                                         }
                                         std::printf("%016lx\n", hash);
                                       },
                                       {.timeout = seconds(60), .backend = backend});
    std::string all;
    for (const auto& r : results) all += r.output;
    said.push_back(all);
  }
  EXPECT_EQ(said[0].size(), 3 * 17u) << said[0];
  EXPECT_EQ(said[0], said[1]);
  EXPECT_EQ(said[0], said[2]);
}

}  // namespace
}  // namespace sherd::dist
