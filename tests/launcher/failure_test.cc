#include "distributed/launcher/failure.h"

#include <gtest/gtest.h>
#include <signal.h>

#include "core/error.h"

namespace sherd::dist {
namespace {

RankEnd exited(int rank, int code, const std::string& error = "") {
  return {.rank = rank, .local_rank = rank, .pid = 100 + rank, .exit_code = code, .error = error};
}

RankEnd killed(int rank, int signal, const std::string& error = "") {
  return {.rank = rank, .local_rank = rank, .pid = 100 + rank, .signal = signal, .error = error};
}

std::vector<int> order(const std::vector<RankEnd>& ends) {
  std::vector<int> ranks;
  for (const RankEnd& end : failures_by_cause(ends)) ranks.push_back(end.rank);
  return ranks;
}

using Ranks = std::vector<int>;

TEST(FailuresByCause, R_007_TheEarliestFirst) {
  EXPECT_EQ(order({exited(2, 3), exited(0, 1), exited(1, 0)}), (Ranks{2, 0}));
  EXPECT_EQ(order({exited(0, 0), exited(1, 0)}), Ranks{});
}

TEST(FailuresByCause, ASignalOutranksExitCodesSeenBefore) {
  EXPECT_EQ(order({exited(0, 1), exited(2, 1), killed(1, SIGKILL)}), (Ranks{1, 0, 2}));
  EXPECT_EQ(order({killed(0, SIGABRT), killed(1, SIGSEGV)}), (Ranks{1, 0}));
}

TEST(FailuresByCause, AnAbortIsAReportLikeAnExitCode) {
  EXPECT_EQ(order({exited(1, 3), killed(0, SIGABRT)}), (Ranks{1, 0}));
  EXPECT_EQ(order({killed(0, SIGABRT), exited(1, 3)}), (Ranks{0, 1}));
}

TEST(FailuresByCause, WhoBlamesAnotherFailedRankComesAfterIt) {
  EXPECT_EQ(
      order({exited(0, 1, "[all_reduce] rank 0: rank 12 left"), exited(12, 1, "out of disk")}),
      (Ranks{12, 0}));
  EXPECT_EQ(order({killed(0, SIGABRT, "rank 1 left"), exited(1, 3)}), (Ranks{1, 0}));
  // Blames itself, a rank that is well, or no number: the earliest it stays.
  EXPECT_EQ(order({exited(0, 1, "rank 0 has no data"), exited(1, 1)}), (Ranks{0, 1}));
  EXPECT_EQ(order({exited(0, 1, "rank 7 is late"), exited(1, 1)}), (Ranks{0, 1}));
  EXPECT_EQ(order({exited(0, 1, "rank of the matrix"), exited(1, 1)}), (Ranks{0, 1}));
  EXPECT_EQ(order({exited(0, 1, "rank 99999999999999999999"), exited(1, 1)}), (Ranks{0, 1}));
  // All blame each other.
  EXPECT_EQ(order({exited(1, 1, "rank 0 differs"), exited(0, 1, "rank 1 differs")}), (Ranks{1, 0}));
}

TEST(FailuresByCause, WhatTheLauncherStoppedIsNoFailure) {
  RankEnd stopped = killed(0, SIGTERM);
  stopped.stopped = true;
  EXPECT_EQ(order({stopped, exited(1, 1)}), Ranks{1});
}

TEST(Describe, NamesRankEndAndError) {
  EXPECT_EQ(describe(killed(1, SIGKILL), "host"),
            "rank 1: killed by SIGKILL\n"
            "    pid 101 on host, local rank 1, 0.0 s after the start, exit code -9");
  EXPECT_EQ(describe(exited(2, 3, "boom"), "host"),
            "rank 2: exit code 3: boom\n"
            "    pid 102 on host, local rank 2, 0.0 s after the start");
}

// What several ranks say alike is said once, in the place of the first.
TEST(Describe, AllTogether) {
  EXPECT_EQ(describe_all({exited(1, 3, "boom"), killed(3, SIGKILL), exited(2, 3, "boom")},
                         [](const RankEnd& end) { return concat("host", end.rank); }),
            "rank 1: exit code 3: boom\n"
            "    pid 101 on host1, local rank 1, 0.0 s after the start\n"
            "    rank 2 likewise: pid 102 on host2, local rank 2, 0.0 s after the start\n"
            "rank 3: killed by SIGKILL\n"
            "    pid 103 on host3, local rank 3, 0.0 s after the start, exit code -9");
}

TEST(Describe, TheLogOfTheFirst) {
  std::vector<RankEnd> ends{exited(1, 3, "boom"), exited(2, 3, "boom")};
  for (RankEnd& end : ends) end.log = concat("logs/", end.rank);
  EXPECT_EQ(describe_all(ends, [](const RankEnd&) { return "host"; }),
            "rank 1: exit code 3: boom\n"
            "    pid 101 on host, local rank 1, 0.0 s after the start\n"
            "    log: logs/1\n"
            "    rank 2 likewise: pid 102 on host, local rank 2, 0.0 s after the start");
}

TEST(LauncherExitCode, IsTheRanksWhereThatIsPlain) {
  EXPECT_EQ(launcher_exit_code(exited(0, 3)), 3);
  EXPECT_EQ(launcher_exit_code(exited(0, 125)), 125);
  EXPECT_EQ(launcher_exit_code(exited(0, 138)), 1);
  EXPECT_EQ(launcher_exit_code(killed(0, SIGKILL)), 137);
}

}  // namespace
}  // namespace sherd::dist
