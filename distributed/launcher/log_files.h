// LogFiles: where the output of this node's ranks is kept, a file a rank and stream.
//
//     LogFiles logs(options);                      // makes <log_dir>/<run_id>_<random>
//     Fd file = logs.open(attempt, local_rank, 2); // .../attempt_0/3/stderr.log; -1: not kept
#pragma once
#include <string>

#include "distributed/fd.h"
#include "distributed/launcher/launcher.h"

namespace sherd::dist {

class LogFiles {
 public:
  // Throws Error if log_dir is no folder and cannot become one. Makes nothing if nothing is kept.
  explicit LogFiles(const LaunchOptions& options);

  bool any() const { return !folder_.empty(); }
  const std::string& folder() const { return folder_; }
  bool is_shown(int local_rank, int stream) const;  // on the terminal too
  Fd open(int attempt, int local_rank, int stream) const;
  // What open() opens; empty: not kept.
  std::string path(int attempt, int local_rank, int stream) const;

 private:
  StreamChoice redirects_, tee_;
  std::string folder_;
};

}  // namespace sherd::dist
