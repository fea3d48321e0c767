#include "distributed/job_environment.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <filesystem>

#include "core/error.h"

namespace sherd::dist {
namespace {

// sbatch's own script and a shell under srun see Slurm's variables too, but as one task.
bool is_slurm_task() {
  const auto tasks = variable("SLURM_STEP_NUM_TASKS");
  return variable("SLURM_PROCID") && tasks && std::atoi(tasks->c_str()) > 1;
}

bool is_mpirun_rank() {
  return variable("OMPI_COMM_WORLD_RANK") && variable("OMPI_COMM_WORLD_SIZE");
}

std::optional<int> from_launcher(const char* name, const char* by_mpirun, const char* by_slurm) {
  if (const auto n = number_from({name})) return n;
  switch (starter()) {
    case Starter::kMpirun:
      return number_from({by_mpirun});
    case Starter::kSlurm:
      return number_from({by_slurm});
    default:
      return {};
  }
}

}  // namespace

std::optional<std::string> variable(const char* name) {
  const char* s = std::getenv(name);
  if (!s || !*s) return {};
  return s;
}

int to_number(const std::string& what, const std::string& text) {
  int n = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), n);
  if (error != std::errc() || end != text.data() + text.size())
    fail("[init_process_group] ", what, " is '", text, "', should be a whole number");
  return n;
}

std::optional<int> number_from(std::initializer_list<const char*> names) {
  for (const char* n : names)
    if (auto s = variable(n)) return to_number(n, *s);
  return {};
}

Starter starter() {
  if (variable("TORCHELASTIC_RUN_ID") && variable("RANK")) return Starter::kTorchrun;
  if (is_mpirun_rank()) return Starter::kMpirun;
  if (is_slurm_task() && !variable("RANK") && !variable("WORLD_SIZE")) return Starter::kSlurm;
  return Starter::kOther;
}

std::optional<int> rank_from_environment() {
  return from_launcher("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID");
}
std::optional<int> world_size_from_environment() {
  return from_launcher("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS");
}
std::optional<int> local_rank_from_environment() {
  return from_launcher("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID");
}
std::optional<int> local_world_size_from_environment() {
  if (const auto n = number_from({"LOCAL_WORLD_SIZE"})) return n;
  if (starter() == Starter::kMpirun) return number_from({"OMPI_COMM_WORLD_LOCAL_SIZE"});
  if (starter() != Starter::kSlurm) return {};
  const auto tasks = variable("SLURM_STEP_TASKS_PER_NODE");
  return tasks ? tasks_of_node(*tasks, number_from({"SLURM_NODEID"}).value_or(0)) : std::nullopt;
}

bool on_one_machine() {
  const auto here = local_world_size_from_environment();
  return here && here == world_size_from_environment();
}

bool agent_owns_port() { return variable("TORCHELASTIC_USE_AGENT_STORE").value_or("") == "True"; }

std::string announcement_file() {
  std::string job = variable("PMIX_NAMESPACE").value_or("");
  std::string folder;
  if (const auto file = variable("TORCHELASTIC_ERROR_FILE")) {
    // <log folder>/<run>/attempt_<n>/<local rank>/error.json
    folder = std::filesystem::path(*file).parent_path().parent_path();
    if (access(folder.c_str(), W_OK) != 0) return "";
  } else if (starter() != Starter::kMpirun) {
    return "";
  } else if (const auto session = variable("OMPI_MCA_orte_jobfam_session_dir");
             session && access(session->c_str(), W_OK) == 0) {
    folder = *session;
  } else {
    job += "_" + variable("OMPI_MCA_orte_precondition_transports").value_or("");  // random
    folder = concat("/tmp/sherd-", getuid());
    mkdir(folder.c_str(), 0700);
    struct stat s {};
    if (lstat(folder.c_str(), &s) != 0 || !S_ISDIR(s.st_mode) || s.st_uid != getuid() ||
        (s.st_mode & 077) != 0)
      fail("[init_process_group] folder ", folder,
           " should be there, ours, and closed to others; or set MASTER_ADDR and MASTER_PORT");
  }
  std::replace(job.begin(), job.end(), '/', '_');
  return folder + "/sherd_store_" + job;
}

std::string slurm_first_host() {
  if (on_one_machine()) return "127.0.0.1";
  for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"})
    if (const auto list = variable(name)) return first_of_host_list(*list);
  fail(
      "[init_process_group] Slurm's variables name no host (SLURM_STEP_NODELIST): set MASTER_ADDR");
}

int slurm_port() {
  const int64_t job = number_from({"SLURM_JOB_ID", "SLURM_JOBID"}).value_or(0);
  const int64_t step = number_from({"SLURM_STEP_ID", "SLURM_STEPID"}).value_or(0);
  return int(15000 + (job * 31 + step) % 10000);
}

std::string first_of_host_list(const std::string& list) {
  std::string host;
  bool inside = false;    // of brackets
  bool skipping = false;  // their other members
  for (const char c : list) {
    if (c == '[') {
      inside = true;
    } else if (c == ']') {
      inside = skipping = false;
    } else if (!inside && c == ',') {
      break;
    } else if (inside && (c == ',' || c == '-')) {
      skipping = true;
    } else if (!skipping) {
      host += c;
    }
  }
  return host;
}

std::optional<int> tasks_of_node(const std::string& tasks_per_node, int node) {
  const char* at = tasks_per_node.c_str();
  for (int64_t first = 0; *at;) {
    char* end;
    const long tasks = std::strtol(at, &end, 10);
    if (end == at || tasks < 1) return {};
    long times = 1;
    if (end[0] == '(' && end[1] == 'x') {
      at = end + 2;
      times = std::strtol(at, &end, 10);
      if (end == at || times < 1 || *end != ')') return {};
      ++end;
    }
    first += times;
    if (node < first) return int(tasks);
    if (*end && *end != ',') return {};
    at = *end ? end + 1 : end;
  }
  return {};
}

}  // namespace sherd::dist
