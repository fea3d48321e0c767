// Jobs over several nodes, and restarts: each node is a sherdrun on 127.0.0.1. Two hosts with a
// cable between them are in hosts_test.cc.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>

#include "distributed/socket.h"
#include "tests/launcher/program.h"

namespace sherd::dist {
namespace {

using Words = std::vector<std::string>;

std::string free_port() {
  return std::to_string(address_of(listen_on(resolve("127.0.0.1", 0, "test")[0])).port());
}

// A sherdrun of these flags that runs a shell script.
Words job(Words flags, const std::string& script) {
  flags.insert(flags.begin(), kSherdrun);
  flags.insert(flags.end(), {"sh", "-c", script});
  return flags;
}
Words c10d(const std::string& nodes, const std::string& port, Words more = {}) {
  Words flags{"--nnodes=" + nodes, "--rdzv_backend=c10d", "--rdzv_endpoint=127.0.0.1:" + port,
              "--rdzv_conf=keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1"};
  flags.insert(flags.end(), more.begin(), more.end());
  return flags;
}

// Whether somebody listens there within 10 s.
bool is_served(const std::string& port) {
  const SocketAddress at = resolve("127.0.0.1", std::stoi(port), "test")[0];
  return soon([&] {
    return bool(connect_to(at, std::chrono::steady_clock::now() + std::chrono::seconds(1)));
  });
}

std::set<std::string> line_set(const std::string& text) {
  const auto lines = lines_of(text);
  return {lines.begin(), lines.end()};
}
bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}
#define EXPECT_HAS(text, part) EXPECT_TRUE(has(text, part)) << "'" << (part) << "' in: " << (text)

// ---- one node

TEST(Restart, R_009_all_ranks_run_three_times_and_then_fail) {
  const Result r = run(job({"--nproc_per_node=2", "--max_restarts=2"},
                           "echo run $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS; "
                           "[ $RANK = 1 ] && { echo '[op] it broke' >&2; exit 3; }; sleep 30"));
  EXPECT_EQ(r.exit_code, 3);
  for (const int rank : {0, 1})
    for (const int n : {0, 1, 2})
      EXPECT_EQ(
          count(r.out, "[rank " + std::to_string(rank) + "] run " + std::to_string(n) + " of 2"), 1)
          << r.out;
  EXPECT_EQ(count(r.err, "rank 1: exit code 3: [op] it broke"), 3) << r.err;
  EXPECT_HAS(r.err, "restart 1 of 2: all ranks start again");
  EXPECT_HAS(r.err, "restart 2 of 2: all ranks start again");
}

TEST(Restart, R_009_failing_once_is_a_success) {
  const Result r = run(job({"--nproc_per_node=3", "--max_restarts=5", "--standalone"},
                           "[ $TORCHELASTIC_RESTART_COUNT = 0 ] && kill -9 $$; echo well"));
  EXPECT_EQ(r.exit_code, 0) << r.err;
  EXPECT_EQ(count(r.out, "well"), 3);
  EXPECT_EQ(count(r.err, "all ranks start again"), 1) << r.err;
}

TEST(Restart, UsageErrorsAndInterruptsAreNotRepeated) {
  const Result usage =
      run(job({"--nproc_per_node=2", "--max_restarts=3"}, "echo 'what is --lr=fast' >&2; exit 2"));
  EXPECT_EQ(usage.exit_code, 2);
  EXPECT_EQ(count(usage.err, "what is"), 1) << usage.err;
  Program interrupted(job({"--nproc_per_node=2", "--max_restarts=3"}, "echo here; exec sleep 100"));
  ASSERT_TRUE(soon([&] { return count(interrupted.out(), "here") == 2; }));
  kill(interrupted.pid(), SIGTERM);
  const Result r = interrupted.wait();
  EXPECT_EQ(r.exit_code, 128 + SIGTERM);
  EXPECT_EQ(count(r.out, "here"), 2);
}

TEST(Restart, ANamedPortServesEachRun) {
  const Result r =
      run(job({"--nproc_per_node=2", "--max_restarts=1", "--master_port=" + free_port()},
              std::string("[ $TORCHELASTIC_RESTART_COUNT = 0 ] && exit 1; exec ") + kRankProgram +
                  " store"));
  EXPECT_EQ(r.exit_code, 0) << r.err;
  EXPECT_HAS(r.out, "met 1");
}

// ---- what ranks find, over two nodes

constexpr const char* kShow =
    "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE $ROLE_NAME "
    "$ROLE_RANK $ROLE_WORLD_SIZE $MASTER_ADDR $TORCHELASTIC_RESTART_COUNT "
    "$TORCHELASTIC_MAX_RESTARTS $TORCHELASTIC_RUN_ID $TORCHELASTIC_USE_AGENT_STORE "
    "$SHERD_STORE_TOKEN";

TEST(Nodes, R_005_environment_of_two_nodes) {
  for (const bool is_static : {true, false}) {
    const std::string port = free_port();
    const ProgramOptions token{.environment = {{"SHERD_STORE_TOKEN", "secret"}}};
    const auto node = [&](int rank, int ranks) {
      Words flags = is_static ? Words{"--nnodes=2", "--node_rank=" + std::to_string(rank),
                                      "--master_addr=127.0.0.1", "--master_port=" + port}
                              : c10d("2", port);
      for (const char* more : {"--rdzv_id=job7", "--role=trainer", "--max_restarts=4"})
        flags.push_back(more);
      flags.push_back("--nproc_per_node=" + std::to_string(ranks));
      return std::make_unique<Program>(job(flags, kShow), token);
    };
    const auto a = node(0, 2);
    // The first to come has rank 0 under c10d.
    ASSERT_TRUE(is_served(port));
    const auto b = node(1, 1);
    const Result first = a->wait(), second = b->wait();
    EXPECT_EQ(first.exit_code, 0) << first.err;
    EXPECT_EQ(second.exit_code, 0) << second.err;
    const std::string tail = " 127.0.0.1 0 4 job7 False secret";
    EXPECT_EQ(line_set(first.out),
              (std::set<std::string>{"[rank 0] 0 3 0 2 0 2 trainer 0 3" + tail,
                                     "[rank 1] 1 3 1 2 0 2 trainer 1 3" + tail}));
    EXPECT_EQ(line_set(second.out),
              (std::set<std::string>{"[rank 2] 2 3 0 1 1 2 trainer 2 3" + tail}));
    EXPECT_FALSE(has(first.err, "warning")) << first.err;
  }
}

TEST(Nodes, TokenIsMadeOnOneNodeAndMissedOnSeveral) {
  const Result one = run(job({"--nproc_per_node=2"}, "echo $SHERD_STORE_TOKEN"));
  const auto lines = lines_of(one.out);
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[0].size(), std::string("[rank 0] ").size() + 32);
  EXPECT_EQ(lines[0].substr(9), lines[1].substr(9));
  EXPECT_NE(run(job({"--nproc_per_node=2"}, "echo $SHERD_STORE_TOKEN")).out, one.out);

