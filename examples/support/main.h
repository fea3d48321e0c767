// The main of an example: its flags, its ranks, and a line for what goes wrong.
//
//     int main(int argc, char** argv) {
//       CLI::App app{"Counts."};
//       int64_t steps = 10;
//       app.add_option("--steps", steps)->transform(sherd::cli::whole_number(0));
//       return examples::run_ranks(app, /*nproc_per_node=*/2, argc, argv, [&] { count(steps); });
//     }
#pragma once
#include <functional>
#include <string>

#include "cli/command_line.h"
#include "core/error.h"

namespace examples {

// A mistake of the user's that a rank finds: one line (lists are joined), exit code 2.
struct UsageError : sherd::Error {
  explicit UsageError(const std::string& text);
};

// Adds --nproc_per_node and --backend to the app's flags and parses them; `check` throws Error for
// flags that do not fit. If no launcher started this process, it starts that many ranks of itself
// and waits for them; in a rank it enters the folder where the user stands and calls `f`. Returns
// the exit code: 2 for wrong flags or an environment that no rank can work in, 1 if f threw.
int run_ranks(CLI::App& app, int nproc_per_node, int argc, char** argv,
              const std::function<void()>& f, const std::function<void()>& check = {});

// The same where flags are parsed already; `backend` may be empty.
int run_job(const std::string& program, const std::string& nproc_per_node,
            const std::string& backend, int argc, char** argv, const std::function<void()>& f);

}  // namespace examples
