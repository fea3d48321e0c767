#include "distributed/launcher/launcher.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>

#include "core/error.h"
#include "distributed/launcher/job.h"
#include "distributed/launcher/node.h"
#include "distributed/launcher/signals.h"

extern char** environ;

namespace sherd::dist {
namespace {

constexpr const char* kSelf = "/proc/self/exe";

bool is_set(const char* name) {
  const char* value = std::getenv(name);
  return value && *value;
}

bool is_rank() {
  if (is_set("RANK") || is_set("WORLD_SIZE") || is_set("OMPI_COMM_WORLD_RANK")) return true;
  // sbatch's own script and a shell under srun see Slurm's variables too, but as one task.
  const char* tasks = std::getenv("SLURM_STEP_NUM_TASKS");
  return is_set("SLURM_PROCID") && tasks && std::atoi(tasks) > 1;
}

void check(const LaunchOptions& o) {
  if (o.nproc_per_node < 1) {
    fail("[launch] nproc_per_node must be at least 1, got ", o.nproc_per_node);
  }
  if (o.nnodes < 1) fail("[launch] nnodes must be at least 1, got ", o.nnodes);
  if (o.node_rank < 0 || o.node_rank >= o.nnodes) {
    fail("[launch] node_rank must be in 0 ... nnodes - 1 = ", o.nnodes - 1, ", got ", o.node_rank);
  }
  if (o.master_port < 0 || o.master_port > 65535) {
    fail("[launch] master_port must be in 0 ... 65535, got ", o.master_port);
  }
  if (o.nnodes > 1 && (o.master_addr.empty() || o.master_port == 0)) {
    fail("[launch] several nodes need master_addr and master_port, the same on each: where node 0 ",
         "serves the store");
  }
}

// An fd 0, 1 or 2 that was closed would be taken by the next pipe.
void open_standard_fds() {
  for (int fd = 0; fd <= 2; ++fd) {
    if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd == 0 ? O_RDONLY : O_WRONLY) < 0) {
      fail("[launch] cannot open /dev/null: ", strerror(errno));
    }
  }
}

std::vector<std::string> rank_environment(const LaunchOptions& o, int local_rank, int port,
                                          int store_fd) {
  std::vector<std::pair<std::string, std::string>> set{
      {"RANK", std::to_string(o.node_rank * o.nproc_per_node + local_rank)},
      {"WORLD_SIZE", std::to_string(o.nnodes * o.nproc_per_node)},
      {"LOCAL_RANK", std::to_string(local_rank)},
      {"LOCAL_WORLD_SIZE", std::to_string(o.nproc_per_node)},
      {"GROUP_RANK", std::to_string(o.node_rank)},
      {"GROUP_WORLD_SIZE", std::to_string(o.nnodes)},
      {"MASTER_ADDR", o.master_addr.empty() ? "127.0.0.1" : o.master_addr},
      {"MASTER_PORT", std::to_string(port)},
      {"SHERD_LAUNCHED", "1"},
      // Empty: not this rank's. An outer launcher's must not pass through.
      {"SHERD_STORE_FD", store_fd >= 0 ? std::to_string(store_fd) : ""},
  };
  if (!is_set("OMP_NUM_THREADS")) {
    set.emplace_back("OMP_NUM_THREADS",
                     std::to_string(std::max(1, core_count() / o.nproc_per_node)));
  }
  std::vector<std::string> environment;
  for (char** entry = environ; *entry; ++entry) {
    const std::string_view text = *entry;
    const std::string_view name = text.substr(0, text.find('='));
    if (std::none_of(set.begin(), set.end(), [&](const auto& s) { return s.first == name; })) {
      environment.emplace_back(text);
    }
  }
  for (const auto& [name, value] : set) {
    if (!value.empty()) environment.push_back(name + "=" + value);
  }
  return environment;
}