  const std::string port = free_port();
  Program a(job(c10d("2", port), "true")), b(job(c10d("2", port), "true"));
  const Result first = a.wait(), second = b.wait();
  EXPECT_EQ(first.exit_code + second.exit_code, 0) << first.err << second.err;
  EXPECT_EQ(count(first.err + second.err, "warning: SHERD_STORE_TOKEN is not set"), 1);
}

TEST(Nodes, AnotherTokenIsRefusedAtOnce) {
  const std::string port = free_port();
  const auto static_node = [&](const char* rank) {
    return job({"--nnodes=2", std::string("--node_rank=") + rank, "--master_addr=127.0.0.1",
                "--master_port=" + port},
               "true");
  };
  Program a(static_node("0"), {.environment = {{"SHERD_STORE_TOKEN", "one"}}});
  const Result r = run(static_node("1"), {.environment = {{"SHERD_STORE_TOKEN", "two"}}});
  EXPECT_EQ(r.exit_code, 1);
  EXPECT_HAS(r.err, "has another token than this process");
  kill(a.pid(), SIGINT);
  EXPECT_EQ(a.wait().exit_code, 128 + SIGINT);
}

TEST(Nodes, AnotherJobsNameIsRefused) {
  const std::string port = free_port();
  Program a(job(c10d("2", port, {"--rdzv_id=one"}), "true"));
  ASSERT_TRUE(is_served(port));
  const Result r = run(job(c10d("2", port, {"--rdzv_id=two"}), "true"));
  EXPECT_EQ(r.exit_code, 1);
  EXPECT_HAS(r.err, "has another --rdzv_id: 'one', and this node 'two'");
  EXPECT_LT(r.seconds, 8);
}

