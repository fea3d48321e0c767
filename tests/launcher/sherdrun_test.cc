// sherdrun: its flags, what it refuses, what ranks find in their environment, the store's port.
#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>

#include "tests/launcher/program.h"

namespace sherd::dist {
namespace {

int cores() {
  cpu_set_t set;
  sched_getaffinity(0, sizeof set, &set);
  return CPU_COUNT(&set);
}

Result sherdrun(std::vector<std::string> arguments, const ProgramOptions& options = {}) {
  arguments.insert(arguments.begin(), kSherdrun);
  return run(arguments, options);
}

std::set<std::string> line_set(const std::string& text) {
  const auto lines = lines_of(text);
  return {lines.begin(), lines.end()};
}

// A port of 127.0.0.1 that is taken while this lives.
class TakenPort {
 public:
  TakenPort() : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    bind(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address);
    listen(fd_, 1);
    socklen_t length = sizeof address;
    getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &length);
    port_ = ntohs(address.sin_port);
  }
  ~TakenPort() { release(); }
  int release() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
    return port_;
  }
  std::string port() const { return std::to_string(port_); }

 private:
  int fd_, port_;
};

// ---- ranks

TEST(Ranks, R_001_EachRunsOnceAndInheritsTheEnvironment) {
  for (const std::vector<std::string>& flags : std::vector<std::vector<std::string>>{
           {"--nproc_per_node=4"},
           {"--nproc-per-node", "4"},
           {"--standalone", "--nproc_per_node", "4"},
           {"--nnodes=1", "--node-rank=0", "--master-addr=localhost", "--nproc-per-node=4"}}) {
    const std::string folder = new_folder();
    std::vector<std::string> arguments = flags;
    arguments.insert(arguments.end(), {"sh", "-c", "echo \"$MINE\" > $FOLDER/$RANK"});
    const Result r = sherdrun(arguments, {.environment = {{"MINE", "a b=c"}, {"FOLDER", folder}}});
    EXPECT_EQ(r.exit_code, 0) << r.err;
    std::set<std::string> files;
    for (const auto& file : std::filesystem::directory_iterator(folder)) {
      files.insert(file.path().filename());
      EXPECT_EQ(read_file(file.path()), "a b=c\n");
    }
    EXPECT_EQ(files, (std::set<std::string>{"0", "1", "2", "3"}));
  }
}

TEST(Ranks, R_001_OneIsTheDefaultAndTheEnvironmentCanSay) {
  EXPECT_EQ(sherdrun({"sh", "-c", "echo $RANK of $WORLD_SIZE"}).out, "0 of 1\n");
  const Result r =
      sherdrun({"sh", "-c", "echo $WORLD_SIZE"}, {.environment = {{"PET_NPROC_PER_NODE", "3"}}});
  EXPECT_EQ(line_set(r.out), (std::set<std::string>{"[rank 0] 3", "[rank 1] 3", "[rank 2] 3"}));
}

TEST(Ranks, AreDirectChildrenAndLeadTheirGroups) {
  const Program job({kSherdrun, "--nproc_per_node=2", "sh", "-c",
                     "echo $(cut -d' ' -f4,5 /proc/$$/stat) $$; echo done; sleep 100"});
  ASSERT_TRUE(soon([&] { return count(job.out(), "done") == 2; }));
  int seen = 0;
  for (const std::string& line : lines_of(job.out())) {
    int rank, parent, group, pid;
    if (sscanf(line.c_str(), "[rank %d] %d %d %d", &rank, &parent, &group, &pid) != 4) continue;
    EXPECT_EQ(parent, job.pid());
    EXPECT_EQ(group, pid);
    ++seen;
  }
  EXPECT_EQ(seen, 2);
}

// ---- how many

TEST(NprocPerNode, R_002_TakesWords) {
  const std::string n = std::to_string(cores());
  EXPECT_EQ(count(sherdrun({"--nproc_per_node=cpu", "sh", "-c", "echo $WORLD_SIZE"}).out, n),
            cores());
  // No device is visible, whatever this machine has.
  const ProgramOptions no_gpu{.environment = {{"CUDA_VISIBLE_DEVICES", "-1"}}};
  EXPECT_EQ(
      count(sherdrun({"--nproc_per_node=auto", "sh", "-c", "echo $WORLD_SIZE"}, no_gpu).out, n),
      cores());
  const Result r = sherdrun({"--nproc_per_node=gpu", "true"}, no_gpu);
  EXPECT_EQ(r.exit_code, 2);
  EXPECT_NE(r.err.find("no GPU"), std::string::npos) << r.err;
}

