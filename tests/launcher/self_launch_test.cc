// launch_self: a program that starts its own ranks, on a terminal and off it.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <termios.h>
#include <unistd.h>

#include <set>

#include "tests/launcher/program.h"

namespace sherd::dist {
namespace {

Result self_launch(const std::string& ranks, const std::string& script,
                   const ProgramOptions& options = {}) {
  return run({kSelfLauncher, ranks, script}, options);
}

TEST(SelfLaunch, Rank0SpeaksForTheProgram) {
  const Result r = self_launch("3", "echo I am $RANK of $WORLD_SIZE");
  EXPECT_EQ(r.exit_code, 0) << r.err;
  const auto lines = lines_of(r.out);
  EXPECT_EQ(std::set<std::string>(lines.begin(), lines.end()),
            (std::set<std::string>{"I am 0 of 3", "[rank 1] I am 1 of 3", "[rank 2] I am 2 of 3",
                                   "launched: 0"}));
}

TEST(SelfLaunch, OneRankToo) {
  EXPECT_EQ(self_launch("1", "echo $RANK of $WORLD_SIZE").out, "0 of 1\nlaunched: 0\n");
}

TEST(SelfLaunch, R_005_ARankGoesOn) {
  const std::string show = "echo rank";
  EXPECT_EQ(self_launch("3", show, {.environment = {{"RANK", "0"}, {"WORLD_SIZE", "1"}}}).out,
            "rank\n");
  EXPECT_EQ(
      self_launch("3", show,
                  {.environment = {{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}}})
          .out,
      "rank\n");
  EXPECT_EQ(self_launch("3", show,
                        {.environment = {{"SLURM_PROCID", "1"}, {"SLURM_STEP_NUM_TASKS", "2"}}})
                .out,
            "rank\n");
  // A shell that Slurm started is no rank.
  EXPECT_EQ(self_launch("1", show,
                        {.environment = {{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}}})
                .out,
            "rank\nlaunched: 0\n");
  // Under sherdrun there are as many as sherdrun says.
  const Result r =
      run({kSherdrun, "--nproc_per_node=2", kSelfLauncher, "3", "echo $RANK/$WORLD_SIZE"});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  EXPECT_EQ(lines_of(r.out).size(), 2u) << r.out;
}

TEST(SelfLaunch, ErrorsThatRanksShareAreShownOnce) {
  const Result r = self_launch("4", "echo 'train: no such file: x.txt' >&2; exit 2");
  EXPECT_EQ(r.exit_code, 2);
  EXPECT_EQ(r.err, "train: no such file: x.txt\n");
  const Result s = self_launch("4", "echo '[all_reduce] shapes differ' >&2; exit 1");
  EXPECT_EQ(s.exit_code, 1);
  EXPECT_EQ(lines_of(s.err).front(), "[all_reduce] shapes differ");
  EXPECT_EQ(count(s.err, "[rank "), 0) << s.err;
  EXPECT_EQ(count(s.err, ": exit code 1: [all_reduce] shapes differ\n"), 1) << s.err;
  EXPECT_EQ(count(s.err, " likewise: pid "), 3) << s.err;
}

TEST(SelfLaunch, TheSummaryBeginsALine) {
  const Result r =
      self_launch("2", "test $RANK = 0 && { printf 'no end' >&2; exit 3; }; sleep 100");
  EXPECT_EQ(r.exit_code, 3);
  EXPECT_EQ(r.err.find("no end\nrank 0: exit code 3: no end\n"), 0u) << r.err;
}

TEST(SelfLaunch, Refuses) {
  const Result r = self_launch("0", "echo ran");
  EXPECT_EQ(r.exit_code, 2);
  EXPECT_NE(r.err.find("nproc_per_node must be in 1 ... 1024, got 0"), std::string::npos) << r.err;
}

class Terminal {
 public:
  Terminal() : fd_(posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC)) {
    grantpt(fd_);
    unlockpt(fd_);
    slave_ = open(ptsname(fd_), O_RDWR | O_NOCTTY | O_CLOEXEC);
    // As written, with no \r before \n.
    termios mode;
    tcgetattr(slave_, &mode);
    mode.c_oflag &= ~static_cast<tcflag_t>(OPOST);
    tcsetattr(slave_, TCSANOW, &mode);
  }
  ~Terminal() {
    close(fd_);
    close(slave_);
  }
  int slave() const { return slave_; }
  void type(const std::string& keys) const {
    EXPECT_EQ(write(fd_, keys.data(), keys.size()), static_cast<ssize_t>(keys.size()));
  }
  const std::string& screen() {
    char buffer[4096];
    pollfd ready{fd_, POLLIN, 0};
    while (poll(&ready, 1, 0) == 1 && (ready.revents & POLLIN)) {
      const ssize_t n = read(fd_, buffer, sizeof buffer);
      if (n <= 0) break;
      text_.append(buffer, static_cast<size_t>(n));
    }
    return text_;
  }

 private:
  int fd_, slave_;
  std::string text_;
};

TEST(SelfLaunch, Rank0KeepsTheTerminal) {
  Terminal terminal;
  Program job(
      {kSelfLauncher, "2",
       "if test $RANK = 0; then test -t 1 && printf '10%%\\r'; sleep 0.5; test -t 1 && printf "
       "'20%%\\r'; else sleep 0.2; echo note; fi"},
      {.terminal = terminal.slave()});
  EXPECT_EQ(job.wait().exit_code, 0);
  // The other's line clears what was being redrawn.
  EXPECT_EQ(terminal.screen(), "10%\r\r\x1b[K[rank 1] note\n20%\rlaunched: 0\n");
}

TEST(SelfLaunch, CtrlCOnTheTerminalEndsAll) {
  Terminal terminal;
  const std::string pids = new_folder();
  Program job({kSelfLauncher, "3", "echo $$ > $PIDS/$RANK; exec sleep 100"},
              {.environment = {{"PIDS", pids}}, .terminal = terminal.slave()});
  ASSERT_TRUE(soon([&] { return pids_in(pids).size() == 3; }));
  terminal.type("\x03");
  EXPECT_EQ(job.wait().exit_code, 128 + SIGINT);
  for (const pid_t pid : pids_in(pids)) EXPECT_FALSE(is_running(pid));
  EXPECT_EQ(count(terminal.screen(), "interrupted by SIGINT"), 1) << terminal.screen();
}

TEST(SelfLaunch, ARankDoesNotReadTheTerminal) {
  Terminal terminal;
  Program job({kSelfLauncher, "2", "read line; echo $RANK: $?"}, {.terminal = terminal.slave()});
  EXPECT_EQ(job.wait().exit_code, 0);  // at the end of the file, not suspended
}

}  // namespace
}  // namespace sherd::dist
