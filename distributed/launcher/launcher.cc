#include "distributed/launcher/launcher.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>

#include "core/error.h"
#include "distributed/job_environment.h"
#include "distributed/launcher/job.h"
#include "distributed/launcher/log_files.h"
#include "distributed/launcher/membership.h"
#include "distributed/launcher/mpi_world.h"
#include "distributed/launcher/node.h"
#include "distributed/launcher/signals.h"
#include "distributed/store_token.h"

extern char** environ;

namespace sherd::dist {
namespace {

constexpr const char* kSelf = "/proc/self/exe";

bool is_set(const char* name) {
  const char* value = std::getenv(name);
  return value && *value;
}

std::string backend_of(const LaunchOptions& o) {
  if (!o.backend.empty()) return o.backend;
  return is_set("SHERD_BACKEND") ? std::getenv("SHERD_BACKEND") : "";
}

template <class... Texts>
[[noreturn]] void refuse(const Texts&... texts) {
  throw BadLaunchOptions(concat(texts...));
}

void check(const LaunchOptions& o) {
  if (o.nproc_per_node < 1 || o.nproc_per_node > kMaxRanksPerNode) {
    refuse("[launch] nproc_per_node must be in 1 ... ", kMaxRanksPerNode, ", got ",
           o.nproc_per_node);
  }
  for (const auto& [flag, choice] : {std::pair("redirects", &o.redirects), {"tee", &o.tee}}) {
    for (const auto& [local_rank, streams] : choice->by_local_rank) {
      if (local_rank < o.nproc_per_node) continue;
      refuse("[launch] ", flag, " names local rank ", local_rank, ", and there are ",
             o.nproc_per_node, " on this node");
    }
  }
  if (o.nnodes < 1) refuse("[launch] nnodes must be at least 1, got ", o.nnodes);
  if (o.min_nodes < 0 || o.min_nodes > o.nnodes) {
    refuse("[launch] min_nodes must be in 1 ... nnodes = ", o.nnodes, ", got ", o.min_nodes);
  }
  if (o.node_rank < 0 || o.node_rank >= o.nnodes) {
    refuse("[launch] node_rank must be in 0 ... nnodes - 1 = ", o.nnodes - 1, ", got ",
           o.node_rank);
  }
  if (o.master_port < 0 || o.master_port > 65535) {
    refuse("[launch] master_port must be in 0 ... 65535, got ", o.master_port);
  }
  if (o.max_restarts < 0) refuse("[launch] max_restarts must be at least 0, got ", o.max_restarts);
  if (o.run_id.empty() || o.run_id.find('/') != std::string::npos) {
    refuse("[launch] run_id must be a word without /, got '", o.run_id, "'");
  }
  if (o.nnodes > 1 && backend_of(o) == "mpi") {
    refuse(
        "[launch] backend mpi is for one node here: on several, start the program by mpirun "
        "itself, ",
        "with SHERD_BACKEND=mpi");
  }
  if (o.nnodes > 1 && (o.master_addr.empty() || o.master_port == 0)) {
    refuse(
        "[launch] several nodes need master_addr and master_port, the same on each: where node 0 ",
        "serves the store");
  }
  if (o.nnodes > 1 && o.rdzv_backend == RdzvBackend::kStatic && o.min_nodes > 0 &&
      o.min_nodes < o.nnodes) {
    refuse(
        "[launch] nodes with a node_rank each are fixed in number: a range of nnodes needs c10d");
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

// One run of all ranks, as this node sees it.
struct Round {
  int restarts = 0;
  int group_rank = 0, group_world_size = 1;
  int first_rank = 0, world_size = 0;
  std::string master_addr = {};
  StoreSocket store = {Fd(), 0};  // rank 0's
};

std::vector<std::string> rank_environment(const LaunchOptions& o, const Round& round,
                                          const std::string& token, const std::string& log_folder,
                                          const std::vector<std::string>& mpi, int local_rank,
                                          int store_fd) {
  const std::string rank = std::to_string(round.first_rank + local_rank);
  const std::string world_size = std::to_string(round.world_size);
  std::vector<std::pair<std::string, std::string>> set{
      {"RANK", rank},
      {"WORLD_SIZE", world_size},
      {"LOCAL_RANK", std::to_string(local_rank)},
      {"LOCAL_WORLD_SIZE", std::to_string(o.nproc_per_node)},
      {"GROUP_RANK", std::to_string(round.group_rank)},
      {"GROUP_WORLD_SIZE", std::to_string(round.group_world_size)},
      {"ROLE_NAME", o.role},
      {"ROLE_RANK", rank},
      {"ROLE_WORLD_SIZE", world_size},
      {"MASTER_ADDR", round.master_addr},
      {"MASTER_PORT", std::to_string(round.store.port)},
      {"TORCHELASTIC_RESTART_COUNT", std::to_string(round.restarts)},
      {"TORCHELASTIC_MAX_RESTARTS", std::to_string(o.max_restarts)},
      {"TORCHELASTIC_RUN_ID", o.run_id},
      {"TORCHELASTIC_USE_AGENT_STORE", "False"},
      {"SHERD_LAUNCHED", "1"},
      {kTokenVariable, token},
      // Empty: not this rank's. An outer launcher's must not pass through.
      {"SHERD_STORE_FD", store_fd >= 0 ? std::to_string(store_fd) : ""},
      {"TORCHELASTIC_ERROR_FILE", ""},
      {"SHERD_MASTER_PORT", ""},
  };
  if (!is_set("OMP_NUM_THREADS")) {
    set.emplace_back("OMP_NUM_THREADS",
                     std::to_string(std::max(1, core_count() / o.nproc_per_node)));
  }
  if (!log_folder.empty() && !is_set("SHERD_FLIGHT_RECORD")) {
    set.emplace_back("SHERD_FLIGHT_RECORD", log_folder);
  }
  if (!o.backend.empty()) set.emplace_back("SHERD_BACKEND", o.backend);
  for (const std::string& entry : mpi) {
    const size_t equals = entry.find('=');
    set.emplace_back(entry.substr(0, equals), entry.substr(equals + 1));
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

std::string summary(const std::vector<RankEnd>& failures) {
  return describe_all(failures, [](const RankEnd&) { return host_name(); });
}

std::string interruption(int signal) {
  return concat("interrupted by ", signal_name(signal), ": all ranks were ended");
}

// What launch() has to remember between the rounds.
class Launcher {
 public:
  Launcher(const LaunchOptions& options, std::string path, std::vector<std::string> argv)
      : options_(options), path_(std::move(path)), argv_(std::move(argv)), logs_(options) {
    if (logs_.any() && options.log_dir.empty()) {
      std::fprintf(stderr, "sherdrun: output is kept in %s\n", logs_.folder().c_str());
    }
  }

  int run_on_one_node() {
    Round round{.world_size = options_.nproc_per_node};
    token_ = token_from_environment();
    if (token_.empty()) token_ = make_token();
    round.master_addr = options_.master_addr.empty() ? "127.0.0.1" : options_.master_addr;
    for (;; ++round.restarts) {
      // A free port is another one each time.
      round.store = listen_for_store(round.master_addr, options_.master_port);
      // Before the job, which ends what was started after it.
      std::optional<MpiWorld> mpi;
      if (backend_of(options_) == "mpi" && options_.nproc_per_node > 1) {
        int signal = 0;
        mpi.emplace(options_.nproc_per_node, signals_.mask_before(),
                    [&] { return (signal = taken_signal()) != 0; });
        if (signal != 0) {
          mpi.reset();
          std::fprintf(stderr, "%s\n", interruption(signal).c_str());
          return 128 + signal;
        }
      }
      Job job(options_, path_, argv_, signals_);
      run(job, round, mpi ? &*mpi : nullptr);
      const auto failures = failures_by_cause(job.ends());
      if (failures.empty() || job.interrupted_by() != 0 || job.is_usage_error() ||
          round.restarts == options_.max_restarts) {
        return conclude(job, failures);
      }
      job.say(concat(summary(failures), "\nrestart ", round.restarts + 1, " of ",
                     options_.max_restarts, ": all ranks start again"));
      job.flush();
    }
  }

  int run_on_several_nodes() {
    token_ = token_from_environment();
    Membership nodes(options_);
    if (token_.empty() && nodes.leads()) {
      std::fprintf(
          stderr,
          "sherdrun: warning: %s is not set, so the job's stores take whoever connects from "
          "this machine's own networks. Set it to the same secret on all nodes.\n",
          kTokenVariable);
    }
    Decision decision;
    for (int last = 0;;) {  // the round that this node was in
      nodes.say_waiting(last + 1);
      while (!decision.is_last()) {
        for (const auto& [member, why] : decision.refused) {
          if (member == nodes.number()) return complain(why);
        }
        // What was decided before counts too: a round that this node has not been in.
        if (decision.kind == Decision::Kind::kRunning && decision.round > last &&
            place_of(nodes, decision)) {
          break;
        }
        if (const int signal = wait_for_news(nodes, decision)) return leave(nodes, signal);
      }
      if (decision.is_last()) {
        const bool is_double = decision.kind == Decision::Kind::kSuccess && last == 0 &&
                               options_.rdzv_backend == RdzvBackend::kStatic;
        if (!is_double) return conclude(decision, true);
        return complain(concat(
            "the job has ended well without this sherdrun: its --node_rank=", options_.node_rank,
            " was another one, or the one before this was started again"));
      }
      last = decision.round;
      nodes.say_running(last);
      Round round = round_of(nodes, decision);
      Job job(options_, path_, argv_, signals_,
              {.fd = nodes.fd(),
               .is_over =
                   [&] {
                     if (auto news = nodes.news()) decision = std::move(*news);
                     return decision.round > last || decision.is_last();
                   },
               .on_failure = [&](const auto& ends) { nodes.say_failed(last, ends); }});
      run(job, round);
      if (job.interrupted_by() != 0) {
        nodes.say_leaving(interruption(job.interrupted_by()));
        return conclude(job, {});
      }
      const bool has_ended_well =
          failures_by_cause(job.ends()).empty() && decision.round == last && !decision.is_last();
      if (has_ended_well) nodes.say_done(last);
      job.flush();
      while (!decision.is_last() && decision.round == last) {
        if (const int signal = wait_for_news(nodes, decision)) return leave(nodes, signal);
      }
      if (decision.is_last()) return conclude(decision, !job.is_usage_error());
      job.say(decision.text);
      job.flush();
    }
  }

 private:
  void run(Job& job, Round& round, const MpiWorld* mpi = nullptr) {
    static const std::vector<std::string> none;
    for (int local_rank = 0; local_rank < options_.nproc_per_node; ++local_rank) {
      if (job.is_interrupted()) break;
      // Were it open here or in another rank, peers could still connect after rank 0 is gone.
      const Fd fd = std::move(round.store.fd);
      RankSpec spec{.rank = round.first_rank + local_rank,
                    .local_rank = local_rank,
                    .environment = rank_environment(options_, round, token_, logs_.folder(),
                                                    mpi ? mpi->environment(local_rank) : none,
                                                    local_rank, fd.fd()),
                    .store_fd = fd.fd()};
      for (int stream : {1, 2}) {
        spec.log[stream - 1] = logs_.open(attempt_, local_rank, stream);
        spec.is_shown[stream - 1] = logs_.is_shown(local_rank, stream);
        // stderr's, the later, says more of a failure.
        if (const std::string path = logs_.path(attempt_, local_rank, stream); !path.empty())
          spec.log_path = path;
      }
      job.start(std::move(spec));
    }
    ++attempt_;
    job.run();
  }

  // The end of a job on one node, or of one that was interrupted here.
  int conclude(Job& job, const std::vector<RankEnd>& failures) {
    int code = 0;
    if (!failures.empty()) {
      code = launcher_exit_code(failures.front());
      if (!job.is_usage_error()) job.say(summary(failures));
    } else if (job.interrupted_by() != 0) {
      code = 128 + job.interrupted_by();
      job.say(interruption(job.interrupted_by()));
    }
    job.flush();
    return code;
  }

  static int conclude(const Decision& decision, bool aloud) {
    if (decision.kind == Decision::Kind::kSuccess) return 0;
    if (aloud) std::fprintf(stderr, "%s\n", decision.text.c_str());
    return decision.exit_code;
  }

  static int complain(const std::string& why) {
    std::fprintf(stderr, "sherdrun: %s\n", why.c_str());
    return 1;
  }

  static int leave(Membership& nodes, int signal) {
    nodes.say_leaving(concat("interrupted by ", signal_name(signal)));
    std::fprintf(stderr, "interrupted by %s\n", signal_name(signal).c_str());
    return 128 + signal;
  }

  // One that ends the launcher and has come, or 0. Stops where it was told to.
  int taken_signal() const {
    for (int signal = signals_.take(); signal != 0; signal = signals_.take()) {
      if (signal == SIGTSTP) kill(getpid(), SIGSTOP);
      if (signal != SIGCHLD && signal != SIGTSTP) return signal;
    }
    return 0;
  }

  // Returns a signal that ends the launcher, or 0 when there are news.
  int wait_for_news(Membership& nodes, Decision& decision) {
    for (;;) {
      if (auto news = nodes.news()) {
        decision = std::move(*news);
        return 0;
      }
      pollfd fds[]{{signals_.fd(), POLLIN, 0}, {nodes.fd(), POLLIN, 0}};
      poll(fds, 2, -1);
      if (const int signal = taken_signal()) return signal;
    }
  }

  static std::optional<int> place_of(const Membership& nodes, const Decision& decision) {
    const int number = nodes.number();
    for (size_t i = 0; i < decision.nodes.size(); ++i) {
      if (decision.nodes[i].member == number) return static_cast<int>(i);
    }
    return {};
  }

  static Round round_of(Membership& nodes, const Decision& decision) {
    Round round{.restarts = decision.restarts,
                .group_rank = *place_of(nodes, decision),
                .group_world_size = static_cast<int>(decision.nodes.size()),
                .world_size = decision.world_size,
                .master_addr = decision.master_addr};
    round.first_rank = decision.nodes[static_cast<size_t>(round.group_rank)].first_rank;
    if (round.group_rank == 0) round.store = nodes.take_rank_store();
    round.store.port = decision.master_port;
    return round;
  }

  const LaunchOptions options_;
  const std::string path_;
  const std::vector<std::string> argv_;
  const LogFiles logs_;
  std::string token_;
  int attempt_ = 0;
  const SignalGuard signals_;
};

int run_ranks(const LaunchOptions& options, const std::string& path,
              const std::vector<std::string>& argv) {
  check(options);
  open_standard_fds();
  Launcher launcher(options, path, argv);
  return options.nnodes == 1 ? launcher.run_on_one_node() : launcher.run_on_several_nodes();
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
  if (is_set("RANK") || is_set("WORLD_SIZE") || rank_from_environment()) return std::nullopt;
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
  if (n > kMaxRanksPerNode) {
    fail("nproc_per_node=", n, " is too many: one node has at most ", kMaxRanksPerNode, " ranks");
  }
  return n;
}

StreamChoice parse_streams(std::string_view text) {
  const std::string all(text);
  const auto number = [&](std::string_view part, int most) {
    int n = -1;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), n);
    if (error != std::errc() || end != part.data() + part.size() || n < 0 || n > most) {
      fail(
          "must be 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or that by local rank, as in "
          "0:1,1:3; got '",
          all, "'");
    }
    return n;
  };
  StreamChoice choice;
  if (text.find(':') == std::string_view::npos) {
    choice.all = number(text, 3);
    return choice;
  }
  while (true) {
    const std::string_view part = text.substr(0, text.find(','));
    const size_t colon = std::min(part.find(':'), part.size());
    const int local_rank = number(part.substr(0, colon), 1 << 20);
    choice.by_local_rank[local_rank] =
        number(colon < part.size() ? part.substr(colon + 1) : std::string_view(), 3);
    if (part.size() == text.size()) return choice;
    text.remove_prefix(part.size() + 1);
  }
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
