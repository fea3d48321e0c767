// What is particular to the shm backend: the arena, waiting, tensors that lie outside the arena,
// what is left behind, and how a backend is chosen. collectives_test and faults_test run over it
// too.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <thread>

#include "core/block_source.h"
#include "core/context.h"
#include "distributed/shm/arena.h"
#include "distributed/shm/bell.h"
#include "distributed/shm/node.h"
#include "tests/distributed/spawn.h"
#include "tests/errors.h"

namespace sherd::dist {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// But for those of Open MPI, which tests that run beside this one may use.
std::set<std::string> files_in(const std::string& folder) {
  std::set<std::string> names;
  for (const auto& f : std::filesystem::directory_iterator(folder))
    if (!f.path().filename().string().starts_with("vader_segment")) names.insert(f.path());
  return names;
}

bool is_in(const Arena& arena, const char* data) { return arena.find(data, 0).block >= 0; }

int open_descriptors() { return int(files_in("/proc/self/fd").size()); }

TEST(Arena, ShowsItsBlocksToOthers) {
  auto arena = std::make_shared<Arena>();
  char* a = arena->take(100000);
  EXPECT_EQ(arena->find(a - 1, 1).block, -1);
  char* b = arena->take(4096);  // may lie anywhere, also right below
  std::strcpy(a + 70000, "hello");
  const Place place = arena->find(a + 70000, 6);
  EXPECT_EQ(place.offset, 70000);
  ArenaView view{Fd(dup(arena->fd()))};
  EXPECT_STREQ(view.at(place, 6), "hello");
  EXPECT_NE(view.at(place, 6), a + 70000);
  std::strcpy(a + 70000, "again");
  EXPECT_STREQ(view.at(place, 6), "again");

  EXPECT_TRUE(is_in(*arena, b + 4095));
  EXPECT_FALSE(is_in(*arena, reinterpret_cast<const char*>(&place)));
  EXPECT_EQ(arena->find(a + 99999, 10000).block, -1);  // past its end

  struct stat s {};
  fstat(arena->fd(), &s);
  const auto before = s.st_blocks;
  std::memset(a, 1, 100000);
  arena->give_back(a, 100000);
  fstat(arena->fd(), &s);
  EXPECT_LE(s.st_blocks, before);  // its pages are gone, though it is mapped
  EXPECT_EQ(*view.at(place, 6), 0);
  EXPECT_FALSE(is_in(*arena, a));
}

// Memory is there when it is given out: where there is none, that is an error of the allocation and
// not a SIGBUS at the first write.
TEST(Arena, TakesPagesAndNotPromises) {
  Arena arena;
  char* a = arena.take(1 << 20);
  ASSERT_NE(a, nullptr);
  struct stat s {};
  fstat(arena.fd(), &s);
  EXPECT_GE(s.st_blocks * 512, 1 << 20);
  EXPECT_EQ(a[0], 0);
  arena.give_back(a, 1 << 20);
  fstat(arena.fd(), &s);
  EXPECT_EQ(s.st_blocks, 0);
}

TEST(Arena, MoreThanThereIsIsRefused) {
  run_processes(1,
                [](int) {
                  // Should the arena ask all the same, it must not get the machine's last page.
                  signal(SIGXFSZ, SIG_IGN);
                  const rlimit most{1 << 30, 1 << 30};
                  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &most), 0);
                  Arena arena;
                  errno = 0;
                  EXPECT_EQ(arena.take(int64_t(1) << 50), nullptr);
                  EXPECT_EQ(errno, ENOMEM);
                  EXPECT_NE(arena.take(1 << 20), nullptr);
                },
                {.init = false});
}

int mappings() {
  std::ifstream maps("/proc/self/maps");
  int n = 0;
  for (std::string line; std::getline(maps, line);) n += line.find("memfd:sherd") != line.npos;
  return n;
}