// ---- the environment

TEST(Environment, R_005_IsConsistent) {
  const Result r = sherdrun({"--nproc_per_node=3", "sh", "-c",
                             "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK "
                             "$MASTER_ADDR $SHERD_LAUNCHED"});
  EXPECT_EQ(line_set(r.out), (std::set<std::string>{"[rank 0] 0 3 0 3 0 127.0.0.1 1",
                                                    "[rank 1] 1 3 1 3 0 127.0.0.1 1",
                                                    "[rank 2] 2 3 2 3 0 127.0.0.1 1"}))
      << r.err;
}

TEST(Environment, T_30_CoresAreDividedUnlessTheUserSaid) {
  const std::vector<std::string> show{"sh", "-c", "echo omp=$OMP_NUM_THREADS"};
  const auto omp = [&](const std::string& ranks, const std::string& set) {
    std::vector<std::string> arguments{"--nproc_per_node=" + ranks};
    arguments.insert(arguments.end(), show.begin(), show.end());
    const Result r = sherdrun(arguments, {.environment = {{"OMP_NUM_THREADS", set}}});
    const size_t at = r.out.find("omp=");
    return at == std::string::npos ? r.err : r.out.substr(at, r.out.find('\n', at) - at);
  };
  EXPECT_EQ(omp("1", ""), "omp=" + std::to_string(cores()));
  EXPECT_EQ(omp("2", ""), "omp=" + std::to_string(std::max(1, cores() / 2)));
  EXPECT_EQ(omp(std::to_string(2 * cores()), ""), "omp=1");
  EXPECT_EQ(omp("2", "7"), "omp=7");
}

TEST(Environment, R_015_OfSeveralNodes) {
  TakenPort port;
  const std::string number = std::to_string(port.release());
  const auto node = [&](const std::string& rank) {
    return std::vector<std::string>{kSherdrun,
                                    "--nnodes=2",
                                    "--node_rank=" + rank,
                                    "--master_addr=127.0.0.1",
                                    "--master_port=" + number,
                                    "--nproc_per_node=2",
                                    kRankProgram,
                                    "store"};
  };
  Program first(node("0"));
  Program second(node("1"));
  const Result a = first.wait(), b = second.wait();
  EXPECT_EQ(a.exit_code, 0) << a.err;
  EXPECT_EQ(b.exit_code, 0) << b.err;
  EXPECT_EQ(a.out, "[rank 0] met 3\n");
}

// ---- the program and its arguments

TEST(Command, ArgumentsPassUntouched) {
  const std::vector<std::string> tail{
      "--nproc_per_node=3", "--standalone", "--", "-h", "", "a b", "x=[1,2]"};
  for (const bool mark : {false, true}) {
    std::vector<std::string> arguments{"--nproc_per_node=1"};
    if (mark) arguments.push_back("--");
    arguments.insert(arguments.end(), {"sh", "-c", "for a; do echo \"<$a>\"; done", "sh"});
    arguments.insert(arguments.end(), tail.begin(), tail.end());
    const Result r = sherdrun(arguments);
    std::vector<std::string> expected;
    for (const std::string& a : tail) expected.push_back("<" + a + ">");
    EXPECT_EQ(lines_of(r.out), expected) << r.err;
  }
}

TEST(Command, IsSearchedInPathOnlyWithoutASlash) {
  const std::string folder = new_folder();
  std::ofstream(folder + "/mine") << "#!/bin/sh\necho ran\n";
  chmod((folder + "/mine").c_str(), 0755);
  EXPECT_EQ(sherdrun({"mine"}, {.environment = {{"PATH", "/bin:" + folder}}}).out, "ran\n");
  EXPECT_EQ(sherdrun({folder + "/mine"}).out, "ran\n");
  EXPECT_EQ(sherdrun({"mine"}).exit_code, 2);
}

// ---- R-010, T-31: what is refused, in one line, with exit code 2, before any rank

void expect_refused(const std::vector<std::string>& arguments, const std::string& why) {
  const Result r = sherdrun(arguments);
  EXPECT_EQ(r.exit_code, 2) << why;
  EXPECT_EQ(r.out, "") << why;
  EXPECT_EQ(lines_of(r.err).size(), 1u) << r.err;
  EXPECT_NE(r.err.find(why), std::string::npos) << r.err;
}

