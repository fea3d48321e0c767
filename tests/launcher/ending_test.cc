// How a job ends: what is said about it, what is returned, and that nothing is left.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "tests/launcher/program.h"

namespace sherd::dist {
namespace {

// Ranks run `script`, in which $PIDS is a folder for files that hold a pid each.
class Ending : public testing::Test {
 protected:
  std::vector<std::string> command(int ranks, const std::string& script) const {
    return {kSherdrun, "--nproc_per_node=" + std::to_string(ranks), "sh", "-c",
            "echo $$ > $PIDS/rank$RANK; " + script};
  }
  ProgramOptions options() const { return {.environment = {{"PIDS", pids_}}}; }

  Result run_ranks(int ranks, const std::string& script) const {
    return run(command(ranks, script), options());
  }

  // Waits until that many files hold a pid.
  void expect_started(size_t n) const {
    EXPECT_TRUE(soon([&] { return pids_in(pids_).size() >= n; })) << pids_in(pids_).size();
  }

  void expect_nothing_left(size_t n, double within_s = 0) const {
    const std::vector<pid_t> pids = pids_in(pids_);
    EXPECT_EQ(pids.size(), n);
    EXPECT_TRUE(soon([&] { return std::none_of(pids.begin(), pids.end(), is_running); }, within_s));
  }