TEST(Arena, ViewsLetBlocksGo) {
  Arena arena;
  ArenaView view{Fd(dup(arena.fd()))};
  std::vector<Place> places;
  for (int i = 0; i < 5; ++i) places.push_back(arena.find(arena.take(4096), 4096));
  const int before = mappings();
  char* written = view.at(places[0], 4096, true);
  for (auto& p : places) view.at(p, 4096);
  EXPECT_EQ(view.mapped(), 5);
  EXPECT_EQ(mappings(), before + 5);
  view.forget_most();
  EXPECT_EQ(view.mapped(), 1);
  EXPECT_EQ(mappings(), before + 1);
  written[5] = 7;
  EXPECT_EQ(view.at(places[0], 4096)[5], 7);
  view.at(places[3], 4096);  // again
  view.forget(places[0]);
  view.forget(places[3]);
  view.forget(places[4]);  // not mapped: nothing
  EXPECT_EQ(view.mapped(), 0);
  EXPECT_EQ(mappings(), before);
}

// Groups that come and go leave no blocks, neither in the rank's arena nor mapped by its peers.
TEST(Shm, GroupsThatEndLeaveNothingMapped) {
  run_processes(2,
                [](int) {
                  Tensor x = full({100000}, 1);
                  const auto once = [&] {
                    const Group g = new_group({0, 1});
                    all_reduce(x, ReduceOp::kMax, {.group = g});
                    const Work sent = isend(x, 1 - rank(), 0, {.group = g});
                    Tensor y = zeros({100000});
                    recv(y, 1 - rank(), 0, {.group = g});
                    sent.wait();
                    destroy_process_group(g);
                  };
                  once();
                  once();
                  const int before = mappings();
                  for (int i = 0; i < 20; ++i) once();
                  EXPECT_EQ(mappings(), before);
                },
                {.backend = "shm"});
}

TEST(Arena, PlacesThatMakeNoSenseAreErrors) {
  Arena arena;
  const Place good = arena.find(arena.take(8192), 8192);
  ArenaView view{Fd(dup(arena.fd()))};
  for (Place bad : {Place{-4096, 8192, 0}, Place{0, 8192 + 4096, 0}, Place{1, 4096, 0},
                    Place{int64_t(1) << 62, int64_t(1) << 62, 0}, Place{0, -1, 0}, Place{0, 0, 0}})
    EXPECT_THROW(view.at(bad, 1), Error);
  view.at(good, 8192);
  for (Place bad : {Place{0, 8192, 8192}, Place{0, 8192, -1}, Place{0, 8192, int64_t(1) << 62}})
    EXPECT_THROW(view.at(bad, 1), Error);
  EXPECT_THROW(view.at(good, 8193), Error);
  EXPECT_THROW(view.at(good, -1), Error);
}

TEST(Arena, TensorsComeFromASourceAndOlderOnesRetire) {
  Context context;
  ContextGuard guard(context);
  Tensor old = full({100000}, 1), small_old = full({10}, 1);
  auto arena = std::make_shared<Arena>();
  set_block_source(context, arena);
  EXPECT_FALSE(is_in(*arena, old.bytes()));
  const int64_t reserved = memory_stats().reserved;
  old = Tensor();
  EXPECT_LT(memory_stats().reserved, reserved);
  Tensor large = full({100000}, 2), medium = full({16384}, 3), small = full({10}, 4);
  EXPECT_TRUE(is_in(*arena, large.bytes()) && is_in(*arena, medium.bytes()));
  EXPECT_FALSE(is_in(*arena, small.bytes()));
  const char* at = large.bytes();
  large = Tensor();
  large = full({100000}, 5);
  EXPECT_EQ(large.bytes(), at);  // cached as ever
  EXPECT_EQ(medium.data<float>()[16383], 3);
}

TEST(Bell, WakesWhoeverWaits) {
  struct Shared {
    Bell bells[2];
    std::atomic<int> value[2];
  };
  void* p =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto& shared = *static_cast<Shared*>(p);
  auto play = [&](int me) {
    Patience patience;
    for (int i = 1; i <= 5000; ++i) {
      shared.value[me].store(i);
      ring(shared.bells[1 - me], me);
      ASSERT_TRUE(patience.wait(shared.bells[me], 1 - me, Clock::now() + std::chrono::seconds(20),
                                [&] { return shared.value[1 - me].load() >= i; }));
    }
  };
  std::thread other([&] { play(1); });
  play(0);
  other.join();
  const auto start = Clock::now();
  Patience patience;
  EXPECT_FALSE(patience.wait(shared.bells[0], -1, start + milliseconds(50), [] { return false; }));
  EXPECT_GE(Clock::now() - start, milliseconds(50));
  EXPECT_LT(Clock::now() - start, milliseconds(5000));
  munmap(p, sizeof(Shared));
}