TEST(Refusal, R_010_Programs) {
  const std::string folder = new_folder();
  std::ofstream(folder + "/text") << "no program\n";
  expect_refused({"--nproc_per_node=2", "/no/such/program"}, "No such file");
  expect_refused({"no-such-program-at-all"}, "in no folder of PATH");
  expect_refused({folder}, "it is a folder");
  expect_refused({""}, "name is empty");
  if (geteuid() != 0 || access((folder + "/text").c_str(), X_OK) != 0) {
    expect_refused({folder + "/text"}, "not executable");
  }
  expect_refused({}, "no program to run");
  expect_refused({"--nproc_per_node=2"}, "no program to run");
}

TEST(Refusal, R_010_AFileThatTheKernelCannotRunIsNamed) {
  const std::string path = new_folder() + "/broken";
  std::ofstream(path) << "no program\n";
  chmod(path.c_str(), 0755);
  const Result r = sherdrun({"--nproc_per_node=2", path});
  EXPECT_EQ(r.exit_code, 1);
  EXPECT_NE(r.err.find("cannot execute " + path), std::string::npos) << r.err;
}

TEST(Refusal, T_31_Flags) {
  expect_refused({"--nporc=2", "true"}, "unknown flag --nporc=2");
  expect_refused({"--nporc=2", "true"},
                 "--nproc_per_node, --backend, --nnodes");  // the list of what exists
  expect_refused({"--nproc_per_node=unknown", "true"}, "a number from 1, auto, cpu or gpu");
  for (const char* n : {"0", "-1", "2.5", "2x", "99999999999"}) {
    expect_refused({"--nproc_per_node=" + std::string(n), "true"}, n);
  }
  expect_refused({"--nproc_per_node"}, "--nproc_per_node");
  expect_refused({"--nnodes=two", "true"}, "--nnodes");
  expect_refused({"--nnodes=0", "true"}, "--nnodes");
  expect_refused({"--node_rank=1", "true"}, "--node_rank=1");
  expect_refused({"--master_port=65536", "true"}, "--master_port");
  expect_refused({"--nnodes=2", "true"}, "--node_rank");
  expect_refused({"--nnodes=2", "--node_rank=2", "--master_addr=a", "true"}, "--node_rank=2");
  expect_refused({"--standalone", "--nnodes=2", "true"}, "--standalone is for one node");
  expect_refused({"--standalone", "--master_port=2000", "true"}, "--standalone chooses");
}

TEST(Refusal, T_31_NumbersThatAreNone) {
  for (const char* flag :
       {"--start_timeout=nan", "--start_timeout=1e99", "--monitor_interval=nan",
        "--rdzv_conf=join_timeout=99999999999999999999", "--rdzv_conf=last_call_timeout=2000000000",
        "--nproc_per_node=2000", "--nnodes=2000000000", "--node_rank=99999999999999999999",
        "--max_restarts=18446744073709551615", "--master_port=99999999999999999999",
        "--nproc_per_node=", "--nnodes=", "--redirects=5:1", "--tee=1:3",
        "--rdzv_endpoint=host:99999"}) {
    const std::string text = flag;
    expect_refused({text, "true"}, text.substr(2, text.find('=') - 2));
  }
}

TEST(Refusal, AnEmptyValueTakesNoOtherWord) {
  for (const char* flag : {"--log_dir=", "--role=", "--local_addr="}) {
    const Result r = sherdrun({flag, "sh", "-c", "echo ran"});
    EXPECT_EQ(r.exit_code, 0) << r.err;
    EXPECT_EQ(r.out, "ran\n") << flag;
  }
  // The program's own words stay as they are.
  EXPECT_EQ(sherdrun({"echo", "--role=", "--nnodes=", "--help"}).out, "--role= --nnodes= --help\n");
}

TEST(Refusal, AScriptWhoseInterpreterIsMissing) {
  const std::string path = new_folder() + "/script";
  std::ofstream(path) << "#! /no/such/shell -e\necho ran\n";
  chmod(path.c_str(), 0755);
  const Result r = sherdrun({path});
  EXPECT_EQ(r.exit_code, 1);
  EXPECT_NE(r.err.find("asks for /no/such/shell, which is not there"), std::string::npos) << r.err;
}

TEST(Refusal, AFolderThatIsGoneMattersNot) {
  const std::string folder = new_folder() + "/gone", program = std::filesystem::absolute(kSherdrun);
  const Result r = run({"/bin/sh", "-c",
                        "mkdir " + folder + "; cd " + folder + "; rmdir " + folder + "; exec " +
                            program + " /bin/echo ran"});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  EXPECT_EQ(r.out, "ran\n");
}

