// What ranks print: every line whole, with its rank, none lost; and in time.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <map>

#include "tests/launcher/program.h"

namespace sherd::dist {
namespace {

Program sherdrun(int ranks, const std::string& script, const ProgramOptions& options = {}) {
  return Program({kSherdrun, "--nproc_per_node=" + std::to_string(ranks), "sh", "-c", script},
                 options);
}

// "[rank 3] <3:17....3:17>" with both tags alike; returns the line's number, or -1.
int parse(const std::string& line, int& rank) {
  int r1, r2, i;
  int at = 0;
  if (sscanf(line.c_str(), "[rank %d] <%d:%d%n", &r1, &r2, &i, &at) != 3 || r1 != r2) return -1;
  const std::string tag = std::to_string(r1) + ":" + std::to_string(i) + ">";
  const size_t dots = line.find_first_not_of('.', static_cast<size_t>(at));
  if (dots == std::string::npos || line.substr(dots) != tag) return -1;
  rank = r1;
  return i;
}

// Both streams go to one file, and ranks write pieces of a few bytes.
TEST(Output, R_012_T_29_OfManyRanksIsNeitherLostNorMixed) {
  constexpr int kRanks = 32, kLines = 1000;
  const Result r = run({kSherdrun, "--nproc_per_node=" + std::to_string(kRanks), kRankProgram,
                        "print", std::to_string(kLines)},
                       {.merge = true});
  ASSERT_EQ(r.exit_code, 0);
  std::map<int, int> next_even, next_odd, ends;
  for (int rank = 0; rank < kRanks; ++rank) next_odd[rank] = 1;
  int lines = 0;
  for (const std::string& line : lines_of(r.out)) {
    int rank, other;
    if (sscanf(line.c_str(), "[rank %d] <end %d>", &rank, &other) == 2) {  // had no newline
      EXPECT_EQ(rank, other);
      ++ends[rank];
      continue;
    }
    const int i = parse(line, rank);
    ASSERT_GE(i, 0) << line;
    int& next = (i % 2 == 0 ? next_even : next_odd)[rank];
    ASSERT_EQ(i, next) << line;
    next += 2;
    ++lines;
  }
  EXPECT_EQ(lines, kRanks * kLines);
  for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(ends[rank], 2) << rank;
}

TEST(Output, StreamsStayApart) {
  const Result r = sherdrun(2, "echo to-out; echo to-err >&2; printf 'no newline'").wait();
  EXPECT_EQ(r.exit_code, 0);
  for (const char* rank : {"[rank 0] ", "[rank 1] "}) {
    EXPECT_EQ(count(r.out, rank + std::string("to-out\n")), 1);
    EXPECT_EQ(count(r.out, rank + std::string("no newline\n")), 1);
    EXPECT_EQ(count(r.err, rank + std::string("to-err\n")), 1);
  }
  EXPECT_EQ(lines_of(r.out).size(), 4u);
  EXPECT_EQ(lines_of(r.err).size(), 2u);
}

TEST(Output, AProgressLineIsShownWhileItIsRedrawn) {
  const std::string folder = new_folder();
  Program job = sherdrun(2, "printf '10%%\\r'; while ! test -e $FOLDER/go; do sleep 0.05; done",
                         {.environment = {{"FOLDER", folder}}});
  EXPECT_TRUE(soon([&] { return count(job.out(), "[rank 1] 10%\n") == 1; }));
  std::ofstream(folder + "/go") << "";
  EXPECT_EQ(job.wait().exit_code, 0);
}

TEST(Output, StderrIsShownSoon) {
  const std::string folder = new_folder();
  Program job = sherdrun(2, "echo warning >&2; while ! test -e $FOLDER/go; do sleep 0.05; done",
                         {.environment = {{"FOLDER", folder}}, .merge = true});
  EXPECT_TRUE(soon([&] { return count(job.out(), "warning") == 2; }));
  std::ofstream(folder + "/go") << "";
  EXPECT_EQ(job.wait().exit_code, 0);
}

TEST(Output, OfASingleRankIsUntouched) {
  const Result r = sherdrun(1, "printf 'a\\rb'; printf 'c' >&2").wait();
  EXPECT_EQ(r.out, "a\rb");
  EXPECT_EQ(r.err, "c");
}

TEST(Input, GoesToRank0) {
  const std::string path = new_folder() + "/in";
  std::ofstream(path) << "hello\n";
  const Result r = sherdrun(2, "read line; echo got $line", {.in = path}).wait();
  EXPECT_EQ(count(r.out, "[rank 0] got hello\n"), 1) << r.out;
  EXPECT_EQ(count(r.out, "[rank 1] got\n"), 1) << r.out;
}

TEST(Output, R_012_ALeftOverProcessThatHoldsItDoesNotHoldUpTheJob) {
  const Result r = sherdrun(2, "sleep 100 & echo printed").wait();
  EXPECT_EQ(r.exit_code, 0);
  EXPECT_EQ(count(r.out, "printed"), 2);
  EXPECT_LT(r.seconds, 5);
}

TEST(Output, AReaderWhoLeavesEndsTheJob) {
  const Result r = run({"/bin/sh", "-c",
                        "{ " + std::string(kSherdrun) + " --nproc_per_node=2 " + kRankProgram +
                            " flood; echo code $? >&2; } | head -n 1"});
  EXPECT_EQ(lines_of(r.out).size(), 1u);
  EXPECT_NE(r.err.find("code 141"), std::string::npos) << r.err;  // as SIGPIPE would have
  EXPECT_LT(r.seconds, 10);
}

TEST(Output, AFullDiskDoesNotEndTheJob) {
  const Result r = run(
      {"/bin/sh", "-c",
       std::string(kSherdrun) +
           " --nproc_per_node=2 sh -c 'echo one; sleep 0.5; echo two; echo end >&2' >/dev/full"});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  EXPECT_EQ(count(r.err, "stdout cannot be written: No space left on device; the job goes on"), 1)
      << r.err;
  EXPECT_EQ(count(r.err, "end\n"), 2) << r.err;
}

TEST(Output, AReaderWhoDoesNotReadHoldsUpNoSignal) {
  // The reader ignores its pipe until the launcher is gone.
  const std::string folder = new_folder();
  const Result r =
      run({"/bin/sh", "-c",
           "{ " + std::string(kSherdrun) + " --nproc_per_node=2 " + kRankProgram +
               " flood & job=$!; sleep 1; kill -TERM $job; wait $job; echo code $? >&2; touch " +
               folder + "/gone; } | { while ! test -e " + folder + "/gone; do sleep 0.1; done; }"});
  EXPECT_NE(r.err.find("code 143"), std::string::npos) << r.err;
  EXPECT_LT(r.seconds, 10);
}

}  // namespace
}  // namespace sherd::dist
