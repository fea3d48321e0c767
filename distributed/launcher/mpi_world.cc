#include "distributed/launcher/mpi_world.h"

#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <string_view>
#include <thread>

#include "core/error.h"
#include "distributed/launcher/process.h"

extern char** environ;

namespace sherd::dist {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// For mpirun to start all keepers: on an idle machine it takes 0.2 s.
constexpr std::chrono::seconds kStart{120};

// From the keepers' end, and from SIGTERM, to mpirun's.
constexpr std::chrono::seconds kEnd{5};

// $1: the folder. The signals are mpirun's, when it is told to end: first the folder goes.
constexpr const char* kKeeper = R"(
trap '' TERM INT HUP
r="$OMPI_COMM_WORLD_RANK"
env -0 >"$1/$r.part" && mv "$1/$r.part" "$1/$r" || exit 1
read line <"$1/end"
[ "$r" = 0 ] && rm -rf "$1"
exit 0
)";

std::string mpirun_path() {
  const char* path = std::getenv("PATH");
  std::istringstream folders(path ? path : "/usr/local/bin:/usr/bin:/bin");
  for (std::string folder; std::getline(folders, folder, ':');)
    if (access((folder + "/mpirun").c_str(), X_OK) == 0) return folder + "/mpirun";
  return "";
}

// One process can read another's memory: not in every container.
bool reads_memory_of_processes() {
  char from = 1, to = 0;
  const iovec theirs{&from, 1}, mine{&to, 1};
  return process_vm_readv(getpid(), &mine, 1, &theirs, 1, 0) == 1;
}

// Ours, with MPI kept to this machine and to its own simplest ways, unless the user says otherwise.
std::vector<std::string> mpirun_environment(int ranks, const std::string& folder) {
  std::vector<std::pair<std::string, std::string>> defaults{
      {"OMPI_MCA_pml", "ob1"},
      {"OMPI_MCA_btl", "self,vader"},
      {"OMPI_MCA_oob_tcp_if_include", "lo"},
  };
  if (!reads_memory_of_processes())
    defaults.emplace_back("OMPI_MCA_btl_vader_single_copy_mechanism", "none");
  struct statvfs shared {};
  const double wanted = 8.0 * (1 << 20) * ranks;  // vader's segments of 4 MiB, and room
  if (statvfs("/dev/shm", &shared) != 0 || double(shared.f_bavail) * shared.f_frsize < wanted)
    defaults.emplace_back("OMPI_MCA_btl_vader_backing_directory", folder);
  std::vector<std::string> environment;
  for (char** entry = environ; *entry; ++entry) environment.emplace_back(*entry);
  for (const auto& [name, value] : defaults)
    if (!std::getenv(name.c_str())) environment.push_back(name + "=" + value);
  return environment;
}

// Of a file of what ended with \0; only MPI's.
std::vector<std::string> read_environment(const fs::path& path) {
  std::vector<std::string> environment;
  std::ifstream in(path);
  for (std::string entry; std::getline(in, entry, '\0');)
    if (entry.starts_with("OMPI_") || entry.starts_with("PMIX_")) environment.push_back(entry);
  return environment;
}

std::string value_in(const std::vector<std::string>& environment, const std::string& name) {
  for (const std::string& entry : environment)
    if (entry.starts_with(name + "=")) return entry.substr(name.size() + 1);
  return "";
}

bool soon(const std::function<bool()>& condition, Clock::duration patience) {
  const auto deadline = Clock::now() + patience;
  while (!condition()) {
    if (Clock::now() > deadline) return false;
    std::this_thread::sleep_for(milliseconds(5));
  }
  return true;
}

}  // namespace

bool MpiWorld::is_installed() { return !mpirun_path().empty(); }

