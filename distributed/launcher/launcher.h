// The launcher: runs a program as the ranks of a job, and is what tools:sherdrun is made of.
//
//     LaunchOptions options{.nproc_per_node = 4};
//     int code = launch(options, {"./train", "--steps=100"});      // blocks until all has ended
//
// A program that starts its own ranks, so that `./train --nproc_per_node=4` is enough:
//
//     int main(int argc, char** argv) {
//       int nproc = ...;                                            // from the flags
//       if (auto code = launch_self(nproc, argc, argv)) return *code;
//       dist::init_process_group({.backend = "gloo"});              // a rank, however started
//
// What a rank finds in its environment, besides all that the launcher's own held:
//
//     RANK, WORLD_SIZE                0 ... WORLD_SIZE - 1, over all nodes
//     LOCAL_RANK, LOCAL_WORLD_SIZE    the same on this node
//     GROUP_RANK, GROUP_WORLD_SIZE    this node among the nodes
//     ROLE_NAME, ROLE_RANK, ROLE_WORLD_SIZE     torchrun's; all ranks have one role
//     MASTER_ADDR, MASTER_PORT        where rank 0 serves the store
//     SHERD_STORE_TOKEN               the store's secret: made here for a job on one node, unless
//                                     it was set; on several, what was set
//     TORCHELASTIC_RESTART_COUNT, TORCHELASTIC_MAX_RESTARTS, TORCHELASTIC_RUN_ID
//     TORCHELASTIC_USE_AGENT_STORE    False: MASTER_PORT is rank 0's
//     OMP_NUM_THREADS                 max(1, cores of this node / ranks on it), unless it was set
//     SHERD_LAUNCHED                  1
//     SHERD_BACKEND                   LaunchOptions::backend, if it was given
//     OMPI_..., PMIX_...              mpirun's, with backend mpi
//     SHERD_STORE_FD                  rank 0 only: an inherited socket that already listens on
//                                     MASTER_PORT. Whoever serves the store accepts on it (and sets
//                                     close-on-exec), so no other job can take the port in between.
//
// Standard input: rank 0 has the launcher's unless that is a terminal; the others have /dev/null.
//
// [Note: how a job ends]
// Each rank is a direct child of the launcher and leads a process group of its own.
//  * A rank fails (exit code other than 0, or a signal). For `settle` the launcher watches who else
//    fails, since peers of a dead rank report a broken connection and may be seen first. Then the
//    others' groups get SIGTERM, and after `grace` SIGKILL. The summary on stderr begins with the
//    cause: a death by signal before exit codes, an error that names another failed rank ("rank 1
//    left") after that rank, else the earliest.
//  * SIGINT, SIGTERM or SIGHUP to the launcher: the same at once; a second one kills at once.
//  * Exit code 2 is a usage error: what all ranks say alike is shown once, with no summary.
//  * After a failure, max_restarts times, all ranks are started again together, with the same
//    arguments and TORCHELASTIC_RESTART_COUNT one higher; they go on from their last checkpoint.
//  * On several nodes, coordinator.h says when the job begins and ends, and all nodes show the same
//    summary. If node 0 ends, all do.
// In every case, success included, launch() returns only when no process that the ranks started is
// left, daemons too: the launcher is their subreaper. If the launcher itself is killed by SIGKILL,
// the kernel kills the ranks (PR_SET_PDEATHSIG), but not what a rank had started.
#pragma once
#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"

namespace sherd::dist {

enum class LaunchOutput {
  // Each line of rank i is written whole, as "[rank i] line", to the stream it came from. A line
  // ends at \n, \r or \r\n. What a rank left without an end gets one.
  kPrefixed,
  // The job speaks as one program: rank 0 on this node has the launcher's own stdout (a terminal
  // stays one) and its stderr is passed on as it comes; the others' lines are prefixed. Error lines
  // that several failed ranks have in common are shown once.
  kProgram,
};

enum class RdzvBackend {
  kStatic,  // each node says its node_rank; node 0 is the one with 0
  kC10d,    // ranks of nodes as they come; node 0 is the machine that master_addr names
};

// Of a rank's stdout (1) and stderr (2): none, either or both; for all ranks of this node, but for
// those (by local rank) that are named.
struct StreamChoice {
  int all = 0;
  std::map<int, int> by_local_rank = {};

