#include "examples/support/main.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <string>

#include "core/error.h"
#include "distributed/launcher/launcher.h"

namespace examples {
namespace {

// `bazel run` starts programs in a folder of its own and says where the user was.
void enter_user_folder() {
  for (const char* variable : {"SHERD_WORKING_DIRECTORY", "BUILD_WORKING_DIRECTORY"})
    if (const char* folder = std::getenv(variable)) return std::filesystem::current_path(folder);
}

int usage_error(const char* program, std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  std::fprintf(stderr, "%s: %s (see --help)\n", program, text.c_str());
  return 2;
}

}  // namespace

int run_ranks(CLI::App& app, int nproc_per_node, int argc, char** argv,
              const std::function<void()>& f) {
  const std::string program = std::filesystem::path(argv[0]).filename().string();
  std::string ranks = std::to_string(nproc_per_node);
  app.add_option("--nproc_per_node", ranks,
                 "ranks on this machine, unless a launcher starts them: a number, auto or cpu");
  std::string backend;
  app.add_option(
         "--backend", backend,
         "auto, shm, gloo, or mpi, which starts the ranks under mpirun; else SHERD_BACKEND says")
      ->check(CLI::IsMember({"auto", "shm", "gloo", "mpi"}));
  for (CLI::Option* option : app.get_options()) option->capture_default_str();
  app.get_formatter()->column_width(34);
  try {
    app.parse(argc, argv);
    nproc_per_node = sherd::dist::parse_nproc_per_node(ranks);
  } catch (const CLI::CallForHelp&) {
    std::fputs(app.help().c_str(), stdout);
    return 0;
  } catch (const CLI::ParseError& e) {
    return usage_error(program.c_str(), e.what());
  } catch (const sherd::Error& e) {
    return usage_error(program.c_str(), e.what());
  }
  if (!backend.empty()) setenv("SHERD_BACKEND", backend.c_str(), 1);
  if (auto code = sherd::dist::launch_self(nproc_per_node, argc, argv)) return *code;
  try {
    enter_user_folder();
    f();
    return 0;
  } catch (const std::exception& e) {
    const char* rank = std::getenv("RANK");
    std::fprintf(stderr, "%s: rank %s: %s\n", program.c_str(), rank ? rank : "?", e.what());
    std::_Exit(1);  // the peers learn of it by the broken connection: nobody waits for the group
  }
}

}  // namespace examples