Words static_node(const std::string& port, const std::string& nnodes, const std::string& rank,
                  const std::string& script) {
  return job({"--nnodes=" + nnodes, "--node_rank=" + rank, "--master_addr=127.0.0.1",
              "--master_port=" + port},
             script);
}

TEST(Nodes, ThatContradictEachOtherAreToldSo) {
  const std::string port = free_port();
  Program a(static_node(port, "2", "0", "true"));
  const Result other = run(static_node(port, "3", "2", "true")), first = a.wait();
  for (const Result& r : {first, other}) {
    EXPECT_EQ(r.exit_code, 2);
    EXPECT_HAS(r.err, "--nnodes=3, node 0 with --nnodes=2");
  }
}

TEST(Nodes, ASecondOneOfTheSameRankIsRefused) {
  const std::string port = free_port(), script = "echo here; exec sleep 100";
  Program a(static_node(port, "2", "0", script)), b(static_node(port, "2", "1", script));
  ASSERT_TRUE(soon([&] { return count(b.out(), "here") == 1; }));
  const Result r = run(static_node(port, "2", "1", script));
  EXPECT_EQ(r.exit_code, 1);
  EXPECT_EQ(r.out, "");
  EXPECT_HAS(r.err, "--node_rank=1 is taken by");
  EXPECT_LT(r.seconds, 15);
  kill(a.pid(), SIGTERM);
  EXPECT_EQ(a.wait().exit_code, 128 + SIGTERM);
  b.wait();
}

TEST(Nodes, WhatIsWaitedForIsSaid) {
  const std::string port = free_port();
  const Result r = run(job({"--nnodes=2", "--node_rank=1", "--master_addr=127.0.0.1",
                            "--master_port=" + port, "--start_timeout=7"},
                           "true"));
  EXPECT_EQ(r.exit_code, 1);
  EXPECT_HAS(r.err, "waiting for node 0 at 127.0.0.1:" + port + " (");
}

// ---- as many as there are

TEST(Nodes, R_004_one_of_at_most_two) {
  const Result r =
      run(job(c10d("1:2", free_port(), {"--nproc_per_node=4"}), "echo $RANK/$WORLD_SIZE"));
  EXPECT_EQ(r.exit_code, 0) << r.err;
  EXPECT_EQ(line_set(r.out), (std::set<std::string>{"[rank 0] 0/4", "[rank 1] 1/4", "[rank 2] 2/4",
                                                    "[rank 3] 3/4"}));
  EXPECT_GT(r.seconds, 0.9);
}

TEST(Nodes, R_004_two_of_at_most_two) {
  const std::string port = free_port();
  const Words flags = c10d("1:2", port, {"--nproc_per_node=4", "--rdzv_conf=last_call_timeout=60"});
  Program a(job(flags, "echo $RANK/$WORLD_SIZE")), b(job(flags, "echo $RANK/$WORLD_SIZE"));
  const Result first = a.wait(), second = b.wait();
  EXPECT_EQ(first.exit_code + second.exit_code, 0) << first.err << second.err;
  std::set<std::string> expected;
  for (int r = 0; r < 8; ++r)
    expected.insert("[rank " + std::to_string(r) + "] " + std::to_string(r) + "/8");
  EXPECT_EQ(line_set(first.out + second.out), expected);
}

TEST(Nodes, RanksMeetAtTheirOwnStore) {
  const std::string port = free_port();
  const Words flags = c10d("2", port, {"--nproc_per_node=3"});
  const std::string script = std::string("exec ") + kRankProgram + " store";
  Program a(job(flags, script)), b(job(flags, script));
  const Result first = a.wait(), second = b.wait();
  EXPECT_EQ(first.exit_code + second.exit_code, 0) << first.err << second.err;
  EXPECT_HAS(first.out + second.out, "[rank 0] met 5");
}

// ---- failures

TEST(Nodes, R_007_failure_ends_all_nodes_with_the_same_summary) {
  const std::string port = free_port();
  const Words flags = c10d("2", port, {"--nproc_per_node=2"});
  const std::string script =
      "echo here; [ $RANK = 2 ] && { sleep 1; echo '[loader] no more data' >&2; exit 7; }; "
      "exec sleep 100";
  Program a(job(flags, script)), b(job(flags, script));
  const Result first = a.wait(), second = b.wait();
  for (const Result* r : {&first, &second}) {
    EXPECT_EQ(r->exit_code, 7);
    EXPECT_HAS(r->err, "rank 2: exit code 7: [loader] no more data");
    EXPECT_LT(r->seconds, 15);
  }
}

