// Ranks under mpirun: with sherdrun --backend=mpi they are what they are with any other backend,
// and MPI's processes besides. The ranks here are scripts; programs that talk over MPI are in
// tests/examples.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "tests/launcher/program.h"

namespace sherd::dist {
namespace {

namespace fs = std::filesystem;

class MpiLaunch : public testing::Test {
 protected:
  void SetUp() override {
    if (!has_mpirun()) GTEST_SKIP() << "mpirun is not installed";
    fs::create_directory(temporary_);
  }
  // Nothing of mpirun or its keepers stays, neither process nor file.
  void TearDown() override {
    EXPECT_TRUE(soon([&] { return fs::is_empty(temporary_); }, 20));
    const std::vector<pid_t> pids = pids_in(pids_);
    EXPECT_TRUE(soon([&] { return std::none_of(pids.begin(), pids.end(), is_running); }, 20));
    EXPECT_TRUE(soon([&] { return mpiruns().empty(); }, 20));
  }

  std::vector<std::string> command(int ranks, const std::string& script,
                                   const std::vector<std::string>& flags = {}) const {
    std::vector<std::string> c{kSherdrun, "--backend=mpi",
                               "--nproc_per_node=" + std::to_string(ranks)};
    c.insert(c.end(), flags.begin(), flags.end());
    c.insert(c.end(), {"sh", "-c", "echo $$ > $PIDS/rank$RANK; " + script});
    return c;
  }
  ProgramOptions options() const {
    return {.environment = {{"PIDS", pids_}, {"TMPDIR", temporary_}}};
  }
  Result run_ranks(int ranks, const std::string& script,
                   const std::vector<std::string>& flags = {}) const {
    return run(command(ranks, script, flags), options());
  }
  // Those of this test, by their environment.
  std::vector<pid_t> mpiruns() const {
    std::vector<pid_t> found;
    std::error_code error;
    for (const auto& entry : fs::directory_iterator("/proc", error)) {
      const std::string name = entry.path().filename();
      if (name.find_first_not_of("0123456789") != std::string::npos) continue;
      if (read_file(entry.path() / "comm") != "mpirun\n") continue;
      const std::string environment = read_file(entry.path() / "environ");
      if (environment.find("TMPDIR=" + temporary_) != std::string::npos)
        found.push_back(std::stoi(name));
    }
    return found;
  }

