// sherdrun: runs a program as the ranks of a job, with torchrun's flags.
//
//     sherdrun --standalone --nproc_per_node=4 ./train --steps=100
//     sherdrun --nnodes=2 --node_rank=0 --master_addr=node0 --master_port=29500 --nproc_per_node=8
//     ./train
//
// What ranks find in their environment, and how a job ends, is in distributed/launcher/launcher.h.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "core/error.h"
#include "distributed/launcher/launcher.h"

namespace {

using sherd::dist::LaunchOptions;

constexpr int kUsageError = 2;
constexpr int kDefaultPort = 29500;  // torchrun's

constexpr const char* kAbout =
    "Runs PROGRAM as the ranks of a distributed job on this machine, or as this node's ranks of a "
    "job\n"
    "over several. Prefixes their output with [rank i], ends all of them when one fails, and says\n"
    "which one was the cause.";

constexpr const char* kExamples =
    "Examples:\n"
    "  sherdrun --standalone --nproc_per_node=4 ./train --steps=100\n"
    "  sherdrun --nnodes=2 --node_rank=0 --master_addr=node0 --nproc_per_node=8 ./train\n"
    "\n"
    "Ranks find RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, "
    "MASTER_PORT\n"
    "and OMP_NUM_THREADS (cores / ranks, unless you set it) in their environment. A flag can also\n"
    "come from the environment, as PET_NPROC_PER_NODE and so on.\n";

struct Flags {
  bool standalone = false;
  std::string nproc_per_node = "1";
  int nnodes = 1;
  int node_rank = 0;
  std::string master_addr;
  int master_port = 0;
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
  return app.add_option(names, value, help)->envname(variable)->option_text(type);
}

[[noreturn]] void refuse(const std::string& why) {
  std::fprintf(stderr, "sherdrun: %s\n", why.c_str());
  std::exit(kUsageError);
}

// `bazel run` starts programs in a folder of its own; the user's paths are from where the user is.
void enter_users_folder() {
  if (std::filesystem::current_path().string().find(".runfiles") == std::string::npos) return;
  for (const char* name : {"SHERD_WORKING_DIRECTORY", "BUILD_WORKING_DIRECTORY"}) {
    if (const char* folder = std::getenv(name)) {
      std::error_code error;
      std::filesystem::current_path(folder, error);
      return;
    }
  }
}

LaunchOptions to_options(const CLI::App& app, const Flags& flags) {
  const bool has_addr = app.count("--master_addr") > 0, has_port = app.count("--master_port") > 0;
  LaunchOptions options{.nnodes = flags.nnodes,
                        .node_rank = flags.node_rank,
                        .master_addr = flags.master_addr,
                        .master_port = flags.master_port};
  try {
    options.nproc_per_node = sherd::dist::parse_nproc_per_node(flags.nproc_per_node);
  } catch (const sherd::Error& error) {
    refuse(error.what());
  }
  if (flags.node_rank >= flags.nnodes) {
    refuse(sherd::concat("--node_rank=", flags.node_rank,
                         " is not in 0 ... nnodes - 1 = ", flags.nnodes - 1));
  }
  if (flags.standalone && flags.nnodes > 1)
    refuse("--standalone is for one node: leave out --nnodes");
  if (flags.standalone && (has_addr || has_port)) {
    refuse(
        "--standalone chooses address and port itself: leave out --master_addr and --master_port");
  }
  if (flags.nnodes > 1 && (!has_addr || app.count("--node_rank") == 0)) {
    refuse("--nnodes above 1 needs --node_rank, and --master_addr, the address of node 0");
  }
  if (flags.nnodes > 1 && has_port && flags.master_port == 0) {
    refuse("--master_port=0, a free port, is for one node");
  }
  if (flags.nnodes > 1 && !has_port) options.master_port = kDefaultPort;
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
  add_flag(app, "nnodes", flags.nnodes, "N", "nodes (default 1)")->check(CLI::Range(1, 1 << 20));
  add_flag(app, "node_rank", flags.node_rank, "N", "this node's number, from 0 (default 0)")
      ->check(CLI::Range(0, 1 << 20));
  add_flag(app, "master_addr", flags.master_addr, "HOST",
           "address of node 0 (default on one node: 127.0.0.1)");
  add_flag(app, "master_port", flags.master_port, "PORT",
           "of the store on node 0 (default on one node: a free one; on several: 29500)")
      ->check(CLI::Range(0, 65535));
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::fputs(app.help().c_str(), stdout);
    return 0;
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
  } catch (const sherd::Error& error) {
    std::fprintf(stderr, "sherdrun: %s\n", error.what());
    return 1;
  }
}