TEST(Nodes, R_009_failure_restarts_the_ranks_of_all_nodes) {
  const std::string port = free_port();
  const Words flags = c10d("2", port, {"--nproc_per_node=2", "--max_restarts=1"});
  const std::string script =
      "echo run $TORCHELASTIC_RESTART_COUNT; [ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; "
      "[ $RANK = 3 ] && { sleep 1; kill -SEGV $$; }; exec sleep 100";
  Program a(job(flags, script)), b(job(flags, script));
  const Result first = a.wait(), second = b.wait();
  for (const Result* r : {&first, &second}) {
    EXPECT_EQ(r->exit_code, 0) << r->err;
    EXPECT_EQ(count(r->out, "run 0"), 2);
    EXPECT_EQ(count(r->out, "run 1"), 2);
    EXPECT_HAS(r->err, "rank 3: killed by SIGSEGV");
    EXPECT_HAS(r->err, "restart 1 of 1");
  }
}

TEST(Nodes, KilledNodeThatIsStartedAgainTakesPart) {
  for (const bool is_static : {false, true}) {
    const std::string port = free_port(), folder = new_folder();
    const auto node = [&](int rank) {
      Words flags = c10d("2", port, {"--max_restarts=1", "--nproc_per_node=2"});
      if (is_static) {
        flags[1] = "--rdzv_backend=static";
        flags.push_back("--node_rank=" + std::to_string(rank));
      }
      const std::string script = "echo $$ > " + folder +
                                 "/$RANK.$TORCHELASTIC_RESTART_COUNT; echo run "
                                 "$TORCHELASTIC_RESTART_COUNT of rank $RANK; [ "
                                 "$TORCHELASTIC_RESTART_COUNT = 1 ] || exec sleep 100";
      return std::make_unique<Program>(job(flags, script));
    };
    const auto a = node(0);
    ASSERT_TRUE(is_served(port));
    const auto b = node(1);
    ASSERT_TRUE(soon([&] { return pids_in(folder).size() == 4; }, 20));
    kill(b->pid(), SIGKILL);
    b->wait();
    for (const char* rank : {"2", "3"}) {
      pid_t pid = 0;
      std::ifstream(folder + "/" + rank + ".0") >> pid;
      EXPECT_TRUE(soon([&] { return !is_running(pid); }));
    }
    const auto again = node(1);
    const Result first = a->wait(), second = again->wait();
    EXPECT_EQ(first.exit_code, 0) << first.err;
    EXPECT_EQ(second.exit_code, 0) << second.err;
    EXPECT_HAS(first.out, "[rank 0] run 1 of rank 0");
    EXPECT_HAS(second.out, "[rank 3] run 1 of rank 3");
    EXPECT_HAS(first.err, "node 1 (");
    EXPECT_HAS(first.err, "its sherdrun has not been heard of");
  }
}

TEST(Nodes, Node0ThatIsKilledEndsTheOthers) {
  const std::string port = free_port();
  const auto node = [&](const char* rank) {
    return job({"--nnodes=2", std::string("--node_rank=") + rank, "--master_addr=127.0.0.1",
                "--master_port=" + port, "--max_restarts=1",
                "--rdzv_conf=keep_alive_interval=1,keep_alive_max_attempt=2"},
               "echo here; exec sleep 100");
  };
  Program a(node("0")), b(node("1"));
  ASSERT_TRUE(soon([&] { return has(b.out(), "here"); }));
  kill(a.pid(), SIGKILL);
  const Result r = b.wait();
  EXPECT_EQ(r.exit_code, 1);
  EXPECT_HAS(r.err, "lost node 0 at 127.0.0.1:" + port);
}

