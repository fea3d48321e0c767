#include "distributed/mpi/mpi_job.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <sstream>

#include "distributed/exchange_texts.h"
#include "distributed/mpi/mpi_process.h"
#include "distributed/shm/node.h"

namespace sherd::dist {
namespace {

std::string variable_or(const char* name, const char* none) {
  const char* s = std::getenv(name);
  return s && *s ? s : none;
}

// What a rank says of itself in the store.
struct Announcement {
  std::string host;
  int pid = 0;
  std::string started_by;  // which mpirun; -: none
  int process = -1;        // MPI's number of it
  int processes = 0;       // that mpirun started; 0: it does not say
};

Announcement announcement() {
  return {host_id(), getpid(), variable_or("PMIX_NAMESPACE", "-"),
          std::atoi(variable_or("PMIX_RANK", "-1").c_str()),
          std::atoi(variable_or("OMPI_COMM_WORLD_SIZE", "0").c_str())};
}

std::string to_text(const Announcement& a) {
  return concat(a.host, " ", a.pid, " ", a.started_by, " ", a.process, " ", a.processes);
}

Announcement from_text(const std::string& text) {
  Announcement a;
  std::istringstream(text) >> a.host >> a.pid >> a.started_by >> a.process >> a.processes;
  return a;
}

std::string list_of(const std::vector<int>& ranks) {
  std::string s = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) s += concat(i ? ", " : "", ranks[i]);
  return s;
}

constexpr const char* kHow =
    "start them by sherdrun --backend=mpi, by the program's own --backend=mpi, or by mpirun -n N";

void check(const std::vector<Announcement>& all) {
  std::map<std::pair<std::string, int>, std::vector<int>> ranks_of;
  std::vector<int> alone;
  const int size = int(all.size());
  for (int r = 0; r < size; ++r) {
    ranks_of[{all[r].host, all[r].pid}].push_back(r);
    if (all[r].started_by == "-" || all[r].process < 0) alone.push_back(r);
  }
  for (const auto& [process, ranks] : ranks_of)
    if (ranks.size() > 1)
      fail("[init_process_group] backend 'mpi' needs a process a rank, and ", list_of(ranks),
           " are threads of one: use shm or gloo");
  if (!alone.empty())
    fail(
        "[init_process_group] backend 'mpi' needs ranks that mpirun started, and it did not start ",
        list_of(alone), ": ", kHow);
  for (int r = 0; r < size; ++r) {
    if (all[r].started_by != all[0].started_by)
      fail(
          "[init_process_group] backend 'mpi' needs ranks that one mpirun started, and ranks 0 "
          "and ",
          r, " come from two: ", kHow);
    if (all[r].processes > 0 && all[r].processes != size)
      fail("[init_process_group] mpirun started ", all[r].processes,
           " processes, and the job has a world size of ", size,
           ": backend 'mpi' needs all of them");
    for (int q = 0; q < r; ++q)
      if (all[q].process == all[r].process)
        fail("[init_process_group] ranks ", q, " and ", r, " are both MPI's process ",
             all[r].process, ": ", kHow);
  }
}

}  // namespace

std::shared_ptr<MpiJob> MpiJob::meet(Store& store, int rank, int world_size, Milliseconds timeout) {
  const Announcement mine = announcement();
  Party party{.rank = rank, .timeout = timeout};
  for (int r = 0; r < world_size; ++r) party.ranks.push_back(r);
  std::vector<Announcement> all;
  for (auto& text : exchange_texts(store, "mpi", to_text(mine), party))
    all.push_back(from_text(text));
  try {
    check(all);
  } catch (const Error&) {  // of all ranks: who serves the store waits until they know
    party.since = std::chrono::steady_clock::now();
    party.timeout = std::min<Milliseconds>(timeout, std::chrono::seconds(5));
    try {
      await_all(store, "mpi_known", party);
    } catch (const Error&) {
    }
    throw;
  }

  MpiProcess& mpi = MpiProcess::get();
  mpi.begin();
  if (mpi.rank() != mine.process)
    fail("[init_process_group] mpirun's variables say that rank ", rank, " is MPI's process ",
         mine.process, ", and MPI says ", mpi.rank());
  std::shared_ptr<MpiJob> job(new MpiJob);
  for (int r = 0; r < world_size; ++r) {
    job->processes_.push_back(all[r].process);
    const bool is_here = r != rank && all[r].host == mine.host;
    job->watches_.push_back(is_here ? int(syscall(SYS_pidfd_open, all[r].pid, 0)) : -1);
  }
  return job;
}

MpiJob::~MpiJob() {
  for (int fd : watches_)
    if (fd >= 0) close(fd);
}

bool MpiJob::has_ended(int rank) const {
  pollfd watch{watches_[rank], POLLIN, 0};
  return watch.fd >= 0 && poll(&watch, 1, 0) > 0;
}

void finalize_mpi() { MpiProcess::get().end(0); }

}  // namespace sherd::dist
