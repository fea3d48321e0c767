// The main of a small example: its flags, its ranks, and a line for what goes wrong.
//
//     int main(int argc, char** argv) {
//       CLI::App app{"Counts."};
//       int64_t steps = 10;
//       app.add_option("--steps", steps);
//       return examples::run_ranks(app, /*nproc_per_node=*/2, argc, argv, [&] { count(steps); });
//     }
#pragma once
#include <CLI/CLI.hpp>
#include <functional>

namespace examples {

// Adds --nproc_per_node and --backend to the app's flags and parses them. If no launcher started this process, it starts that many
// ranks of itself and waits for them; in a rank it enters the folder where the user stands and calls `f`. Returns the
// exit code: 2 for wrong flags, 1 if f threw.
int run_ranks(CLI::App& app, int nproc_per_node, int argc, char** argv,
              const std::function<void()>& f);

}  // namespace examples