TEST(Nodes, R_013_interrupt_of_one_node_ends_the_other_too) {
  for (const int interrupted : {0, 1}) {
    const std::string port = free_port();
    const auto node = [&](const char* rank) {
      return job({"--nnodes=2", std::string("--node_rank=") + rank, "--master_addr=127.0.0.1",
                  "--master_port=" + port},
                 "echo here; exec sleep 100");
    };
    Program a(node("0")), b(node("1"));
    ASSERT_TRUE(soon([&] { return has(a.out(), "here") && has(b.out(), "here"); }));
    kill((interrupted == 0 ? a : b).pid(), SIGTERM);
    const Result first = a.wait(), second = b.wait();
    const Result& hit = interrupted == 0 ? first : second;
    const Result& other = interrupted == 0 ? second : first;
    EXPECT_EQ(hit.exit_code, 128 + SIGTERM);
    EXPECT_EQ(other.exit_code, 1);
    EXPECT_HAS(other.err, "node " + std::to_string(interrupted) + " (");
    EXPECT_HAS(other.err, "interrupted by SIGTERM");
    EXPECT_LT(other.seconds, 20);
  }
}

TEST(Nodes, R_014_a_node_that_never_comes) {
  const Result r = run(job({"--nnodes=2", "--node_rank=0", "--master_addr=127.0.0.1",
                            "--master_port=" + free_port(), "--start_timeout=1"},
                           "echo ran"));
  EXPECT_EQ(r.exit_code, 1);
  EXPECT_EQ(r.out, "");
  EXPECT_HAS(r.err, "for 2 nodes (--nnodes), and 1 is here: node 0 (");
  const std::string port = free_port();
  const Result s = run(job({"--nnodes=2", "--node_rank=1", "--master_addr=127.0.0.1",
                            "--master_port=" + port, "--start_timeout=1"},
                           "echo ran"));
  EXPECT_EQ(s.exit_code, 1);
  EXPECT_HAS(s.err, "waited 1000 ms for node 0 at 127.0.0.1:" + port);
  Program waiting(
      job({"--nnodes=2", "--node_rank=1", "--master_addr=127.0.0.1", "--master_port=" + port},
          "echo ran"));
  EXPECT_FALSE(soon([&] { return !is_running(waiting.pid()); }, 0.3));
  kill(waiting.pid(), SIGINT);
  EXPECT_EQ(waiting.wait().exit_code, 128 + SIGINT);
}

// ---- files

std::map<std::string, std::string> files_below(const std::string& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    // Without <run id>_<random>/.
    const std::string path = std::filesystem::relative(entry.path(), folder);
    files[path.substr(path.find('/') + 1)] = read_file(entry.path());
  }
  return files;
}

constexpr const char* kSpeak = "echo out $RANK; echo err $RANK >&2";

TEST(Logs, R_011_tee_shows_and_stores) {
  const std::string folder = new_folder() + "/not/there/yet";
  const Result r =
      run(job({"--nproc_per_node=2", "--log_dir=" + folder, "--tee=3", "--rdzv_id=j"}, kSpeak));
  EXPECT_EQ(line_set(r.out), (std::set<std::string>{"[rank 0] out 0", "[rank 1] out 1"}));
  EXPECT_EQ(line_set(r.err), (std::set<std::string>{"[rank 0] err 0", "[rank 1] err 1"}));
  const std::map<std::string, std::string> all{{"attempt_0/0/stdout.log", "out 0\n"},
                                               {"attempt_0/0/stderr.log", "err 0\n"},
                                               {"attempt_0/1/stdout.log", "out 1\n"},
                                               {"attempt_0/1/stderr.log", "err 1\n"}};
  EXPECT_EQ(files_below(folder), all);
  // Once more: a folder of its own beside the other.
  EXPECT_EQ(run(job({"--nproc_per_node=2", "--log_dir=" + folder}, kSpeak)).exit_code, 0);
  int folders = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++folders;
  EXPECT_EQ(folders, 2);
}

TEST(Logs, R_011_redirects_by_rank) {
  const std::string folder = new_folder();
  const Result r = run(job({"--nproc_per_node=3", "--log_dir=" + folder, "-r", "0:3,1:1"}, kSpeak));
  EXPECT_EQ(line_set(r.out), (std::set<std::string>{"[rank 2] out 2"}));
  EXPECT_EQ(line_set(r.err), (std::set<std::string>{"[rank 1] err 1", "[rank 2] err 2"}));
  EXPECT_EQ(files_below(folder),
            (std::map<std::string, std::string>{{"attempt_0/0/stdout.log", "out 0\n"},
                                                {"attempt_0/0/stderr.log", "err 0\n"},
                                                {"attempt_0/1/stdout.log", "out 1\n"}}));
}