  const std::string pids_ = new_folder();
};

constexpr const char* kForEver = "while :; do sleep 0.2; done";

// ---- one rank fails

TEST_F(Ending, R_007_T_26_TheFailedRankIsNamedAndTheOthersAreEnded) {
  const Result r = run_ranks(4, "if test $RANK = 2; then echo boom >&2; exit 3; fi; sleep 100");
  EXPECT_EQ(r.exit_code, 3);
  EXPECT_LT(r.seconds, 5);
  const auto lines = lines_of(r.err);
  ASSERT_EQ(lines.size(), 3u) << r.err;
  EXPECT_EQ(lines[0], "[rank 2] boom");
  EXPECT_EQ(lines[1], "rank 2: exit code 3: boom");
  EXPECT_NE(lines[2].find("local rank 2"), std::string::npos);
  expect_nothing_left(4);
}

// A signal that comes while there are ranks to start is not put off until they all are.
TEST_F(Ending, InterruptedWhileRanksStart) {
  Program job(command(1000, "exec sleep 100"), options());
  expect_started(1);
  kill(job.pid(), SIGTERM);
  const Result r = job.wait();
  EXPECT_EQ(r.exit_code, 128 + SIGTERM) << r.err;
  const size_t started = pids_in(pids_).size();
  EXPECT_LT(started, 1000u);
  expect_nothing_left(started);
}

TEST_F(Ending, ADeathBySignalOutranksItsPeersErrors) {
  // Their errors are even seen first.
  const Result r =
      run_ranks(3,
                "if test $RANK = 1; then touch $PIDS/ready; sleep 0.05; kill -KILL $$; fi; "
                "while ! test -e $PIDS/ready; do sleep 0.01; done; "
                "if test $RANK = 0; then echo '[all_reduce] connection reset' >&2; "
                "else echo '[all_reduce] rank 1 left' >&2; fi; exit 1");
  EXPECT_EQ(r.exit_code, 128 + SIGKILL);
  const size_t first = r.err.find("\nrank 1: killed by SIGKILL\n");
  EXPECT_NE(first, std::string::npos) << r.err;
  EXPECT_GT(r.err.find("\nrank 0: exit code 1: [all_reduce] connection reset\n"), first) << r.err;
  EXPECT_GT(r.err.find("\nrank 2: exit code 1: [all_reduce] rank 1 left\n"), first) << r.err;
}

TEST_F(Ending, WhoeverKillsARankFromOutside) {
  Program job(command(3, kForEver), options());
  expect_started(3);
  const pid_t victim = std::stoi(read_file(pids_ + "/rank1"));
  kill(victim, SIGKILL);
  const Result r = job.wait();
  EXPECT_EQ(r.exit_code, 128 + SIGKILL);
  EXPECT_EQ(r.err.find("rank 1: killed by SIGKILL\n"), 0u) << r.err;
  EXPECT_NE(r.err.find("pid " + std::to_string(victim)), std::string::npos) << r.err;
  EXPECT_EQ(count(r.err, "rank 0"), 0) << r.err;
  expect_nothing_left(3);
}

TEST_F(Ending, R_008_AnExitCodeAbove128IsNoSignal) {
  const Result r = run_ranks(2, "test $RANK = 0 && exit 138; sleep 100");
  EXPECT_EQ(r.exit_code, 1);
  EXPECT_EQ(r.err.find("rank 0: exit code 138\n"), 0u) << r.err;
  EXPECT_EQ(count(r.err, "SIG"), 0) << r.err;
  expect_nothing_left(2);
}

TEST_F(Ending, R_008_ASegmentationFaultIsNamed) {
  const Result r = run_ranks(2, "ulimit -c 0; test $RANK = 0 && kill -SEGV $$; sleep 100");
  EXPECT_EQ(r.exit_code, 128 + SIGSEGV);
  EXPECT_EQ(r.err.find("rank 0: killed by SIGSEGV\n"), 0u) << r.err;
  EXPECT_NE(r.err.find("exit code -11"), std::string::npos) << r.err;
  EXPECT_NE(r.err.find("pid " + std::to_string(std::stoi(read_file(pids_ + "/rank0")))),
            std::string::npos)
      << r.err;
}

TEST_F(Ending, AnUncaughtExceptionIsQuoted) {
  const Result r = run_ranks(
      2, "ulimit -c 0; test $RANK = 1 && exec " + std::string(kRankProgram) + " throw; sleep 100");
  EXPECT_EQ(r.exit_code, 128 + SIGABRT);
  EXPECT_NE(r.err.find("\nrank 1: killed by SIGABRT: [matmul] shapes differ\n"), std::string::npos)
      << r.err;
}

TEST_F(Ending, T_29_OfManyFailedRanksAFewAreDescribed) {
  const Result r = run_ranks(12, "exit 4");
  EXPECT_EQ(r.exit_code, 4);
  EXPECT_EQ(count(r.err, ": exit code 4\n"), 1) << r.err;
  EXPECT_EQ(count(r.err, " likewise: pid "), 7) << r.err;
  EXPECT_NE(r.err.find("and 4 more failed ranks\n"), std::string::npos) << r.err;
}

TEST_F(Ending, AllWell) {
  const Result r = run_ranks(3, "exit 0");
  EXPECT_EQ(r.exit_code, 0);
  EXPECT_EQ(r.out + r.err, "");
}

// /proc tells it of another namespace's processes then, none of which are its children.
TEST_F(Ending, InAProcessNamespaceOfItsOwn) {
  std::vector<std::string> words = {"/usr/bin/unshare", "--pid", "--fork"};
  for (const std::string& word : command(2, "exit 0")) words.push_back(word);
  const Result r = run(words, options());
  if (r.err.starts_with("unshare: "))
    GTEST_SKIP() << "process namespaces are not permitted here: " << r.err;
  EXPECT_EQ(r.exit_code, 0);
  EXPECT_EQ(r.err, "");
  EXPECT_LT(r.seconds, 5);
}

// ---- usage errors

TEST_F(Ending, AUsageErrorThatAllMakeIsShownOnce) {
  const Result r = run_ranks(8, "echo 'train: unknown flag --stpes' >&2; exit 2");
  EXPECT_EQ(r.exit_code, 2);
  EXPECT_EQ(r.err, "[rank 0] train: unknown flag --stpes\n");
}

TEST_F(Ending, AUsageErrorOfOneRankNamesIt) {
  const Result r =
      run_ranks(2, "if test $RANK = 1; then echo 'no data' >&2; exit 2; fi; sleep 100");
  EXPECT_EQ(r.exit_code, 2);
  EXPECT_NE(r.err.find("rank 1: exit code 2: no data\n"), std::string::npos) << r.err;
}

TEST_F(Ending, ExitCode2WithoutAWordIsReported) {
  const Result r = run_ranks(2, "exit 2");
  EXPECT_EQ(r.exit_code, 2);
  EXPECT_EQ(count(r.err, ": exit code 2\n"), 1) << r.err;
  EXPECT_EQ(count(r.err, " likewise: pid "), 1) << r.err;
}

TEST_F(Ending, EqualLinesOfRanksThatFailOtherwiseAreAllShown) {
  const Result r = run_ranks(3, "echo out of disk >&2; exit 5");
  for (const char* line :
       {"[rank 0] out of disk\n", "[rank 1] out of disk\n", "[rank 2] out of disk\n"}) {
    EXPECT_EQ(count(r.err, line), 1) << r.err;
  }
}

// ---- stubborn and hidden processes

TEST_F(Ending, T_26_ARankThatIgnoresSigtermIsKilled) {
  const Result r = run_ranks(3, "test $RANK = 0 && exit 1; trap '' TERM; " + std::string(kForEver));
  EXPECT_EQ(r.exit_code, 1);
  EXPECT_GT(r.seconds, 2.5);
  EXPECT_LT(r.seconds, 5);
  expect_nothing_left(3);
}

TEST_F(Ending, ASuspendedRankIsEndedByTerm) {
  const Result r =
      run_ranks(2, "test $RANK = 0 && { sleep 0.3; exit 1; }; kill -STOP $$; sleep 100");
  EXPECT_EQ(r.exit_code, 1);
  EXPECT_LT(r.seconds, 2.5);
  expect_nothing_left(2);
}

// In the rank's group, in a group of its own, in a session of its own, and one that has been left
// by all its ancestors.
const char* const kGrandchildren =
    "sleep 100 & echo $! > $PIDS/a$RANK; "
    "timeout 100 sh -c 'echo $$ > $PIDS/b$RANK; sleep 100' & "
    "setsid sh -c 'echo $$ > $PIDS/c$RANK; sleep 100' & "
    "(setsid sh -c 'echo $$ > $PIDS/d$RANK; sleep 100' &) ; "
    "while test $(ls $PIDS | wc -l) -lt 10; do sleep 0.05; done; ";

TEST_F(Ending, T_26_GrandchildrenOfAFailedJobAreGone) {
  const Result r =
      run_ranks(2, std::string(kGrandchildren) + "test $RANK = 0 && exit 1; sleep 100");
  EXPECT_EQ(r.exit_code, 1);
  EXPECT_LT(r.seconds, 5);
  expect_nothing_left(10);
}

TEST_F(Ending, GrandchildrenOfAJobThatWentWellAreGone) {
  const Result r = run_ranks(2, kGrandchildren);
  EXPECT_EQ(r.exit_code, 0);
  EXPECT_LT(r.seconds, 5);
  expect_nothing_left(10);
}

TEST_F(Ending, AGrandchildThatIgnoresSigtermIsKilled) {
  const Result r = run_ranks(
      2,
      "setsid sh -c 'trap \"\" TERM; echo $$ > $PIDS/a$RANK; while :; do sleep 0.2; done' & "
      "while test $(ls $PIDS | wc -l) -lt 4; do sleep 0.05; done; exit 6");
  EXPECT_EQ(r.exit_code, 6);
  EXPECT_LT(r.seconds, 6);
  expect_nothing_left(4);
}

// ---- signals to the launcher

TEST_F(Ending, R_013_SignalsToTheLauncherEndAll) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    const std::string stopped = new_folder();
    Program job(command(3, "trap 'echo $RANK > " + stopped + "/$RANK; exit 0' TERM; " + kForEver),
                options());
    expect_started(3);
    ASSERT_TRUE(soon([&] { return pids_in(pids_).size() == 3; }));
    usleep(300'000);  // for the traps to be set
    kill(job.pid(), signal);
    const Result r = job.wait();
    EXPECT_EQ(r.exit_code, 128 + signal);
    const std::string said = "interrupted by SIG" + std::string(sigabbrev_np(signal));
    EXPECT_NE(r.err.find(said + ": all ranks were ended\n"), std::string::npos) << r.err;
    EXPECT_EQ(pids_in(stopped).size(), 3u);  // they were asked before they were killed
    expect_nothing_left(3);
    std::filesystem::remove_all(pids_);
    std::filesystem::create_directory(pids_);
  }
}

TEST_F(Ending, R_013_ASecondSignalKillsAtOnce) {
  Program job(command(3, "trap '' TERM; echo set; " + std::string(kForEver)), options());
  ASSERT_TRUE(soon([&] { return count(job.out(), "set") == 3; }));
  kill(job.pid(), SIGINT);
  usleep(300'000);
  const auto before = std::chrono::steady_clock::now();
  kill(job.pid(), SIGINT);
  const Result r = job.wait();
  EXPECT_LT(std::chrono::steady_clock::now() - before, std::chrono::seconds(2));
  EXPECT_EQ(r.exit_code, 128 + SIGINT);
  expect_nothing_left(3);
}

TEST_F(Ending, AScriptsBackgroundJobIsInterruptedToo) {
  // sh starts it with SIGINT ignored.
  Program script(
      {"/bin/sh", "-c",
       std::string(kSherdrun) +
           " --nproc_per_node=2 sh -c 'echo $$ > $PIDS/$RANK; sleep 100' & "
           "while test $(ls $PIDS | wc -l) -lt 2; do sleep 0.05; done; kill -INT $!; wait $!"},
      options());
  EXPECT_EQ(script.wait().exit_code, 128 + SIGINT);
  expect_nothing_left(2);
}

TEST_F(Ending, NohupIsRespected) {
  Program job({"/usr/bin/nohup", kSherdrun, "--nproc_per_node=2", "sh", "-c",
               "echo $$ > $PIDS/$RANK; sleep 1; echo done"},
              options());
  expect_started(2);
  kill(job.pid(), SIGHUP);
  const Result r = job.wait();
  EXPECT_EQ(r.exit_code, 0);
  EXPECT_EQ(count(r.out, "done"), 2);
}

TEST_F(Ending, ALauncherKilledTakesItsRanksAlong) {
  Program job(command(3, "exec sleep 100"), options());
  expect_started(3);
  kill(job.pid(), SIGKILL);
  EXPECT_EQ(job.wait().signal, SIGKILL);
  expect_nothing_left(3, /*within_s=*/5);
}

TEST_F(Ending, SuspendingTheLauncherSuspendsTheRanks) {
  Program job(command(2, kForEver), options());
  expect_started(2);
  const std::vector<pid_t> ranks = pids_in(pids_);
  const auto all_in = [&](const std::string& states) {
    return std::all_of(ranks.begin(), ranks.end(),
                       [&](pid_t pid) { return states.find(state_of(pid)) != std::string::npos; });
  };
  kill(job.pid(), SIGTSTP);
  // D: the shell was just starting its next `sleep`, and waits for it to be continued.
  EXPECT_TRUE(soon([&] { return all_in("TD") && state_of(job.pid()) == 'T'; }));
  kill(job.pid(), SIGCONT);
  EXPECT_TRUE(soon([&] { return all_in("SRD"); }));
  kill(job.pid(), SIGTERM);
  EXPECT_EQ(job.wait().exit_code, 128 + SIGTERM);
  expect_nothing_left(2);
}

}  // namespace
}  // namespace sherd::dist