MpiWorld::MpiWorld(int ranks, const sigset_t& mask, const std::function<bool()>& stop) {
  const std::string mpirun = mpirun_path();
  if (mpirun.empty())
    fail(
        "[launch] backend 'mpi' needs mpirun, which is in no folder of PATH: install openmpi-bin, ",
        "or use another backend");
  const char* tmp = std::getenv("TMPDIR");
  folder_ = concat(tmp && *tmp ? tmp : "/tmp", "/sherd-mpi-XXXXXX");
  if (!mkdtemp(folder_.data())) fail("[launch] cannot make ", folder_, ": ", strerror(errno));
  try {
    const std::string end = folder_ + "/end", said = folder_ + "/said";
    if (mkfifo(end.c_str(), 0600) != 0) fail("[launch] cannot make ", end, ": ", strerror(errno));
    pipe_ = Fd(open(end.c_str(), O_RDWR | O_CLOEXEC));
    const Fd null(open("/dev/null", O_RDONLY | O_CLOEXEC));
    const Fd out(open(said.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
    if (pipe_.fd() < 0 || null.fd() < 0 || out.fd() < 0)
      fail("[launch] cannot open files in ", folder_, ": ", strerror(errno));
    // Under its full name mpirun takes the folder above for a prefix of all that it starts.
    mpirun_ = start_process({.path = mpirun,
                             .argv = {"mpirun", "--allow-run-as-root", "--oversubscribe",
                                      "--bind-to", "none", "--quiet", "-n", std::to_string(ranks),
                                      "/bin/sh", "-c", kKeeper, "keeper", folder_},
                             .environment = mpirun_environment(ranks, folder_),
                             .in = null.fd(),
                             .out = out.fd(),
                             .err = out.fd(),
                             .signal_mask = mask,
                             .death_signal = SIGTERM});
    read_environments(ranks, stop);
  } catch (...) {
    this->end();
    throw;
  }
}

MpiWorld::~MpiWorld() { end(); }

void MpiWorld::read_environments(int ranks, const std::function<bool()>& stop) {
  const auto file = [&](int rank) { return fs::path(folder_) / std::to_string(rank); };
  bool ended = false, stopped = false;
  const bool all = soon(
      [&] {
        ended = waitpid(mpirun_, nullptr, WNOHANG) == mpirun_;
        int there = 0;
        while (there < ranks && fs::exists(file(there))) ++there;
        stopped = stop && stop();
        return ended || stopped || there == ranks;
      },
      kStart);
  if (ended) mpirun_ = 0;
  if (stopped) return;
  if (ended || !all) {
    std::ostringstream said;
    said << std::ifstream(folder_ + "/said").rdbuf();
    fail("[launch] mpirun ", ended ? "ended before it had" : "has not", " started ", ranks,
         " processes", ended ? "" : concat(" in ", kStart.count(), " s"),
         said.str().empty() ? ", and says nothing" : ". It says:\n" + said.str());
  }
  for (int r = 0; r < ranks; ++r) environments_.push_back(read_environment(file(r)));
}

void MpiWorld::end() {
  const auto has_ended = [&] { return waitpid(mpirun_, nullptr, WNOHANG) != 0; };
  pipe_ = Fd();
  if (mpirun_ > 0 && environments_.empty()) kill(mpirun_, SIGTERM);  // it is still starting keepers
  if (mpirun_ > 0 && !soon(has_ended, kEnd)) {
    kill(mpirun_, SIGTERM);
    if (!soon(has_ended, kEnd)) {
      kill(-mpirun_, SIGKILL);
      waitpid(mpirun_, nullptr, 0);
    }
  }
  mpirun_ = 0;
  std::error_code error;  // what is left of an mpirun that was killed; else all has gone
  fs::remove_all(folder_, error);
  if (environments_.empty()) return;
  const fs::path session = value_in(environments_[0], "OMPI_MCA_orte_jobfam_session_dir");
  if (session.empty()) return;
  fs::remove_all(session, error);
  fs::remove(session.parent_path(), error);  // if there is no other job's in it
}

}  // namespace sherd::dist