TEST(Logs, R_011_redirected_errors_are_in_the_summary_and_attempts_apart) {
  const std::string folder = new_folder();
  const Result r =
      run(job({"--nproc_per_node=1", "--log_dir=" + folder, "--redirects=3", "--max_restarts=1"},
              "echo '[op] broken' >&2; exit 4"));
  EXPECT_EQ(r.exit_code, 4);
  EXPECT_EQ(count(r.err, "rank 0: exit code 4: [op] broken"), 2) << r.err;
  EXPECT_EQ(count(r.err, "\n    log: " + folder), 2) << r.err;
  EXPECT_EQ(count(r.err, "/attempt_1/0/stderr.log\n"), 1) << r.err;
  EXPECT_EQ(files_below(folder).at("attempt_1/0/stderr.log"), "[op] broken\n");
}

TEST(Logs, R_011_a_file_is_no_log_folder) {
  const std::string file = new_folder() + "/file";
  std::ofstream(file) << "text";
  const Result r = run(job({"--log_dir=" + file}, "echo ran"));
  EXPECT_EQ(r.exit_code, 2);
  EXPECT_EQ(r.out, "");
  EXPECT_HAS(r.err, file);
}

TEST(Logs, AFullDiskIsSaidOnceAndDoesNotEndTheJob) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer maps a file of its own, which the limit cuts short";
#endif
  rlimit before;
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit limit{5000, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &limit);
  const Result r = run(job({"--nproc_per_node=2", "--log_dir=" + new_folder(), "--redirects=1"},
                           "for i in 1 2 3 4; do head -c 4000 /dev/zero; sleep 0.1; done"));
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_EQ(r.exit_code, 0) << r.err;
  EXPECT_EQ(count(r.err, "cannot be written any more: File too large"), 1) << r.err;
}

TEST(Logs, R_012_prefix_template) {
  const Result r = run(job({"--nproc_per_node=2", "--role=eval"}, "echo text"),
                       {.environment = {{"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
                                         "<${role_name} ${local_rank}/${rank}> "}}});
  EXPECT_EQ(line_set(r.out), (std::set<std::string>{"<eval 0/0> text", "<eval 1/1> text"}));
}

// ---- R-003 and what else is refused

TEST(Refusal, R_003_numbers_of_nodes) {
  for (const char* bad : {"2:20:30", "0", "5:2", "two", "1:", ":2", "0:2", "-1"}) {
    const Result r = run(job({std::string("--nnodes=") + bad}, "echo ran"));
    EXPECT_EQ(r.exit_code, 2) << bad;
    EXPECT_HAS(r.err, "--nnodes");
  }
}

TEST(Refusal, T_31_of_what_makes_no_sense_together) {
  const auto refused = [](const Words& flags, const std::string& why) {
    const Result r = run(job(flags, "echo ran"));
    EXPECT_EQ(r.exit_code, 2) << why;
    EXPECT_EQ(r.out, "") << why;
    EXPECT_HAS(r.err, why);
  };
  refused({"--rdzv_backend=etcd"}, "c10d");
  refused({"--nnodes=1:2", "--node_rank=0", "--master_addr=a"}, "needs --rdzv_backend=c10d");
  refused({"--nnodes=2", "--rdzv_backend=c10d"}, "needs --rdzv_endpoint");
  refused({"--nnodes=2", "--rdzv_backend=c10d", "--rdzv_endpoint=:1"}, "has no host");
  refused({"--nnodes=2", "--rdzv_backend=c10d", "--rdzv_endpoint=a:x"}, "--rdzv_endpoint=a:x");
  refused({"--rdzv_endpoint=a", "--master_addr=b"}, "give either");
  refused({"--rdzv_conf=join=3"}, "unknown name 'join'");
  refused({"--tee=4"}, "--tee must be 0 (none)");
  refused({"--redirects=0:1,x"}, "--redirects must be");
  refused({"--rdzv_id=a/b"}, "--rdzv_id");
  refused({"--max_restarts=-1"}, "--max_restarts");
  refused({"--standalone", "--rdzv_endpoint=a"}, "--standalone chooses");
}

TEST(Flags, TorchrunsOwnAreTaken) {
  const Result r = run(job({"--no-python", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0",
                            "--nnodes=1:1", "--monitor-interval=0.5", "--local-addr=me"},
                           "echo $RANK"));
  EXPECT_EQ(r.exit_code, 0) << r.err;
  EXPECT_EQ(r.out, "0\n");
}

}  // namespace
}  // namespace sherd::dist
