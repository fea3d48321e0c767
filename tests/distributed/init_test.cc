// init_process_group and destroy_process_group: what ranks are told of themselves, how they meet,
// and what is refused.
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <thread>

#include "core/context.h"
#include "distributed/exchange_texts.h"
#include "distributed/job_environment.h"
#include "distributed/socket.h"
#include "distributed/tcp_store.h"
#include "tests/distributed/spawn.h"
#include "tests/errors.h"

namespace sherd::dist {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr const char* kVariables[] = {
    "RANK",        "WORLD_SIZE",  "LOCAL_RANK",     "LOCAL_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT", "SHERD_STORE_FD", "SHERD_STORE_TOKEN"};

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

TEST(Init, S_008_NamesEachVariableThatIsMissing) {
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

TEST(Init, S_008_S_009_RefusesWhatMakesNoSense) {
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
  refused({}, "there is no backend 'nccl': this build has auto, gloo, shm, mpi",
          {.backend = "nccl", .rank = 0, .world_size = 1});
  refused({}, "'tcp://127.0.0.1' has no port", {.init_method = "tcp://127.0.0.1"});
  refused({}, "'tcp://:123' has no host", {.init_method = "tcp://:123"});
  refused({}, "needs rank", {.init_method = "tcp://127.0.0.1:1"});
  refused({}, "needs world_size", {.init_method = "tcp://127.0.0.1:1", .rank = 0});
  refused({}, "rank is given twice",
          {.init_method = "tcp://127.0.0.1:1?rank=0&world_size=2", .rank = 0});
  refused({}, "'ranks=0' is neither", {.init_method = "tcp://127.0.0.1:1?ranks=0"});
  refused({}, "'file://' has no path", {.init_method = "file://"});
  refused({}, "needs rank", {.init_method = "file:///tmp/sherd_no_rank"});
  refused({}, "unknown init_method 'http://a': there are env://, tcp://",
          {.init_method = "http://a"});
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

TEST(Init, TimeoutsOfNothingAndForEver) {
  for (int64_t ms : {0, -1})
    EXPECT_HAS(error_of([&] {
                 init_process_group({.rank = 0, .world_size = 1, .timeout = Milliseconds(ms)});
               }),
               concat("[init_process_group] timeout is ", ms, " ms, should be above 0"));
  for (const char* backend : {"shm", "gloo"})
    run_ranks(2,
              [](int rank) {
                const Tensor x = full({1}, rank);
                all_reduce(x);
                EXPECT_EQ(x.data<float>()[0], 1);
              },
              {.timeout = Milliseconds::max(), .backend = backend});
  run_processes(2, [](int) { barrier(); }, {.timeout = Milliseconds::max()});
}

TEST(Init, O_018_OrderOfCalls) {
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

TEST(Init, O_018_AgainFiveTimesLeavesNothingBehind) {
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

TEST(Init, R_006_Tcp) {
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

TEST(Init, S_006_File) {
  const std::string path = testing::TempDir() + concat("sherd_file_", getpid());
  run_processes(
      3,
      [&](int rank) {
        for (const char* v : kVariables) unsetenv(v);
        if (rank == 0)
          init_process_group({.init_method = "file://" + path, .rank = 0, .world_size = 3});
        else
          init_process_group(
              {.init_method = concat("file://", path, "?rank=", rank, "&world_size=3")});
        EXPECT_EQ(dist::rank(), rank);
        Tensor x = full({1}, rank);
        all_reduce(x);
        EXPECT_EQ(x.data<float>()[0], 3);
      },
      {.init = false});
  EXPECT_NE(access(path.c_str(), F_OK), 0);
}

TEST(Init, T_28_PortInUse) {
  const Socket taken = listen_on(resolve("127.0.0.1", 0, "test")[0]);
  const std::string at = concat("127.0.0.1:", address_of(taken).port());
  const std::string e = error_of(
      [&] { init_process_group({.init_method = "tcp://" + at, .rank = 0, .world_size = 2}); });
  EXPECT_HAS(e, at);
  EXPECT_HAS(e, "in use");
  EXPECT_HAS(e, "--master_port");
}

TEST(Init, S_010_RanksThatDoNotComeAreNamed) {
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

// A line each, long before the deadline.
TEST(Init, WhoWaitsForOthersSaysSo) {
  MemoryStore store;
  store.set("place/0", "");
  const auto wait = [&](int rank) {
    await_all(store, "place",
              {.op = "test",
               .ranks = {0, 2, 4, 6},
               .rank = rank,
               .timeout = milliseconds(200),
               .quiet_time = milliseconds(100)});
  };
  testing::internal::CaptureStderr();
  EXPECT_HAS(error_of([&] { wait(0); }), "waited 200 ms");
  const std::string first = testing::internal::GetCapturedStderr();
  EXPECT_EQ(first,
            "[test] rank 0 of 4 waited 100 ms for the others to come: missing are ranks 2, 4, 6 so "
            "far; the timeout is 0 s\n");
  testing::internal::CaptureStderr();
  EXPECT_HAS(error_of([&] { wait(1); }), "missing are ranks 4, 6");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "") << "the first rank speaks for all";

  testing::internal::CaptureStderr();
  const std::string e = error_of([&] {
    TcpStore({.port = 1, .timeout = milliseconds(300), .quiet_time = milliseconds(100)});
  });
  EXPECT_HAS(testing::internal::GetCapturedStderr(), "rank 0 serves it; is it running");
  EXPECT_HAS(e, "no store at tcp://127.0.0.1:1");
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
          // Rank 0 serves the store: its time is up last.
          const milliseconds timeout(rank == 0 ? 1500 : 700);
          EXPECT_HAS(error_of([&] { init_process_group({.timeout = timeout}); }),
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

// ---- other launchers, by what they set

void set_all(const std::vector<std::pair<const char*, std::string>>& variables) {
  for (const char* v : kVariables) unsetenv(v);
  for (const auto& [name, value] : variables) setenv(name, value.c_str(), 1);
}

void expect_sum_over_ranks(int rank, int ranks) {
  EXPECT_TRUE(is_launched());
  for (int i = 0; i < 2; ++i) {
    init_process_group();
    EXPECT_EQ(dist::rank(), rank);
    EXPECT_EQ(world_size(), ranks);
    EXPECT_EQ(local_rank(), rank);
    EXPECT_EQ(local_world_size(), ranks);
    Tensor x = full({1}, rank);
    all_reduce(x);
    EXPECT_EQ(x.data<float>()[0], ranks * (ranks - 1) / 2);
    destroy_process_group();
  }
}

TEST(Init, UnderSlurm) {
  run_processes(3,
                [&](int rank) {
                  const std::string job = std::to_string(getppid());
                  set_all({{"SLURM_PROCID", std::to_string(rank)},
                           {"SLURM_LOCALID", std::to_string(rank)},
                           {"SLURM_NODEID", "0"},
                           {"SLURM_STEP_NUM_TASKS", "3"},
                           {"SLURM_STEP_TASKS_PER_NODE", "3"},
                           {"SLURM_JOB_ID", job},
                           {"SLURM_STEP_ID", "0"},
                           {"SLURM_STEP_NODELIST", "no-such-host-[3-4]"}});
                  expect_sum_over_ranks(rank, 3);
                },
                {.init = false});
  in_environment({{"SLURM_PROCID", "2"},
                  {"SLURM_STEP_NUM_TASKS", "4"},
                  {"SLURM_STEP_TASKS_PER_NODE", "2(x2)"},
                  {"SLURM_NODEID", "1"},
                  {"SLURM_JOB_ID", "1000"},
                  {"SLURM_STEP_ID", "3"},
                  {"SLURM_STEP_NODELIST", "no-such-host-[3-4].invalid"}},
                 [] {
                   EXPECT_EQ(local_world_size_from_environment(), 2);
                   EXPECT_EQ(slurm_port(), 15000 + 31003 % 10000);
                   EXPECT_HAS(error_of([] { init_process_group(); }), "no-such-host-3.invalid");
                 });
  // sbatch's script is no rank.
  in_environment({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}, {"SLURM_JOB_ID", "1"}},
                 [] { EXPECT_FALSE(is_launched()); });
}

TEST(Init, HostsAndTasksOfSlurm) {
  EXPECT_EQ(first_of_host_list("node7"), "node7");
  EXPECT_EQ(first_of_host_list("a,b"), "a");
  EXPECT_EQ(first_of_host_list("node[07-09,12]-ib,other"), "node07-ib");
  EXPECT_EQ(first_of_host_list("rack[1-2]n[3,5]"), "rack1n3");
  EXPECT_EQ(first_of_host_list(""), "");
  EXPECT_EQ(tasks_of_node("4", 0), 4);
  for (int node = 0; node < 5; ++node)
    EXPECT_EQ(tasks_of_node("3,2(x3),1", node), (std::array{3, 2, 2, 2, 1}[node]));
  for (const char* bad : {"", "x", "2(x", "2(x0)", "2(x2", "-1", "2;3"})
    EXPECT_EQ(tasks_of_node(bad, 3), std::nullopt) << bad;
  EXPECT_EQ(tasks_of_node("2(x3)", 3), std::nullopt);
}

std::vector<std::pair<const char*, std::string>> torchrun(int rank, int ranks, int local,
                                                          int port) {
  return {{"RANK", std::to_string(rank)},
          {"WORLD_SIZE", std::to_string(ranks)},
          {"LOCAL_RANK", std::to_string(rank % local)},
          {"LOCAL_WORLD_SIZE", std::to_string(local)},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", std::to_string(port)},
          {"TORCHELASTIC_RUN_ID", "none"},
          {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
}

// the agent listens on MASTER_PORT, and speaks PyTorch's protocol.
TEST(Init, R_006_under_torchrun_whose_agent_owns_the_port) {
  const Socket agent = listen_on(resolve("127.0.0.1", 0, "test")[0]);
  const int port = address_of(agent).port();
  const std::string folder = testing::TempDir() + concat("sherd_torchrun_", getpid());
  run_processes(3,
                [&](int rank) {
                  auto variables = torchrun(rank, 3, 3, port);
                  const std::string mine = concat(folder, "/attempt_0/", rank);
                  std::filesystem::create_directories(mine);
                  variables.emplace_back("TORCHELASTIC_ERROR_FILE", mine + "/error.json");
                  set_all(variables);
                  expect_sum_over_ranks(rank, 3);
                },
                {.init = false});
  int files = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder))
    files += entry.is_regular_file();
  EXPECT_EQ(files, 0);
  std::filesystem::remove_all(folder);
}

TEST(Init, R_006_under_torchrun_on_several_machines) {
  // Neighbouring ports, of which the agent has the first.
  for (int attempt = 0;; ++attempt) {
    ASSERT_LT(attempt, 100);
    const Socket agent = listen_on(resolve("127.0.0.1", 0, "test")[0]);
    const int port = address_of(agent).port();
    try {
      listen_on(resolve("127.0.0.1", port + 1, "test")[0]);
    } catch (const Error&) {
      continue;
    }
    const int chosen = free_port();
    run_processes(2,
                  [&](int rank) {
                    for (const bool told : {false, true}) {
                      set_all(torchrun(rank, 2, 1, port));
                      if (told) setenv("SHERD_MASTER_PORT", std::to_string(chosen).c_str(), 1);
                      init_process_group();
                      EXPECT_EQ(default_store()->name(),
                                concat("tcp://127.0.0.1:", told ? chosen : port + 1));
                      barrier();
                      destroy_process_group();
                    }
                  },
                  {.init = false});
    return;
  }
}

TEST(Init, TokenComesFromTheEnvironment) {
  run_processes(3,
                [](int rank) {
                  setenv("SHERD_STORE_TOKEN", rank == 2 ? "other" : "one", 1);
                  setenv("WORLD_SIZE", "2", 1);
                  if (rank < 2) {
                    init_process_group();
                    barrier();
                    std::this_thread::sleep_for(milliseconds(500));
                  } else {
                    setenv("RANK", "1", 1);
                    EXPECT_HAS(
                        error_of([] { init_process_group({.timeout = milliseconds(3000)}); }),
                        "has another token");
                  }
                },
                {.init = false});
}

// ---- acceptance: 64 ranks meet and pass a barrier in under 10 s

TEST(Init, SixtyFourRanksMeetAndPassABarrier) {
  const auto start = Clock::now();
  run_processes(64, [](int) { barrier(); }, {.timeout = std::chrono::seconds(40)});
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  std::printf("64 ranks met and parted in %.1f s\n", seconds);
  EXPECT_LT(seconds, 40);  // on a machine that is busy with other things
}

}  // namespace
}  // namespace sherd::dist