  const std::string pids_ = new_folder(), temporary_ = new_folder() + "/tmp";
};

TEST_F(MpiLaunch, RanksHaveTheirPlaceInMpiToo) {
  const Result r =
      run_ranks(3,
                "echo $RANK of $WORLD_SIZE, $OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE, "
                "$PMIX_RANK, $SHERD_BACKEND");
  EXPECT_EQ(r.exit_code, 0) << r.err;
  EXPECT_EQ(r.err, "");
  std::vector<std::string> lines = lines_of(r.out);
  std::sort(lines.begin(), lines.end());
  EXPECT_EQ(lines, (std::vector<std::string>{"[rank 0] 0 of 3, 0 of 3, 0, mpi",
                                             "[rank 1] 1 of 3, 1 of 3, 1, mpi",
                                             "[rank 2] 2 of 3, 2 of 3, 2, mpi"}));
}

TEST_F(MpiLaunch, TheEnvironmentMaySayIt) {
  ProgramOptions o = options();
  o.environment["SHERD_BACKEND"] = "mpi";
  const Result r = run({kSherdrun, "--nproc_per_node=2", "sh", "-c", "echo $PMIX_RANK"}, o);
  EXPECT_EQ(count(r.out, "] 0\n") + count(r.out, "] 1\n"), 2) << r.out << r.err;
  o.environment["SHERD_BACKEND"] = "gloo";
  EXPECT_EQ(run({kSherdrun, "--nproc_per_node=1", "sh", "-c", "echo =$PMIX_RANK="}, o).out, "==\n");
}

TEST_F(MpiLaunch, FailuresAreNamedAsWithoutMpirun) {
  const Result r = run_ranks(4, "if test $RANK = 2; then echo boom >&2; exit 3; fi; sleep 100");
  EXPECT_EQ(r.exit_code, 3);
  const auto lines = lines_of(r.err);
  ASSERT_EQ(lines.size(), 3u) << r.err;  // and nothing of mpirun's
  EXPECT_EQ(lines[0], "[rank 2] boom");
  EXPECT_EQ(lines[1], "rank 2: exit code 3: boom");
}

TEST_F(MpiLaunch, AKilledRankIsTheCause) {
  const Result r = run_ranks(3, "if test $RANK = 1; then kill -KILL $$; fi; sleep 100");
  EXPECT_EQ(r.exit_code, 128 + SIGKILL);
  EXPECT_EQ(r.err.find("rank 1: killed by SIGKILL\n"), 0u) << r.err;
}

TEST_F(MpiLaunch, InterruptEndsAll) {
  Program job(command(2, "sleep 100"), options());
  ASSERT_TRUE(soon([&] { return pids_in(pids_).size() == 2; }, 40));
  kill(job.pid(), SIGINT);
  EXPECT_EQ(job.wait().exit_code, 128 + SIGINT);
}

// Even if the launcher cannot do anything about it any more.
TEST_F(MpiLaunch, AKilledLauncherLeavesNothing) {
  Program job(command(2, "sleep 100"), options());
  ASSERT_TRUE(soon([&] { return pids_in(pids_).size() == 2; }, 40));
  EXPECT_EQ(mpiruns().size(), 1u);
  kill(job.pid(), SIGKILL);
  EXPECT_EQ(job.wait().signal, SIGKILL);
}

TEST_F(MpiLaunch, AKilledMpirunLeavesNothing) {
  Program job(command(2, "while ! test -e $PIDS/go; do sleep 0.1; done"), options());
  ASSERT_TRUE(soon([&] { return pids_in(pids_).size() == 2; }, 40));
  for (const pid_t pid : mpiruns()) kill(pid, SIGKILL);
  fs::create_directory(pids_ + "/go");
  EXPECT_EQ(job.wait().exit_code, 0);  // these ranks did not need MPI
  fs::remove(pids_ + "/go");
}

TEST_F(MpiLaunch, RestartsHaveANewMpirun) {
  const Result r = run_ranks(2,
                             "echo $TORCHELASTIC_RESTART_COUNT $PMIX_NAMESPACE; "
                             "test $TORCHELASTIC_RESTART_COUNT = 1",
                             {"--max_restarts=1"});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  std::map<std::string, std::string> mpirun;  // by restart count
  for (const std::string& line : lines_of(r.out)) {
    const std::string said = line.substr(line.find("] ") + 2);
    mpirun[said.substr(0, 1)] = said.substr(2);
  }
  EXPECT_EQ(mpirun.size(), 2u) << r.out;
  EXPECT_NE(mpirun["0"], mpirun["1"]);
}

TEST_F(MpiLaunch, RanksHaveTheirOwnFilesAndExitCodes) {
  const std::string logs = new_folder();
  const Result r =
      run_ranks(2, "echo out $RANK; echo err $RANK >&2", {"--log_dir=" + logs, "--redirects=3"});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  int files = 0;
  for (const auto& entry : fs::recursive_directory_iterator(logs))
    if (entry.is_regular_file()) {
      ++files;
      EXPECT_EQ(lines_of(read_file(entry.path())).size(), 1u) << entry.path();
    }
  EXPECT_EQ(files, 4);
}

TEST(MpiLaunchErrors, WithoutMpirun) {
  const Result r = run({kSherdrun, "--backend=mpi", "--nproc_per_node=2", "/bin/true"},
                       {.environment = {{"PATH", "/nowhere"}}});
  EXPECT_EQ(r.exit_code, 1);
  EXPECT_EQ(lines_of(r.err).size(), 1u) << r.err;
  EXPECT_NE(r.err.find("backend 'mpi' needs mpirun, which is in no folder of PATH"),
            std::string::npos)
      << r.err;
}

TEST(MpiLaunchErrors, SeveralNodes) {
  const Result r = run({kSherdrun, "--backend=mpi", "--nnodes=2", "--node_rank=0",
                        "--master_addr=127.0.0.1", "/bin/true"});
  EXPECT_EQ(r.exit_code, 2);
  EXPECT_NE(r.err.find("start the program by mpirun itself"), std::string::npos) << r.err;
  EXPECT_EQ(run({kSherdrun, "--backend=pigeons", "/bin/true"}).exit_code, 2);
}

}  // namespace
}  // namespace sherd::dist
