// Job: one run of all ranks of this node, from their start until nothing of them is left. See
// [Note: how a job ends] in launcher.h.
#pragma once
#include <chrono>
#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "distributed/fd.h"
#include "distributed/launcher/failure.h"
#include "distributed/launcher/launcher.h"
#include "distributed/launcher/lines.h"
#include "distributed/launcher/output_queue.h"
#include "distributed/launcher/signals.h"

namespace sherd::dist {

struct RankSpec {
  int rank;
  int local_rank;
  std::vector<std::string> environment;
  int store_fd = -1;  // what it inherits
  Fd log[2] = {};     // of stdout and stderr
  bool is_shown[2] = {true, true};
  std::string log_path = {};  // for the summary
};

// What the other nodes have to do with it. Empty on a single one.
struct JobHooks {
  int fd = -1;                         // readable when there may be a reason to stop
  std::function<bool()> is_over = {};  // is there?
  std::function<void(const std::vector<RankEnd>&)> on_failure = {};  // once it is known who failed
};

class Job {
 public:
  Job(const LaunchOptions& options, std::string path, std::vector<std::string> argv,
      const SignalGuard& signals, JobHooks hooks = {});
  ~Job();  // kills what is left
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  void start(RankSpec spec);
  // Between starts: a signal to end has come, those that were started are being ended.
  bool is_interrupted();
  void run();  // after all were started, until nothing of them is left

  const std::vector<RankEnd>& ends() const {
    return ends_;
  }                                                       // in the order in which they were seen
  int interrupted_by() const { return interrupted_by_; }  // a signal to the launcher, or 0
  bool is_usage_error() const;  // of all ranks, who have said so themselves
  void say(std::string_view text);
  void flush();  // until all is written; after an interrupt, a second at most

 private:
  using Clock = std::chrono::steady_clock;

  enum class Phase {
    kRunning,
    kSettling,  // a rank has failed: who else does?
    kStopping,  // SIGTERM was sent to all that is left
    kKilling,   // SIGKILL was
  };

  struct Stream {
    int to;         // 1 or 2
    int from = -1;  // the read end of the rank's pipe; -1: inherited, or at its end
    int log = -1;   // the file that keeps it
    bool is_shown = true;
    LineSplitter splitter = {};
  };

  // Its zombie is kept until the job ends, so that its pid goes on naming its process group.
  struct Rank {
    int rank;
    int local_rank;
    std::string log_path;
    pid_t pid = 0;
    Stream out{.to = 1};
    Stream err{.to = 2};
    bool is_raw = false;  // stderr is passed on as it comes
    ErrorTail tail = {};
    std::vector<std::string> held = {};  // lines of stderr not written yet, see [Note: held lines]
    Clock::time_point held_since = {};
    bool ended = false;
    bool failed = false;
    bool usage_error = false;
  };

  void step();
  int poll_timeout() const;
  void take_signals();
  void keep_time();

  void read_stream(Rank& rank, Stream& stream, size_t most);
  void finish_streams(Rank& rank);
  void take_line(Rank& rank, int to, std::string_view line);
  void write_line(const Rank& rank, int to, std::string_view line);
  void release_held(Rank& rank);
  void show_last_words();

  void check_ranks();
  void rank_ended(Rank& rank, int exit_code, int signal);
  Clock::time_point settled_at() const;
  void interrupt(int signal);
  void stop_ranks();
  void kill_ranks();
  void signal_groups(int signal);
  void suspend();
  bool tend_orphans();
  bool all_ended() const;
  bool is_gone();

  std::string prefix(const Rank& rank) const;

  const LaunchOptions options_;
  const std::string path_;
  const std::vector<std::string> argv_;
  const SignalGuard& signals_;
  const JobHooks hooks_;
  const std::vector<pid_t> children_before_;
  const Clock::time_point started_ = Clock::now();

  std::vector<Rank> ranks_;  // by local rank
  OutputQueue output_;
  bool redraws_ = false;  // rank 0 may have left half a line on the terminal
  bool has_lost_log_ = false, has_lost_output_ = false;  // which was said
  bool is_half_line_ = false;  // what was passed on to stderr as it came does not end a line

  Phase phase_ = Phase::kRunning;
  Clock::time_point first_failure_, stop_until_;
  int interrupted_by_ = 0;
  std::vector<RankEnd> ends_;  // in the order in which they were seen
  std::set<pid_t> asked_to_stop_;
};

}  // namespace sherd::dist