int run_ranks(const LaunchOptions& options, const std::string& path,
              const std::vector<std::string>& argv) {
  check(options);
  open_standard_fds();
  const bool serves_store = options.node_rank == 0;
  StoreSocket store{Fd(), options.master_port};
  if (serves_store) {
    // Several nodes reach it under whatever name they know: a host's own name often means loopback
    // on that host.
    const std::string address = options.nnodes > 1            ? ""
                                : options.master_addr.empty() ? "127.0.0.1"
                                                              : options.master_addr;
    store = listen_for_store(address, options.master_port);
  }
  const SignalGuard signals;
  Job job(options, path, argv, signals);
  for (int local_rank = 0; local_rank < options.nproc_per_node; ++local_rank) {
    // Were it open here or in another rank, peers could still connect after rank 0 is gone.
    const Fd fd = std::move(store.fd);
    job.start({.rank = options.node_rank * options.nproc_per_node + local_rank,
               .local_rank = local_rank,
               .environment = rank_environment(options, local_rank, store.port, fd.get()),
               .store_fd = fd.get()});
  }
  return job.run();
}

// The real path, so that `ps` and `pgrep` show the program's name, if it still is this program.
std::string own_path() {
  char path[4096];
  const ssize_t n = readlink(kSelf, path, sizeof path - 1);
  struct stat by_name, self;
  if (n <= 0) return kSelf;
  path[n] = '\0';
  const bool same = stat(path, &by_name) == 0 && stat(kSelf, &self) == 0 &&
                    by_name.st_ino == self.st_ino && by_name.st_dev == self.st_dev;
  return same ? path : kSelf;
}

}  // namespace

int launch(const LaunchOptions& options, const std::vector<std::string>& command) {
  if (command.empty()) fail("[launch] no program to run");
  return run_ranks(options, find_program(command.front()), command);
}

std::optional<int> launch_self(int nproc_per_node, int argc, char** argv) {
  if (is_rank()) return std::nullopt;
  try {
    const LaunchOptions options{.nproc_per_node = nproc_per_node, .output = LaunchOutput::kProgram};
    return run_ranks(options, own_path(), std::vector<std::string>(argv, argv + argc));
  } catch (const Error& error) {
    std::fprintf(stderr, "%s: %s\n", argc > 0 ? argv[0] : "launch", error.what());
    return nproc_per_node < 1 ? 2 : 1;
  }
}

int parse_nproc_per_node(std::string_view text) {
  const int gpus = accelerator_count();
  if (text == "cpu") return core_count();
  if (text == "auto") return gpus > 0 ? gpus : core_count();
  if (text == "gpu") {
    if (gpus == 0) fail("nproc_per_node=gpu, but this machine shows no GPU: give a number or cpu");
    return gpus;
  }
  int n = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), n);
  if (error != std::errc() || end != text.data() + text.size() || n < 1) {
    fail("nproc_per_node must be a number from 1, auto, cpu or gpu; got '", text, "'");
  }
  return n;
}

std::string find_program(const std::string& name) {
  const auto check_file = [](const std::string& path) -> const char* {
    struct stat file;
    if (stat(path.c_str(), &file) != 0) return strerror(errno);
    if (S_ISDIR(file.st_mode)) return "it is a folder";
    if (access(path.c_str(), X_OK) != 0) return "it is not executable";
    return nullptr;
  };
  if (name.empty()) fail("the program's name is empty");
  if (name.find('/') != std::string::npos) {
    if (const char* wrong = check_file(name)) fail("cannot run program '", name, "': ", wrong);
    return name;
  }
  const char* path = std::getenv("PATH");
  std::string_view folders = path ? path : "/usr/local/bin:/usr/bin:/bin";
  while (true) {
    const size_t colon = folders.find(':');
    const std::string folder(folders.substr(0, colon));
    if (!folder.empty() && !check_file(folder + "/" + name)) return folder + "/" + name;
    if (colon == std::string_view::npos) break;
    folders.remove_prefix(colon + 1);
  }
  const bool is_here = check_file("./" + name) == nullptr;
  fail("cannot run program '", name, "': it is in no folder of PATH",
       is_here ? concat("; for the one in this folder write ./", name) : "");
}

}  // namespace sherd::dist
