#include "tests/launcher/program.h"

#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

extern char** environ;

namespace sherd::dist {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> p;
  for (const std::string& text : texts) p.push_back(const_cast<char*>(text.c_str()));
  p.push_back(nullptr);
  return p;
}

std::vector<std::string> merged_environment(std::map<std::string, std::string> set) {
  // What the machine's own environment may hold must not decide a test.
  for (const char* name : {"RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID",
                           "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "SHERD_STORE_TOKEN"}) {
    set.emplace(name, "");
  }
  std::vector<std::string> environment;
  for (char** entry = environ; *entry; ++entry) {
    if (!set.contains(std::string(*entry, strcspn(*entry, "=")))) environment.emplace_back(*entry);
  }
  for (const auto& [name, value] : set) {
    if (!value.empty()) environment.push_back(name + "=" + value);
  }
  return environment;
}

}  // namespace

Program::Program(const std::vector<std::string>& argv, const ProgramOptions& options)
    : folder_(new_folder()), started_(std::chrono::steady_clock::now()) {
  const std::string out = folder_ + "/out", err = folder_ + "/err";
  const std::vector<std::string> environment = merged_environment(options.environment);
  const std::vector<char*> args = pointers(argv), variables = pointers(environment);
  pid_ = fork();
  if (pid_ == 0) {
    if (options.terminal >= 0) {
      setsid();
      ioctl(options.terminal, TIOCSCTTY, 0);
      for (int fd : {0, 1, 2}) dup2(options.terminal, fd);
    } else {
      dup2(open(options.in.c_str(), O_RDONLY), 0);
      dup2(open(out.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600), 1);
      dup2(options.merge ? 1 : open(err.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600), 2);
    }
    close_range(3, ~0U, 0);
    execve(args[0], args.data(), variables.data());
    perror(args[0]);  // tests start in their runfiles folder, or are run in bazel-bin
    _exit(127);
  }
}

Program::~Program() {
  if (waited_) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

std::string Program::out() const { return read_file(folder_ + "/out"); }

Result Program::wait(double deadline_s) {
  int status = 0;
  const bool ended = soon([&] { return waitpid(pid_, &status, WNOHANG) == pid_; }, deadline_s);
  Result result;
  result.seconds = seconds_since(started_);
  result.out = out();
  result.err = read_file(folder_ + "/err");
  if (!ended) {
    ADD_FAILURE() << "did not end in " << deadline_s << " s\n" << result.out << result.err;
    return result;
  }
  waited_ = true;
  if (WIFEXITED(status)) result.exit_code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) result.signal = WTERMSIG(status);
  return result;
}

bool has_mpirun() { return access(kMpirun, X_OK) == 0; }

Result run(const std::vector<std::string>& argv, const ProgramOptions& options) {
  return Program(argv, options).wait();
}

std::string new_folder() {
  std::string folder = testing::TempDir() + "launcherXXXXXX";
  if (!mkdtemp(folder.data())) ADD_FAILURE() << "mkdtemp " << folder << ": " << strerror(errno);
  return folder;
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::stringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

int count(const std::string& text, const std::string& part) {
  int n = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

bool soon(const std::function<bool()>& condition, double seconds) {
  const auto start = std::chrono::steady_clock::now();
  while (!condition()) {
    if (seconds_since(start) > seconds) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

char state_of(pid_t pid) {
  const std::string stat = read_file("/proc/" + std::to_string(pid) + "/stat");
  const size_t name_end = stat.rfind(')');
  return name_end == std::string::npos ? 0 : stat[name_end + 2];
}

bool is_running(pid_t pid) {
  const char state = state_of(pid);
  return state != 0 && state != 'Z' && state != 'X';
}

std::vector<pid_t> pids_in(const std::string& folder) {
  std::vector<pid_t> pids;
  for (const auto& file : std::filesystem::directory_iterator(folder)) {
    std::ifstream stream(file.path());
    if (pid_t pid; stream >> pid) pids.push_back(pid);
  }
  return pids;
}

}  // namespace sherd::dist
