// sherdrun: runs a program as the ranks of a job, with torchrun's flags.
//
//     sherdrun --standalone --nproc_per_node=4 ./train --steps=100
//     sherdrun --nnodes=2 --node_rank=0 --master_addr=node0 --nproc_per_node=8 ./train
//     sherdrun --nnodes=2:4 --rdzv_backend=c10d --rdzv_endpoint=node0 --max_restarts=3 ./train
//
// What ranks find in their environment, and how a job ends, is in distributed/launcher/launcher.h.
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "cli/command_line.h"
#include "core/error.h"
#include "distributed/launcher/launcher.h"

namespace {

using sherd::dist::LaunchOptions;

constexpr int kUsageError = 2;
constexpr int kMaxNodes = 1 << 20, kMaxSeconds = 10'000'000;
constexpr int kDefaultPort = 29500, kDefaultRdzvPort = 29400;  // torchrun's

constexpr const char* kAbout =
    "Runs PROGRAM as the ranks of a distributed job on this machine, or as this node's ranks of a "
    "job\n"
    "over several. Prefixes their output with [rank i], ends all of them when one fails, and says\n"
    "which one was the cause.";

constexpr const char* kExamples =
    "Examples:\n"
    "  sherdrun --standalone --nproc_per_node=4 ./train --steps=100\n"
    "  sherdrun --nnodes=2 --node_rank=0 --master_addr=node0 --nproc_per_node=8 ./train\n"
    "  sherdrun --nnodes=2:4 --rdzv_backend=c10d --rdzv_endpoint=node0 --max_restarts=3 ./train\n"
    "\n"
    "Ranks find RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, "
    "MASTER_PORT,\n"
    "TORCHELASTIC_RESTART_COUNT and OMP_NUM_THREADS (cores / ranks, unless you set it) in their\n"
    "environment. A flag can also come from the environment, as PET_NPROC_PER_NODE and so on.\n"
    "SHERD_STORE_TOKEN, the same secret on all nodes, keeps strangers out of the job's stores.\n";

struct Flags {
  bool standalone = false, no_python = false;
  std::string nproc_per_node = "1", nnodes = "1";
  int node_rank = 0;
  std::string master_addr;
  int master_port = 0;
  std::string rdzv_id = "none", rdzv_backend = "static", rdzv_endpoint, rdzv_conf;
  int max_restarts = 0;
  double monitor_interval = 0.1, start_timeout = 600;
  std::string backend, role = "default", log_dir, redirects = "0", tee = "0", local_addr;
};

class Formatter : public CLI::Formatter {
 public:
  std::string make_usage(const CLI::App*, std::string) const override {
    return "Usage: sherdrun [FLAGS] PROGRAM [ARGUMENTS OF PROGRAM]\n";
  }
};

// torchrun takes each flag with dashes too, and from PET_NAME in the environment.
template <class T>
CLI::Option* add_flag(CLI::App& app, const std::string& name, T& value, const std::string& type,
                      const std::string& help) {
  std::string names = "--" + name, dashes = names, variable = "PET_" + name;
  std::replace(dashes.begin() + 2, dashes.end(), '_', '-');
  if (dashes != names) names += "," + dashes;
  for (char& c : variable) c = static_cast<char>(std::toupper(c));
  return app.add_option(names, value, help)
      ->envname(variable)
      ->option_text(type)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
}

[[noreturn]] void refuse(const std::string& why) {
  std::fprintf(stderr, "sherdrun: %s\n", why.c_str());
  std::exit(kUsageError);
}

// `bazel run` starts programs in a folder of its own; the user's paths are from where the user is.
void enter_users_folder() {
  std::error_code error;  // of a folder that is gone, nothing is found
  const std::string here = std::filesystem::current_path(error).string();
  if (here.find(".runfiles") == std::string::npos) return;
  for (const char* name : {"SHERD_WORKING_DIRECTORY", "BUILD_WORKING_DIRECTORY"}) {
    if (const char* folder = std::getenv(name)) {
      std::filesystem::current_path(folder, error);
      return;
    }
  }
}

int whole_number(const std::string& flag, std::string_view text, int least, int most) {
  int64_t n = 0;
  const std::string mistake = sherd::cli::read_whole_number(text, least, most, n);
  if (!mistake.empty()) refuse(flag + ": " + mistake);
  return int(n);
}

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

// "4" or "2:4".
void set_nodes(const std::string& text, LaunchOptions& options) {
  const std::string flag = "--nnodes=" + text;
  const size_t colon = text.find(':');
  options.nnodes =
      whole_number(flag, std::string_view(text).substr(colon == std::string::npos ? 0 : colon + 1),
                   1, kMaxNodes);
  if (colon == std::string::npos) return;
  options.min_nodes = whole_number(flag, std::string_view(text).substr(0, colon), 1, kMaxNodes);
  if (options.min_nodes > options.nnodes) {
    refuse(flag + ": the least number of nodes should come first, as in 2:4");
  }
}

// "node0:29400", "node0", "[fe80::1]:29400".
void set_endpoint(const std::string& text, int default_port, LaunchOptions& options) {
  const std::string flag = "--rdzv_endpoint=" + text;
  const size_t colon = text.rfind(':');
  const bool has_port = colon != std::string::npos && text.find(']', colon) == std::string::npos;
  options.master_addr = has_port ? text.substr(0, colon) : text;
  options.master_port = has_port
                            ? whole_number(flag, std::string_view(text).substr(colon + 1), 0, 65535)
                            : default_port;
  if (options.master_addr.starts_with('[') && options.master_addr.ends_with(']')) {
    options.master_addr = options.master_addr.substr(1, options.master_addr.size() - 2);
  }
  if (options.master_addr.empty()) refuse(flag + ": it has no host");
}

// "join_timeout=60,last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3", in seconds.
void set_conf(const std::string& text, LaunchOptions& options) {
  int interval = 5, attempts = 3;
  std::istringstream fields(text);
  for (std::string field; std::getline(fields, field, ',');) {
    const size_t equals = std::min(field.find('='), field.size());
    const std::string name = field.substr(0, equals), flag = "--rdzv_conf, " + name;
    const int n = whole_number(
        flag, std::string_view(field).substr(std::min(equals + 1, field.size())), 0, kMaxSeconds);
    if (name == "join_timeout" || name == "timeout") {
      options.start_timeout = std::chrono::seconds(n);
    } else if (name == "last_call_timeout") {
      options.last_call = std::chrono::seconds(n);
    } else if (name == "keep_alive_interval") {
      interval = n;
    } else if (name == "keep_alive_max_attempt") {
      attempts = n;
    } else {
      refuse(sherd::concat("--rdzv_conf: unknown name '", name,
                           "'; there are join_timeout, last_call_timeout, keep_alive_interval and "
                           "keep_alive_max_attempt"));
    }
  }
  options.lost_after =
      std::chrono::seconds(std::clamp<int64_t>(int64_t(interval) * attempts, 1, kMaxSeconds));
}

sherd::dist::StreamChoice to_streams(const std::string& flag, const std::string& text) {
  try {
    return sherd::dist::parse_streams(text);
  } catch (const sherd::Error& error) {
    refuse(flag + " " + error.what());
  }
}

LaunchOptions to_options(const CLI::App& app, const Flags& flags) {
  const bool has_addr = app.count("--master_addr") > 0, has_port = app.count("--master_port") > 0;
  const bool has_endpoint = app.count("--rdzv_endpoint") > 0;
  LaunchOptions options{.node_rank = flags.node_rank,
                        .master_addr = flags.master_addr,
                        .master_port = flags.master_port,
                        .backend = flags.backend,
                        .max_restarts = flags.max_restarts,
                        .run_id = flags.rdzv_id,
                        .role = flags.role,
                        .monitor_interval = milliseconds(flags.monitor_interval),
                        .start_timeout = milliseconds(flags.start_timeout),
                        .local_addr = flags.local_addr,
                        .log_dir = flags.log_dir,
                        .redirects = to_streams("--redirects", flags.redirects),
                        .tee = to_streams("--tee", flags.tee)};
  set_nodes(flags.nnodes, options);
  set_conf(flags.rdzv_conf, options);
  if (flags.rdzv_backend == "c10d") options.rdzv_backend = sherd::dist::RdzvBackend::kC10d;
  if (const char* prefix = std::getenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")) {
    options.line_prefix = prefix;
  }
  try {
    options.nproc_per_node = sherd::dist::parse_nproc_per_node(flags.nproc_per_node);
  } catch (const sherd::Error& error) {
    refuse(error.what());
  }
  const bool is_c10d = flags.rdzv_backend == "c10d";
  if (options.run_id.empty() || options.run_id.find('/') != std::string::npos) {
    refuse("--rdzv_id should be a word without /");
  }
  if (flags.node_rank >= options.nnodes) {
    refuse(sherd::concat("--node_rank=", flags.node_rank,
                         " is not in 0 ... nnodes - 1 = ", options.nnodes - 1));
  }
  if (flags.standalone && options.nnodes > 1)
    refuse("--standalone is for one node: leave out --nnodes");
  if (flags.standalone && (has_addr || has_port || has_endpoint)) {
    refuse(
        "--standalone chooses address and port itself: leave out --master_addr, --master_port and "
        "--rdzv_endpoint");
  }
  if (has_endpoint && (has_addr || has_port)) {
    refuse("--rdzv_endpoint=HOST:PORT is --master_addr and --master_port in one: give either");
  }
  if (has_endpoint) {
    set_endpoint(flags.rdzv_endpoint, is_c10d ? kDefaultRdzvPort : kDefaultPort, options);
    if (options.nnodes == 1 &&
        !flags.rdzv_endpoint.ends_with(sherd::concat(":", options.master_port))) {
      options.master_port = 0;
    }
  }
  if (options.nnodes == 1) return options;
  if (is_c10d && !has_endpoint && !has_addr) {
    refuse("--nnodes above 1 with --rdzv_backend=c10d needs --rdzv_endpoint, where node 0 is");
  }
  if (!is_c10d && ((!has_addr && !has_endpoint) || app.count("--node_rank") == 0)) {
    refuse("--nnodes above 1 needs --node_rank, and --master_addr, the address of node 0");
  }
  if (!is_c10d && options.min_nodes > 0 && options.min_nodes < options.nnodes) {
    refuse("--nnodes=MIN:MAX needs --rdzv_backend=c10d");
  }
  if ((has_port || has_endpoint) && options.master_port == 0) {
    refuse("--master_port=0, a free port, is for one node");
  }
  if (!has_port && !has_endpoint) options.master_port = is_c10d ? kDefaultRdzvPort : kDefaultPort;
  return options;
}

std::string known_flags(const CLI::App& app) {
  std::string names;
  for (const CLI::Option* option : app.get_options()) {
    names += (names.empty() ? "--" : ", --") + option->get_lnames().front();
  }
  return names;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{kAbout, "sherdrun"};
  app.footer(kExamples);
  app.formatter(std::make_shared<Formatter>());
  app.get_formatter()->column_width(40);
  app.prefix_command();  // from the first word that is no flag of ours, all is the program's
  Flags flags;
  app.add_flag("--standalone", flags.standalone,
               "one node, with the store on a free port of 127.0.0.1")
      ->envname("PET_STANDALONE")
      ->option_text(" ");
  add_flag(
      app, "nproc_per_node", flags.nproc_per_node, "N",
      "ranks on this node: a number (default 1), cpu (one a core), gpu (one a GPU), or auto (gpu "
      "if there is one, else cpu)");
  add_flag(app, "backend", flags.backend, "NAME",
           "of collectives: auto, shm, gloo, or mpi, which starts the ranks under mpirun (default: "
           "what the program and SHERD_BACKEND say)")
      ->check(CLI::IsMember({"auto", "shm", "gloo", "mpi"}));
  add_flag(app, "nnodes", flags.nnodes, "N or MIN:MAX", "nodes (default 1)");
  add_flag(app, "node_rank", flags.node_rank, "N", "this node's number, from 0 (static; default 0)")
      ->transform(sherd::cli::whole_number(0, kMaxNodes));
  add_flag(app, "master_addr", flags.master_addr, "HOST",
           "address of node 0 (default on one node: 127.0.0.1)");
  add_flag(app, "master_port", flags.master_port, "PORT",
           "of the store on node 0 (default on one node: a free one; on several: 29500, or 29400 "
           "with c10d)")
      ->transform(sherd::cli::whole_number(0, 65535));
  add_flag(app, "rdzv_backend", flags.rdzv_backend, "NAME",
           "static: nodes have numbers, node_rank (default); c10d: they get them as they come, and "
           "may be MIN to MAX")
      ->check(CLI::IsMember({"static", "c10d"}));
  add_flag(app, "rdzv_endpoint", flags.rdzv_endpoint, "HOST[:PORT]",
           "where node 0 is, and meets the others");
  add_flag(app, "rdzv_id", flags.rdzv_id, "WORD", "of the job, the same on all nodes");
  add_flag(app, "rdzv_conf", flags.rdzv_conf, "NAME=SECONDS,...",
           "join_timeout (600), last_call_timeout (30): how long MIN nodes wait for more; "
           "keep_alive_interval (5) times keep_alive_max_attempt (3): a node silent for so long is "
           "gone");
  add_flag(app, "start_timeout", flags.start_timeout, "SECONDS", "for all nodes to come (600)")
      ->check(sherd::cli::number(0.001, kMaxSeconds));
  add_flag(app, "max_restarts", flags.max_restarts, "N",
           "so often all ranks are started again after a failure (default 0)")
      ->transform(sherd::cli::whole_number(0, 1 << 20));
  add_flag(app, "monitor_interval", flags.monitor_interval, "SECONDS",
           "how often nodes tell each other how they are (0.1)")
      ->check(sherd::cli::number(0.001, 1e4));
  add_flag(app, "local_addr", flags.local_addr, "NAME", "what this node is called in messages");
  add_flag(app, "role", flags.role, "NAME", "ROLE_NAME for the ranks (default)");
  add_flag(app, "log_dir", flags.log_dir, "FOLDER",
           "keeps each rank's output in FOLDER/<rdzv_id>_<random>/attempt_<n>/<local rank>/");
  app.add_option("-r,--redirects", flags.redirects,
                 "what goes into files only: 0 none, 1 stdout, 2 stderr, 3 both; or by local rank, "
                 "0:1,1:3")
      ->envname("PET_REDIRECTS")
      ->option_text("STREAMS");
  app.add_option("-t,--tee", flags.tee, "what goes into files and to the terminal, as above")
      ->envname("PET_TEE")
      ->option_text("STREAMS");
  app.add_flag("--no_python,--no-python", flags.no_python, "taken for torchrun's sake, as always")
      ->option_text(" ");
  try {
    sherd::cli::parse(app, argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::fputs(app.help().c_str(), stdout);
    return sherd::cli::finish("sherdrun", 0);
  } catch (const CLI::ParseError& error) {
    refuse(sherd::concat(error.what(), "; flags are ", known_flags(app)));
  }
  std::vector<std::string> command = app.remaining();
  if (!command.empty() && command.front() == "--") {
    command.erase(command.begin());
  } else if (!command.empty() && command.front().starts_with("-")) {
    refuse(sherd::concat("unknown flag ", command.front(), " before the program; flags are ",
                         known_flags(app)));
  }
  if (command.empty()) refuse("no program to run; usage: sherdrun [FLAGS] PROGRAM [ARGUMENTS]");
  const LaunchOptions options = to_options(app, flags);
  enter_users_folder();
  try {
    sherd::dist::find_program(command.front());
  } catch (const sherd::Error& error) {
    refuse(error.what());
  }
  try {
    return sherd::dist::launch(options, command);
  } catch (const sherd::dist::BadLaunchOptions& error) {
    refuse(error.what());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "sherdrun: %s\n", error.what());
    return 1;
  }
}
