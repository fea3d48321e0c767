#include "examples/support/main.h"

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>

#include "core/gemm.h"
#include "distributed/debug.h"
#include "distributed/job_environment.h"
#include "distributed/launcher/launcher.h"

namespace examples {

using namespace sherd;

namespace {

// `bazel run` starts programs in a folder of its own and says where the user was.
void enter_user_folder() {
  for (const char* variable : {"SHERD_WORKING_DIRECTORY", "BUILD_WORKING_DIRECTORY"})
    if (const char* folder = std::getenv(variable); folder && *folder)
      return std::filesystem::current_path(folder);
}

void check_rank(const char* name, std::optional<int> rank, const char* of,
                std::optional<int> size) {
  if (size && *size < 1) fail(of, "=", *size, ": a job has at least one rank");
  if (rank && size && (*rank < 0 || *rank >= *size))
    fail(name, "=", *rank, " is not in 0 ... ", of, " - 1 = ", *size - 1);
}

// What every rank would refuse is refused once, before they start.
void check_environment() {
  const std::string backend = dist::variable("SHERD_BACKEND").value_or("auto");
  if (backend != "auto" && backend != "gloo" && backend != "shm" && backend != "mpi")
    fail("SHERD_BACKEND=", backend, ": it can be auto, gloo, shm or mpi");
  dist::debug_option(dist::DebugOption::kCollectives);
  gemm_backend();
  const std::string products = dist::variable("SHERD_BF16").value_or("auto");
  if (products != "auto" && products != "native" && products != "converted")
    fail("SHERD_BF16=", products, ": it can be auto, native or converted");
  check_rank("RANK", dist::rank_from_environment(), "WORLD_SIZE",
             dist::world_size_from_environment());
  check_rank("LOCAL_RANK", dist::local_rank_from_environment(), "LOCAL_WORLD_SIZE",
             dist::local_world_size_from_environment());
}

std::string in_one_line(const std::string& text) {
  std::string line;
  for (const char c : text) {
    const bool space = c == ' ' || c == '\n';
    if (!space || !line.ends_with(' ')) line += space ? ' ' : c;
  }
  return line;
}

// The peers learn of it by the broken connection, or have the same mistake: nobody waits for the
// group.
[[noreturn]] void leave(int code) {
  std::fflush(stdout);
  std::_Exit(code);
}

}  // namespace

UsageError::UsageError(const std::string& text) : Error(in_one_line(text)) {}

int run_job(const std::string& program, const std::string& nproc_per_node,
            const std::string& backend, int argc, char** argv, const std::function<void()>& f) {
  try {
    if (!backend.empty()) setenv("SHERD_BACKEND", backend.c_str(), 1);
    check_environment();
    const int ranks = dist::parse_nproc_per_node(nproc_per_node);
    if (auto code = dist::launch_self(ranks, argc, argv)) return *code;
  } catch (const std::exception& e) {
    return cli::refuse(program, e.what());
  }
  try {
    f();
  } catch (const UsageError& e) {
    std::fprintf(stderr, "%s: %s\n", program.c_str(), e.what());
    leave(2);
  } catch (const std::exception& e) {
    const auto rank = dist::rank_from_environment();
    std::fprintf(stderr, "%s: rank %s: %s\n", program.c_str(),
                 rank ? std::to_string(*rank).c_str() : "?", e.what());
    leave(1);
  }
  return cli::finish(program, 0);
}

int run_ranks(CLI::App& app, int nproc_per_node, int argc, char** argv,
              const std::function<void()>& f, const std::function<void()>& check) {
  const std::string program = std::filesystem::path(argv[0]).filename().string();
  std::string ranks = std::to_string(nproc_per_node);
  app.add_option("--nproc_per_node", ranks,
                 "ranks on this machine, unless a launcher starts them: a number, auto or cpu");
  std::string backend;
  app.add_option(
         "--backend", backend,
         "auto, shm, gloo, or mpi, which starts the ranks under mpirun; else SHERD_BACKEND says")
      ->check(CLI::IsMember({"auto", "shm", "gloo", "mpi"}));
  for (CLI::Option* option : app.get_options()) {
    if (option == app.get_help_ptr()) continue;
    option->capture_default_str();
    option->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  }
  app.get_formatter()->column_width(34);
  if (const auto code = cli::parse(app, program, argc, argv)) return *code;
  try {
    if (check) check();
  } catch (const std::exception& e) {
    return cli::refuse(program, e.what());
  }
  return run_job(program, ranks, backend, argc, argv, [&] {
    enter_user_folder();
    f();
  });
}

}  // namespace examples
