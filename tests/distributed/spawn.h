// Ranks for tests, over a real backend: auto, that is shm, or the one of SHERD_BACKEND, or one that
// is asked for.
//
//     run_ranks(2, [](int rank) {                 // threads, each with a Context of its own
//       Tensor x = full({4}, rank + 1.0);
//       dist::all_reduce(x);
//       EXPECT_EQ(x.data<float>()[0], 3);
//     });
//     run_processes(2, [](int rank) { ... });     // the same, forked, with a TCP store
//
// The default group is there when the function starts and is destroyed when it returns. What a rank
// throws is thrown on with the rank in front, the first in time first: "rank 1: ...". A failed
// EXPECT fails the test in both.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "distributed/distributed.h"

namespace sherd::dist {

struct RankOptions {
  Milliseconds timeout = std::chrono::seconds(20);  // the default group's
  bool init = true;                                 // make and destroy the default group
  std::string backend = "auto";
};

// Kernels compute on one thread each meanwhile.
void run_ranks(int ranks, const std::function<void(int rank)>& f, const RankOptions& options = {});

struct ProcessOptions {
  Milliseconds timeout = std::chrono::seconds(20);
  bool init = true;  // if not: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, ... are set all the same
  Milliseconds kill_after = std::chrono::seconds(50);
  bool may_fail = false;         // return the results, and throw nothing, if ranks fail
  std::string backend = "auto";  // mpi, also by SHERD_BACKEND: mpirun starts an MPI job for them
};

struct ProcessResult {
  int exit_code = 0;   // 1: threw, or an EXPECT failed
  int signal = 0;      // that ended it, if any
  std::string output;  // stdout and stderr
  bool ok() const { return exit_code == 0 && signal == 0; }
};

// Forks. The caller must have no other threads at that moment; ranks compute on one thread each, so
// that a pool of OpenMP threads in the caller, which does not survive a fork, is not missed.
std::vector<ProcessResult> run_processes(int ranks, const std::function<void(int rank)>& f,
                                         const ProcessOptions& options = {});

// Why there are no tests over MPI here; empty: there are.
std::string why_no_mpi();

}  // namespace sherd::dist