Tensor wrapped(std::vector<float>& memory) {
  return over_storage(make_ref<Storage>(reinterpret_cast<char*>(memory.data()),
                                        int64_t(memory.size() * sizeof(float)), kCPU, nullptr),
                      {int64_t(memory.size())}, kFloat32);
}

TEST(Shm, TensorsOutsideTheArena) {
  run_processes(3,
                [](int rank) {
                  const int64_t n = 300000;
                  Tensor older = full({3 * n}, rank + 1);
                  init_process_group({.backend = "shm"});
                  std::vector<float> memory(3 * n, float(rank + 1));
                  for (Tensor x : {older, wrapped(memory)}) {
                    auto fill = [&](float v) { std::fill_n(x.data<float>(), x.numel(), v); };
                    all_reduce(x);
                    EXPECT_EQ(x.data<float>()[0] + x.data<float>()[3 * n - 1], 12);
                    fill(rank);
                    broadcast(x, 2);
                    EXPECT_EQ(x.data<float>()[0] + x.data<float>()[3 * n - 1], 4);
                    fill(rank + 1);
                    Tensor mine = x.as_strided_raw({n}, {1}, rank * n);
                    default_group()->reduce_scatter_pieces({mine}, {x}).wait();
                    EXPECT_EQ(mine.data<float>()[0] + mine.data<float>()[n - 1], 12);
                    fill(rank);
                    default_group()->all_gather_pieces({x}, {mine}).wait();
                    for (int r = 0; r < 3; ++r) EXPECT_EQ(x.data<float>()[r * n + 7], r);
                    const Work sent = isend(x, (rank + 1) % 3);
                    Tensor y = zeros({3 * n});
                    recv(y, (rank + 2) % 3);
                    sent.wait();
                    EXPECT_EQ(y.data<float>()[2 * n], 2);
                  }
                },
                {.init = false});
}

TEST(Shm, NothingIsLeftBehindNorTakesRoomInDevShm) {
  const auto before = files_in("/dev/shm");
  const auto results =
      run_processes(2,
                    [&](int rank) {
                      Tensor x = full({20 << 20}, 1);  // 80 MiB: more than a container's /dev/shm
                      all_reduce(x);
                      EXPECT_EQ(files_in("/dev/shm"), before);
                      barrier();
                      if (rank == 1) raise(SIGKILL);
                      EXPECT_HAS(error_of([&] { all_reduce(x); }), "rank 1 left");
                      raise(SIGKILL);
                    },
                    {.may_fail = true, .backend = "shm"});
  EXPECT_EQ(results[0].output, "");
  EXPECT_EQ(results[0].signal, SIGKILL);
  EXPECT_EQ(files_in("/dev/shm"), before);
}

TEST(Shm, DescriptorsAndMemoryComeBack) {
  auto once = [](int ranks) {
    run_ranks(ranks,
              [](int rank) {
                Tensor x = full({100000}, rank);
                for (int i = 0; i < 3; ++i) {
                  const Group g = new_group({1, 0});
                  if (g->rank() >= 0) all_reduce(x, ReduceOp::kMax, {.group = g});
                  destroy_process_group(g);
                }
                barrier();
              },
              {.backend = "shm"});
  };
  once(3);
  const int before = open_descriptors();
  for (int i = 0; i < 3; ++i) once(3);
  EXPECT_EQ(open_descriptors(), before);
}

