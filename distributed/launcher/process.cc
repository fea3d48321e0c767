#include "distributed/launcher/process.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "core/error.h"

namespace sherd::dist {
namespace {

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> p;
  for (const std::string& text : texts) p.push_back(const_cast<char*>(text.c_str()));
  p.push_back(nullptr);
  return p;
}

// In the child, between fork and exec. Returns only if exec failed, with errno.
void become(const ProcessSpec& spec, pid_t parent, char* const* argv, char* const* environment) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, spec.death_signal);
  if (getppid() != parent) _exit(127);  // it had died before prctl
  const int from[] = {spec.in, spec.out, spec.err};
  for (int to = 0; to < 3; ++to) {
    if (from[to] != to && dup2(from[to], to) < 0) return;
  }
  if (spec.inherited >= 0) fcntl(spec.inherited, F_SETFD, 0);
  for (int s : {SIGPIPE, SIGXFSZ}) signal(s, SIG_DFL);
  sigprocmask(SIG_SETMASK, &spec.signal_mask, nullptr);
  execve(spec.path.c_str(), argv, environment);
}

// Of an existing file, what is not there is the program that its first line names.
std::string why_not_executed(const std::string& path, int error) {
  if (error == ENOEXEC)
    return "it is neither a program for this machine nor a script with a #! line";
  std::string line;
  std::ifstream file(path);
  if (error != ENOENT || !std::getline(file, line) || !line.starts_with("#!"))
    return strerror(error);
  const size_t begin = std::min(line.find_first_not_of(" \t", 2), line.size());
  const std::string program = line.substr(begin, line.find_first_of(" \t\r", begin) - begin);
  return concat("its first line asks for ", program, ", which is not there");
}

}  // namespace

pid_t start_process(const ProcessSpec& spec) {
  const std::vector<char*> argv = pointers(spec.argv);
  const std::vector<char*> environment = pointers(spec.environment);
  int report[2];  // closed by a successful exec
  if (pipe2(report, O_CLOEXEC) != 0) fail("[launch] cannot make a pipe: ", strerror(errno));
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid == 0) {
    become(spec, parent, argv.data(), environment.data());
    const int error = errno;
    [[maybe_unused]] const ssize_t n = write(report[1], &error, sizeof error);
    _exit(127);
  }
  const int fork_error = errno;
  close(report[1]);
  int error = 0;
  ssize_t n = 0;
  if (pid > 0) {
    while ((n = read(report[0], &error, sizeof error)) < 0 && errno == EINTR) {
    }
  }
  close(report[0]);
  if (pid < 0) fail("[launch] cannot start a process: ", strerror(fork_error));
  if (n > 0) {
    waitpid(pid, nullptr, 0);
    fail("[launch] cannot execute ", spec.path, ": ", why_not_executed(spec.path, error));
  }
  return pid;
}

std::vector<pid_t> child_processes() {
  std::vector<pid_t> children;
  std::error_code error;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task", error)) {
    std::ifstream list(task.path() / "children");
    for (pid_t pid; list >> pid;) children.push_back(pid);
  }
  return children;
}

}  // namespace sherd::dist
