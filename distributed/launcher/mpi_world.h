// MpiWorld: an MPI job of this machine, of which this process's children are the ranks.
//
//     MpiWorld world(4, mask);
//     child's environment: its own, and world.environment(rank)     // MPI_Init finds its peers
//
// [Note: keepers] mpirun starts a keeper a rank, a shell that writes down the environment that
// mpirun gave it and then waits. The rank itself is a child of the launcher, as with any backend,
// in the keeper's environment, by which MPI takes it for mpirun's process. So whatever the launcher
// does with ranks (output, signals, causes of failures, restarts) is the same code, and mpirun's
// own messages and its way of ending jobs do not get between. When this process ends, however it
// does, the keepers' pipe closes, they end, and so does mpirun.
#pragma once
#include <signal.h>
#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

#include "distributed/fd.h"

namespace sherd::dist {

class MpiWorld {
 public:
  // Returns when mpirun has started all, some tenths of a second later, or when `stop()`: then
  // there are no environments. `mask`: of signals, mpirun's. Error: mpirun is not installed, or
  // what it said before it ended.
  explicit MpiWorld(int ranks, const sigset_t& mask = {}, const std::function<bool()>& stop = {});
  ~MpiWorld();  // the ranks should have ended: ends mpirun, and waits for it
  MpiWorld(const MpiWorld&) = delete;
  MpiWorld& operator=(const MpiWorld&) = delete;

  // "NAME=value", of those that are MPI's.
  const std::vector<std::string>& environment(int rank) const { return environments_[rank]; }

  static bool is_installed();  // mpirun, in PATH

 private:
  void read_environments(int ranks, const std::function<bool()>& stop);
  void end();

  std::string folder_;  // where keepers write
  Fd pipe_;             // the keepers wait for its end
  pid_t mpirun_ = 0;
  std::vector<std::vector<std::string>> environments_;
};

}  // namespace sherd::dist