TEST(Shm, APeerKilledInMidTransferIsNoticedAtOnce) {
  for (int delay : {3, 11, 23}) {
    const auto results =
        run_processes(3,
                      [delay](int rank) {
                        Tensor x = full({8 << 20}, 1), list = full({9 << 20}, 1);
                        barrier();
                        std::thread killer;
                        if (rank == 1)
                          killer = std::thread([delay] {
                            std::this_thread::sleep_for(milliseconds(delay));
                            raise(SIGKILL);
                          });
                        const auto start = Clock::now();
                        const std::string error = error_of([&] {
                          for (;;) {
                            all_reduce(x, ReduceOp::kMax);
                            all_gather_into_tensor(list, x.as_strided_raw({3 << 20}, {1}, 0));
                            broadcast(x, rank == 0 ? 0 : 0);
                          }
                        });
                        EXPECT_HAS(error, "1 left");
                        EXPECT_LT(Clock::now() - start, milliseconds(8000));
                      },
                      {.may_fail = true, .backend = "shm"});
    EXPECT_EQ(results[1].signal, SIGKILL);
    for (int r : {0, 2}) EXPECT_TRUE(results[r].ok()) << results[r].output;
  }
}

TEST(Shm, ManyMessagesMayWaitForTheirReceive) {
  run_ranks(2,
            [](int rank) {
              constexpr int kMessages = 100;
              auto size = [](int i) { return int64_t(i % 3 == 0 ? 5 : i % 3 == 1 ? 1000 : 40000); };
              std::vector<Work> works;
              std::vector<Tensor> got;
              for (int i = 0; i < kMessages; ++i)
                works.push_back(isend(full({size(i)}, i + 0.5 * rank), 1 - rank, i));
              for (int i = kMessages - 1; i >= 0; --i) {
                got.push_back(zeros({size(i)}));
                works.push_back(irecv(got.back(), 1 - rank, i));
              }
              for (const Work& w : works) w.wait();
              for (int i = 0; i < kMessages; ++i) {
                const Tensor& x = got[kMessages - 1 - i];
                EXPECT_EQ(x.data<float>()[x.numel() - 1], i + 0.5f * float(1 - rank));
              }
            },
            {.backend = "shm"});
}

TEST(Shm, SixtyFourRanksMeet) {
  const auto start = Clock::now();
  run_processes(64,
                [](int rank) {
                  barrier();
                  Tensor x = full({100}, rank, kInt64);
                  all_reduce(x);
                  EXPECT_EQ(x.data<int64_t>()[99], 64 * 63 / 2);
                },
                {.backend = "shm"});
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(30));  // 10 on an idle machine
}

TEST(Backend, IsChosenByName) {
  run_ranks(2, [](int) { EXPECT_EQ(default_group()->backend(), "shm"); }, {.backend = "shm"});
  run_ranks(2, [](int) { EXPECT_EQ(default_group()->backend(), "gloo"); }, {.backend = "gloo"});
  for (const char* name : {"", "auto", "shm", "gloo"}) {
    setenv("SHERD_BACKEND", name, 1);
    const std::string want = *name && std::string(name) != "auto" ? name : "shm";
    run_ranks(2, [&](int) { EXPECT_EQ(default_group()->backend(), want); });
    run_ranks(2, [&](int) { EXPECT_EQ(default_group()->backend(), "gloo"); }, {.backend = "gloo"});
  }
  setenv("SHERD_BACKEND", "pigeons", 1);
  run_ranks(2,
            [](int rank) {
              EXPECT_HAS(error_of([&] { init_process_group({.rank = rank, .world_size = 2}); }),
                         "no backend 'pigeons'");
            },
            {.init = false});
  unsetenv("SHERD_BACKEND");
}

TEST(Backend, ThatDiffersBetweenRanksIsAnError) {
  auto store = std::make_shared<MemoryStore>();
  std::vector<std::string> errors(2);
  run_ranks(2,
            [&](int rank) {
              errors[rank] = error_of([&] {
                init_process_group({.backend = rank == 0 ? "gloo" : "shm",
                                    .rank = rank,
                                    .world_size = 2,
                                    .timeout = milliseconds(300),
                                    .store = store});
              });
            },
            {.init = false});
  const int second = errors[0].find("another rank") == std::string::npos;
  EXPECT_HAS(errors[second], "asks for backend");
  EXPECT_HAS(errors[1 - second], concat("missing are ranks ", second));
}

}  // namespace
}  // namespace sherd::dist