  bool has(int local_rank, int stream) const {
    const auto it = by_local_rank.find(local_rank);
    return ((it == by_local_rank.end() ? all : it->second) & stream) != 0;
  }
  bool any() const { return all != 0 || !by_local_rank.empty(); }
};

struct LaunchOptions {
  int nproc_per_node =
      1;              // ranks on this node; a single one inherits stdout and stderr, unprefixed
  int nnodes = 1;     // each node runs a launcher with the same options but node_rank
  int min_nodes = 0;  // 0: as nnodes; else fewer are enough (kC10d alone)
  int node_rank = 0;  // 0 ... nnodes - 1 (kStatic)
  std::string master_addr = {};  // of node 0; may be left out on one node, which means 127.0.0.1
  int master_port = 0;           // 0: one that is free; several nodes must name one
  // Of collectives: SHERD_BACKEND for the ranks. Empty: what SHERD_BACKEND is here. With mpi, ranks
  // are mpirun's to MPI (docs/mpi.md), on one node.
  std::string backend = {};
  LaunchOutput output = LaunchOutput::kPrefixed;
  std::chrono::milliseconds settle{300};
  std::chrono::milliseconds grace{3000};

  int max_restarts = 0;
  std::string run_id = "none";  // of the job, the same on all nodes
  std::string role = "default";
  RdzvBackend rdzv_backend = RdzvBackend::kStatic;
  std::chrono::milliseconds monitor_interval{100};   // how often nodes tell each other
  std::chrono::milliseconds start_timeout{600'000};  // for all nodes to come
  std::chrono::milliseconds last_call{30'000};   // from min_nodes to the start without the others
  std::chrono::milliseconds lost_after{15'000};  // a node that is silent for so long is gone
  std::string local_addr = {};                   // this node's name in messages

  // Output in files: <log_dir>/<run_id>_<random>/attempt_<n>/<local rank>/stdout.log, stderr.log.
  // Redirected streams go there alone, those of `tee` also to the terminal. log_dir empty: a new
  // folder in /tmp, which the launcher names; log_dir alone: tee of both.
  std::string log_dir = {};
  StreamChoice redirects = {}, tee = {};
  std::string line_prefix = "[rank ${rank}] ";  // also ${local_rank}, ${role_name}
};

// Options with which no job can be run.
struct BadLaunchOptions : Error {
  using Error::Error;
};

// More processes are a mistake, or more than the system has room for.
inline constexpr int kMaxRanksPerNode = 1024;

// Runs `command` (the program, looked up in PATH if it has no slash, and its arguments) as
// nproc_per_node ranks. Returns 0 if all ranks did; the exit code of the failed rank that is the
// cause (1 for codes above 125, which shells give a meaning); 128 + the signal that ended it or the
// launcher. Throws Error, with no rank started, on options that contradict (BadLaunchOptions, as
// for a log_dir that cannot be made), a program that is missing or not executable, a port that is
// in use, and backend mpi where there is no mpirun.
//
// Call it before the process starts threads: it forks, blocks signals and adopts orphans meanwhile.
int launch(const LaunchOptions& options, const std::vector<std::string>& command);

// In a process that is no rank yet: runs this same program with the same arguments as
// `nproc_per_node` ranks on this node (LaunchOutput::kProgram) and returns the exit code for main.
// In a rank: nothing, go on. A rank is a process with RANK or WORLD_SIZE (sherdrun, torchrun, by
// hand), OMPI_COMM_WORLD_RANK (mpirun), or one of several tasks of a Slurm step (SLURM_PROCID,
// SLURM_STEP_NUM_TASKS). Errors are printed and give exit code 1 (2 for nproc_per_node < 1).
std::optional<int> launch_self(int nproc_per_node, int argc, char** argv);

// The value of --nproc_per_node: a number from 1 to kMaxRanksPerNode, "cpu" (cores that this
// process may run on), "gpu" (NVIDIA devices, as CUDA_VISIBLE_DEVICES leaves them; throws if there
// are none), "auto" (gpu if there are any, else cpu). Throws Error on anything else.
int parse_nproc_per_node(std::string_view text);

// The value of --redirects and --tee: "3", or by local rank "0:1,1:3", of 0 (none), 1 (stdout), 2
// (stderr), 3 (both). Throws Error on anything else.
StreamChoice parse_streams(std::string_view text);

// The path of an executable file: `name` itself if it has a slash, else searched for in PATH.
// Throws Error that says what is wrong with it.
std::string find_program(const std::string& name);

}  // namespace sherd::dist
