// init_process_group and destroy_process_group: what ranks are told of themselves, how they meet,
// and what is refused.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <thread>

#include "core/context.h"
#include "distributed/socket.h"
#include "tests/distributed/spawn.h"

namespace sherd::dist {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}
bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}
#define EXPECT_HAS(text, part) EXPECT_TRUE(has(text, part)) << "'" << (part) << "' in: " << (text)

constexpr const char* kVariables[] = {
    "RANK",        "WORLD_SIZE",  "LOCAL_RANK",    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT", "SHERD_STORE_FD"};

// In a process of its own, whose environment has only these.
void in_environment(const std::vector<std::pair<const char*, std::string>>& variables,
                    const std::function<void()>& f) {
  run_processes(1,
                [&](int) {
                  for (const char* v : kVariables) unsetenv(v);
                  for (const auto& [name, value] : variables) setenv(name, value.c_str(), 1);
                  f();
                },
                {.init = false});
}

int free_port() { return address_of(listen_on(resolve("127.0.0.1", 0, "test")[0])).port(); }

TEST(Init, NamesEachVariableThatIsMissing) {
  in_environment({}, [] {
    const std::string e = error_of([] { init_process_group(); });
    EXPECT_HAS(e, "lacks RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT");
    EXPECT_HAS(e, "sherdrun");
    EXPECT_FALSE(is_initialized());
    EXPECT_FALSE(is_launched());
  });
  const std::vector<std::pair<const char*, std::string>> all{
      {"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "0"}};
  for (size_t i = 0; i < all.size(); ++i) {
    auto some = all;
    some.erase(some.begin() + i);
    in_environment(some, [&] {
      EXPECT_HAS(error_of([] { init_process_group(); }), concat("lacks ", all[i].first, "."));
    });
  }
  in_environment(all, [] {
    EXPECT_TRUE(is_launched());
    init_process_group();
    EXPECT_EQ(world_size(), 1);
  });
}

TEST(Init, RefusesWhatMakesNoSense) {
  auto with = [](const char* rank, const char* world, const char* port) {
    return std::vector<std::pair<const char*, std::string>>{
        {"RANK", rank}, {"WORLD_SIZE", world}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", port}};
  };
  auto refused = [](const std::vector<std::pair<const char*, std::string>>& variables,
                    const std::string& text, const InitOptions& options = {}) {
    in_environment(variables,
                   [&] { EXPECT_HAS(error_of([&] { init_process_group(options); }), text); });
  };
  refused(with("2", "2", "0"), "the rank (RANK) is 2, should be 0 to 1");
  refused(with("-1", "2", "0"), "the rank (RANK) is -1");
  refused(with("0", "0", "0"), "the world size (WORLD_SIZE) is 0");
  refused(with("first", "2", "0"), "RANK is 'first', should be a whole number");
  refused(with("0", "2x", "0"), "WORLD_SIZE is '2x'");
  refused(with("0", "2", "70000"), "the port (MASTER_PORT) is 70000");
  refused({}, "there is no backend 'nccl': this build has auto, gloo, shm",
          {.backend = "nccl", .rank = 0, .world_size = 1});
  refused({}, "'tcp://127.0.0.1' has no port", {.init_method = "tcp://127.0.0.1"});
  refused({}, "'tcp://:123' has no host", {.init_method = "tcp://:123"});
  refused({}, "needs rank", {.init_method = "tcp://127.0.0.1:1"});
  refused({}, "needs world_size", {.init_method = "tcp://127.0.0.1:1", .rank = 0});
  refused({}, "rank is given twice",
          {.init_method = "tcp://127.0.0.1:1?rank=0&world_size=2", .rank = 0});
  refused({}, "'ranks=0' is neither", {.init_method = "tcp://127.0.0.1:1?ranks=0"});
  refused({}, "unknown init_method 'http://a'", {.init_method = "http://a"});
  refused({}, "the environment lacks WORLD_SIZE",
          {.rank = 0, .store = std::make_shared<MemoryStore>()});
  auto nowhere = with("0", "2", "29500");
  nowhere[2].second = "no-such-host.invalid";
  refused(nowhere, "no-such-host.invalid");
}

TEST(Init, AWorldOfOneByNumberNeedsNothing) {
  in_environment({}, [] {
    init_process_group({.rank = 0, .world_size = 1});
    EXPECT_EQ(rank(), 0);
    EXPECT_EQ(local_world_size(), 1);
    EXPECT_EQ(local_device(), kCPU);
    Tensor x = full({3}, 2);
    all_reduce(x, ReduceOp::kAvg);
    EXPECT_EQ(x.data<float>()[0], 2);
    default_store()->set("a", "b");
    EXPECT_EQ(default_store()->get("a"), "b");
  });
}

TEST(Init, OrderOfCalls) {
  run_ranks(2, [](int rank) {
    EXPECT_HAS(error_of([&] { init_process_group({.rank = rank, .world_size = 2}); }),
               "was called before");
    const Group kept = default_group();
    destroy_process_group();
    EXPECT_FALSE(is_initialized());
    for (const auto& call : std::vector<std::function<void()>>{
             [] { barrier(); }, [] { all_reduce(zeros({1})); }, [] { dist::rank(); },
             [] { new_group({0}); }, [] { default_group(); }, [] { destroy_process_group(); }})
      EXPECT_HAS(error_of(call), "call init_process_group() first");
    EXPECT_HAS(error_of([&] { kept->barrier(); }), "was destroyed");
  });
}

int count_in(const char* folder) {
  int n = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++n;
  return n;
}

TEST(Init, AgainFiveTimesLeavesNothingBehind) {
  const int threads = count_in("/proc/self/task"), files = count_in("/proc/self/fd");
  const auto store = std::make_shared<MemoryStore>();
  run_ranks(2,
            [&](int rank) {
              for (int i = 0; i < 5; ++i) {
                init_process_group({.rank = rank, .world_size = 2, .store = store});
                new_group({1, 0});
                Tensor x = full({2}, rank + i);
                all_reduce(x);
                EXPECT_EQ(x.data<float>()[0], 2 * i + 1);
                rank == 0 ? send(x, 1) : void(recv(x, 0));
                destroy_process_group();
              }
            },
            {.init = false});
  EXPECT_EQ(count_in("/proc/self/fd"), files);
  // A thread that was joined is listed a moment longer.
  for (int i = 0; i < 100 && count_in("/proc/self/task") > threads; ++i)
    std::this_thread::sleep_for(milliseconds(10));
  EXPECT_EQ(count_in("/proc/self/task"), threads);

  run_processes(2,
                [](int rank) {  // the same port, and others
                  int files = 0, threads = 0;
                  for (int i = 0; i < 5; ++i) {
                    init_process_group();
                    Tensor x = full({2}, rank);
                    all_reduce(x);
                    EXPECT_EQ(x.data<float>()[1], 1);
                    destroy_process_group();
                    if (i == 0)
                      files = count_in("/proc/self/fd"), threads = count_in("/proc/self/task");
                  }
                  EXPECT_EQ(count_in("/proc/self/fd"), files);
                  EXPECT_EQ(count_in("/proc/self/task"), threads);
                },
                {.init = false});
}

TEST(Init, Tcp) {
  const int port = free_port();
  run_processes(
      3,
      [port](int rank) {
        for (const char* v : kVariables) unsetenv(v);
        const std::string at = concat("tcp://localhost:", port);
        if (rank == 0)
          init_process_group({.init_method = at, .rank = 0, .world_size = 3});
        else
          init_process_group({.init_method = concat(at, "?rank=", rank, "&world_size=3")});
        EXPECT_EQ(dist::rank(), rank);
        barrier();
      },
      {.init = false});
}

TEST(Init, PortInUse) {
  const Socket taken = listen_on(resolve("127.0.0.1", 0, "test")[0]);
  const std::string at = concat("127.0.0.1:", address_of(taken).port());
  const std::string e = error_of(
      [&] { init_process_group({.init_method = "tcp://" + at, .rank = 0, .world_size = 2}); });
  EXPECT_HAS(e, at);
  EXPECT_HAS(e, "in use");
  EXPECT_HAS(e, "--master_port");
}

TEST(Init, RanksThatDoNotComeAreNamed) {
  std::vector<std::string> errors(2);
  const auto store = std::make_shared<MemoryStore>();
  const auto start = Clock::now();
  run_ranks(2,
            [&](int rank) {
              errors[rank] = error_of([&] {
                init_process_group({.rank = rank == 0 ? 0 : 3,
                                    .world_size = 4,
                                    .timeout = milliseconds(300),
                                    .store = store});
              });
              EXPECT_FALSE(is_initialized());
            },
            {.init = false});
  EXPECT_LT(Clock::now() - start, milliseconds(5000));
  EXPECT_HAS(errors[0], "rank 0 of 4 waited 300 ms");
  EXPECT_HAS(errors[1], "missing are ranks 1, 2");
}

TEST(Init, SameRankTwiceAndOtherWorldSizes) {
  const auto results = run_processes(
      3,
      [](int rank) {
        setenv("RANK", rank == 0 ? "0" : "1", 1);
        if (rank == 2) {  // late
          std::this_thread::sleep_for(milliseconds(200));
          EXPECT_HAS(error_of([] { init_process_group({.timeout = milliseconds(1000)}); }),
                     "rank 1 came twice");
        } else {
          EXPECT_HAS(error_of([] { init_process_group({.timeout = milliseconds(1000)}); }),
                     "missing are ranks 2");
        }
      },
      {.init = false});
  run_processes(
      2,
      [](int rank) {
        if (rank == 1) setenv("WORLD_SIZE", "3", 1);
        if (rank == 1) std::this_thread::sleep_for(milliseconds(100));
        const std::string e = error_of([] { init_process_group({.timeout = milliseconds(500)}); });
        if (rank == 1)
          EXPECT_HAS(e, "rank 1 has a world size (WORLD_SIZE) of 3, and another rank has 2");
        else
          EXPECT_HAS(e, "missing are ranks 1");
      },
      {.init = false});
}

TEST(Init, UnderMpirun) {
  const std::string folder = testing::TempDir() + concat("sherd_mpirun_", getpid());
  std::filesystem::create_directory(folder);
  run_processes(2,
                [&](int rank) {
                  for (const char* v : kVariables) unsetenv(v);
                  for (const char* v : {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"})
                    setenv(v, std::to_string(rank).c_str(), 1);
                  for (const char* v : {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"})
                    setenv(v, "2", 1);
                  setenv("PMIX_NAMESPACE", "4711/1", 1);
                  setenv("OMPI_MCA_orte_jobfam_session_dir", folder.c_str(), 1);
                  EXPECT_TRUE(is_launched());
                  for (int i = 0; i < 2; ++i) {
                    init_process_group();
                    EXPECT_EQ(dist::rank(), rank);
                    EXPECT_EQ(local_rank(), rank);
                    barrier();
                    destroy_process_group();
                  }
                  setenv("OMPI_COMM_WORLD_SIZE", "4", 1);
                  EXPECT_HAS(error_of([] { init_process_group(); }),
                             "several machines: set MASTER_ADDR");
                },
                {.init = false});
  EXPECT_TRUE(std::filesystem::is_empty(folder));  // the file of the port is gone
  std::filesystem::remove(folder);
}

}  // namespace
}  // namespace sherd::dist
