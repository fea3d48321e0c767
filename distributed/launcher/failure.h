// How ranks ended, which of them is the cause, and what to say about it. Pure functions.
#pragma once
#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

namespace sherd::dist {

struct RankEnd {
  int rank = 0;
  int local_rank = 0;
  pid_t pid = 0;
  int exit_code = 0;  // where signal is 0
  int signal = 0;
  double seconds = 0;      // after the start
  bool stopped = false;    // ended after the launcher had told it to: no failure
  std::string error = {};  // its own last error in one line, or empty
  std::string log = {};    // the file that keeps what it said, stderr before stdout; or empty

  bool failed() const { return !stopped && (exit_code != 0 || signal != 0); }
};

inline bool is_usage_error(const RankEnd& end) { return end.signal == 0 && end.exit_code == 2; }

// Those that failed, the cause first. `ends` is in the order in which the ends were seen.
std::vector<RankEnd> failures_by_cause(std::vector<RankEnd> ends);

// "rank 1: killed by SIGKILL" or "rank 2: exit code 3: its error", and below it, indented, where.
std::string describe(const RankEnd& end, const std::string& host);

// The same of several, which ran where `host_of` says: of eight, and how many more there are. Who
// ended as another did stands below it. Of the first the log is named too.
std::string describe_all(const std::vector<RankEnd>& ends,
                         const std::function<std::string(const RankEnd&)>& host_of);

// What the launcher exits with when this is the cause.
int launcher_exit_code(const RankEnd& cause);

std::string signal_name(int signal);  // "SIGKILL"

}  // namespace sherd::dist