TEST(Help, WinsOverMistakesAndIsWrittenOrFails) {
  EXPECT_EQ(sherdrun({"--nproc_per_node=x", "--help"}).exit_code, 0);
  const Result r = run({"/bin/sh", "-c", std::string(kSherdrun) + " --help >/dev/full"});
  EXPECT_EQ(r.exit_code, 1);
  EXPECT_NE(r.err.find("cannot write to stdout"), std::string::npos) << r.err;
}

TEST(Help, NamesEveryFlag) {
  const Result r = sherdrun({"--help"});
  EXPECT_EQ(r.exit_code, 0);
  EXPECT_EQ(r.err, "");
  for (const char* flag :
       {"--standalone", "--nproc_per_node", "--nnodes", "--node_rank", "--master_addr",
        "--master_port", "--nproc-per-node", "--rdzv_backend", "--rdzv_endpoint", "--rdzv_id",
        "--max_restarts", "--monitor_interval", "--log_dir", "--redirects", "--tee", "--no_python",
        "--role", "--start_timeout"}) {
    EXPECT_NE(r.out.find(flag), std::string::npos) << flag;
  }
}

// ---- T-28: the port

TEST(StorePort, R_006_IsInheritedListeningByRank0Alone) {
  for (const char* flag : {"--standalone", "--nnodes=1"}) {
    const Result r = sherdrun({flag, "--nproc_per_node=5", kRankProgram, "store"});
    EXPECT_EQ(r.exit_code, 0) << r.err;
    EXPECT_EQ(r.out, "[rank 0] met 4\n");
  }
}

TEST(StorePort, IsTheOnlyOpenFileARankIsGiven) {
  const Result r = sherdrun({"--nproc_per_node=3", kRankProgram, "fds"});
  EXPECT_EQ(lines_of(r.out).size(), 1u) << r.out;
  EXPECT_EQ(r.out.find("[rank 0] open 64 socket:"), 0u) << r.out;
}

TEST(StorePort, AnOuterLaunchersSocketDoesNotPassThrough) {
  const Result r = sherdrun({"--nproc_per_node=2", "sh", "-c", "echo fd=$SHERD_STORE_FD"},
                            {.environment = {{"SHERD_STORE_FD", "3"}}});
  EXPECT_NE(r.out.find("[rank 1] fd=\n"), std::string::npos) << r.out;
}

TEST(StorePort, T_28_TwoJobsAtOnce) {
  const std::vector<std::string> command{kSherdrun, "--nproc_per_node=3", kRankProgram, "store"};
  Program a(command), b(command);
  EXPECT_EQ(a.wait().out, "[rank 0] met 2\n");
  EXPECT_EQ(b.wait().out, "[rank 0] met 2\n");
}

TEST(StorePort, ANamedOneIsTaken) {
  TakenPort port;
  const std::string number = std::to_string(port.release());
  const Result r =
      sherdrun({"--nproc_per_node=2", "--master_port=" + number, kRankProgram, "store"});
  EXPECT_EQ(r.out, "[rank 0] met 1\n") << r.err;
}

TEST(StorePort, T_28_InUseIsAnErrorThatNamesIt) {
  TakenPort port;
  const Result r = sherdrun({"--nproc_per_node=2", "--master_port=" + port.port(), "echo", "ran"});
  EXPECT_EQ(r.exit_code, 1);
  EXPECT_EQ(r.out, "");
  EXPECT_NE(r.err.find("port " + port.port() + " on 127.0.0.1 is in use"), std::string::npos)
      << r.err;
}

TEST(StorePort, T_28_AnAddressOfAnotherMachineIsAnError) {
  // 192.0.2.0/24 is for documentation: no machine has it.
  const Result r = sherdrun({"--master_addr=192.0.2.1", "echo", "ran"});
  EXPECT_EQ(r.exit_code, 1);
  EXPECT_EQ(r.out, "");
  EXPECT_NE(r.err.find("192.0.2.1 is not an address of this machine"), std::string::npos) << r.err;
  const Result s = sherdrun({"--master_addr=no.such.host.invalid", "echo", "ran"});
  EXPECT_EQ(s.exit_code, 1);
  EXPECT_NE(s.err.find("no known host name"), std::string::npos) << s.err;
}

}  // namespace
}  // namespace sherd::dist
