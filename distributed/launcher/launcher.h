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
//     MASTER_ADDR, MASTER_PORT        where rank 0 serves the store
//     OMP_NUM_THREADS                 max(1, cores of this node / ranks on it), unless it was set
//     SHERD_LAUNCHED                  1
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
// In every case, success included, launch() returns only when no process that the ranks started is
// left, daemons too: the launcher is their subreaper. If the launcher itself is killed by SIGKILL,
// the kernel kills the ranks (PR_SET_PDEATHSIG), but not what a rank had started.
#pragma once
#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

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

struct LaunchOptions {
  int nproc_per_node =
      1;              // ranks on this node; a single one inherits stdout and stderr, unprefixed
  int nnodes = 1;     // each node runs a launcher with the same options but node_rank
  int node_rank = 0;  // 0 ... nnodes - 1; its rank 0 serves the store
  std::string master_addr = {};  // of node 0; may be left out on one node, which means 127.0.0.1
  int master_port = 0;           // 0: one that is free; several nodes must name one
  LaunchOutput output = LaunchOutput::kPrefixed;
  std::chrono::milliseconds settle{300};
  std::chrono::milliseconds grace{3000};
};

// Runs `command` (the program, looked up in PATH if it has no slash, and its arguments) as
// nproc_per_node ranks. Returns 0 if all ranks did; the exit code of the failed rank that is the
// cause (1 for codes above 125, which shells give a meaning); 128 + the signal that ended it or the
// launcher. Throws Error, with no rank started, on options that contradict, a program that is
// missing or not executable, and a port that is in use.
//
// Call it before the process starts threads: it forks, blocks signals and adopts orphans meanwhile.
int launch(const LaunchOptions& options, const std::vector<std::string>& command);

// In a process that is no rank yet: runs this same program with the same arguments as
// `nproc_per_node` ranks on this node (LaunchOutput::kProgram) and returns the exit code for main.
// In a rank: nothing, go on. A rank is a process with RANK or WORLD_SIZE (sherdrun, torchrun, by
// hand), OMPI_COMM_WORLD_RANK (mpirun), or one of several tasks of a Slurm step (SLURM_PROCID,
// SLURM_STEP_NUM_TASKS). Errors are printed and give exit code 1 (2 for nproc_per_node < 1).
std::optional<int> launch_self(int nproc_per_node, int argc, char** argv);

// The value of --nproc_per_node: a number from 1, "cpu" (cores that this process may run on), "gpu"
// (NVIDIA devices, as CUDA_VISIBLE_DEVICES leaves them; throws if there are none), "auto" (gpu if
// there are any, else cpu). Throws Error on anything else.
int parse_nproc_per_node(std::string_view text);

// The path of an executable file: `name` itself if it has a slash, else searched for in PATH.
// Throws Error that says what is wrong with it.
std::string find_program(const std::string& name);

}  // namespace sherd::dist
