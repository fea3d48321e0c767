// Starting a rank's process, and finding those that ranks left behind.
#pragma once
#include <signal.h>
#include <sys/types.h>

#include <string>
#include <vector>

namespace sherd::dist {

struct ProcessSpec {
  std::string path;  // of an executable file
  std::vector<std::string> argv;
  std::vector<std::string> environment;  // "NAME=value"
  int in = 0, out = 1, err = 2;          // what become the child's 0, 1 and 2
  int inherited = -1;                    // one more fd for the child, under the same number
  sigset_t signal_mask = {};             // the child's
  int death_signal = SIGKILL;            // to the child, when this thread ends
};

// The leader of a new process group, which is told when this thread ends. SIGPIPE and SIGXFSZ are
// at their defaults in it. Throws Error if the program cannot be executed. Safe after fork: between
// fork and exec only async-signal-safe functions run.
pid_t start_process(const ProcessSpec& spec);

// This process's children, zombies too; orphans of its descendants come here if it is a subreaper.
std::vector<pid_t> child_processes();

}  // namespace sherd::dist
