// The ways in which a user starts the ranks of an example.
//
//     Result r = run(start(Start::kMpirun, 2, "examples/collectives"));
//     for (const std::string& line : plain_lines(r.out)) ...
#pragma once
#include <string>
#include <vector>

#include "tests/launcher/program.h"

namespace examples {

enum class Start { kItself, kSherdrun, kMpirun };

// For tests' names.
inline std::string name_of(Start s) {
  return s == Start::kItself ? "itself" : s == Start::kSherdrun ? "sherdrun" : "mpirun";
}

inline std::vector<std::string> start(Start how, int ranks, const std::string& program,
                                      const std::vector<std::string>& flags = {}) {
  const std::string n = std::to_string(ranks);
  std::vector<std::string> command;
  switch (how) {
    case Start::kItself:
      command = {program, "--nproc_per_node=" + n};
      break;
    case Start::kSherdrun:
      command = {sherd::dist::kSherdrun, "--nproc_per_node=" + n, program};
      break;
    case Start::kMpirun:
      command = {sherd::dist::kMpirun, "--allow-run-as-root", "--oversubscribe", "-n", n, program};
      break;
  }
  command.insert(command.end(), flags.begin(), flags.end());
  return command;
}

// One thread a rank: tests share the machine.
inline sherd::dist::Result run(const std::vector<std::string>& command) {
  return sherd::dist::run(command, {.environment = {{"OMP_NUM_THREADS", "1"}}});
}

// Without the "[rank 0] " that sherdrun puts in front.
inline std::vector<std::string> plain_lines(const std::string& output) {
  std::vector<std::string> lines = sherd::dist::lines_of(output);
  for (std::string& line : lines)
    if (line.starts_with("[rank ")) line.erase(0, line.find("] ") + 2);
  return lines;
}

}  // namespace examples
