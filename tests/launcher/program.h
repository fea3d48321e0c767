// Program: starts a program in a test, with its output in files, and says how it ended.
//
//     Result r = run({kSherdrun, "--nproc_per_node=2", "sh", "-c", "echo $RANK"});
//     EXPECT_EQ(r.exit_code, 0) << r.err;
#pragma once
#include <sys/types.h>

#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace sherd::dist {

inline const char* const kSherdrun = "tools/sherdrun";
inline const char* const kRankProgram = "tests/launcher/rank_program";
inline const char* const kSelfLauncher = "tests/launcher/self_launcher";
inline const char* const kMpirun = "/usr/bin/mpirun";

bool has_mpirun();

struct Result {
  int exit_code = -1;  // -1: killed by `signal`
  int signal = 0;
  std::string out, err;
  double seconds = 0;
};

struct ProgramOptions {
  std::map<std::string, std::string> environment = {};  // an empty value unsets
  bool merge = false;                                   // stderr goes where stdout goes
  std::string in = "/dev/null";
  int terminal = -1;  // stdin, stdout and stderr, and the controlling terminal
};

class Program {
 public:
  explicit Program(const std::vector<std::string>& argv, const ProgramOptions& options = {});
  ~Program();  // kills it, if it was not waited for
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  pid_t pid() const { return pid_; }
  std::string out() const;  // so far
  Result wait(double deadline_s = 50);

 private:
  std::string folder_;
  pid_t pid_;
  bool waited_ = false;
  std::chrono::steady_clock::time_point started_;
};

Result run(const std::vector<std::string>& argv, const ProgramOptions& options = {});

std::string new_folder();
std::string read_file(const std::string& path);
std::vector<std::string> lines_of(const std::string& text);
int count(const std::string& text, const std::string& part);

// Whether it holds within the time.
bool soon(const std::function<bool()>& condition, double seconds = 10);

char state_of(pid_t pid);    // as ps shows it; 0 if there is no such process
bool is_running(pid_t pid);  // and is no zombie
std::vector<pid_t> pids_in(const std::string& folder);  // from files that hold one pid each

}  // namespace sherd::dist
