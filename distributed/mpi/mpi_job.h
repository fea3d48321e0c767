// MpiJob: the ranks of a job as processes of MPI: which process is which rank, and which of those
// on this host have ended. Processes are started by mpirun; see docs/mpi.md.
//
//     auto job = MpiJob::meet(store, rank, world_size, timeout);      // all ranks of the job
//     auto mesh = connect_mpi_mesh(job, rank_in_group, ranks, group_store, timeout);
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "distributed/mesh.h"
#include "distributed/store.h"

namespace sherd::dist {

class MpiJob {
 public:
  // A collective of all ranks of the job. Error, the same on every rank: a rank that is a thread of
  // another's process, that mpirun did not start, that another mpirun started; an mpirun with other
  // processes than these; ranks that do not come in time.
  static std::shared_ptr<MpiJob> meet(Store& store, int rank, int world_size, Milliseconds timeout);
  ~MpiJob();
  MpiJob(const MpiJob&) = delete;
  MpiJob& operator=(const MpiJob&) = delete;

  int process_of(int rank) const { return processes_[rank]; }  // in MPI_COMM_WORLD
  // Has the rank's process ended? Known of processes on this host; of others mpirun takes care.
  // Never blocks.
  bool has_ended(int rank) const;

 private:
  MpiJob() = default;
  std::vector<int> processes_;
  std::vector<int> watches_;  // pidfds; -1: on another host, or the kernel has none
};

// A mesh of some ranks of the job, all of which make this call. `rank`: in the group; `ranks`: of
// the job, by group rank; `store`: of this group alone. Messages above `largest` bytes travel as
// several. Error after `timeout`, which names the ranks that did not come.
std::unique_ptr<Mesh> connect_mpi_mesh(std::shared_ptr<MpiJob> job, int rank,
                                       std::vector<int> ranks, Store& store, Milliseconds timeout,
                                       int64_t largest = int64_t(1) << 30);

// What exit(0) does: ends MPI in good order. For a process that ends by _exit.
void finalize_mpi();

}  // namespace sherd::dist
