// A training run in files: what is needed to go on as if nothing had happened.
#pragma once
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "distributed/checkpoint/checkpoint_folder.h"
#include "distributed/checkpoint/full_state.h"
#include "examples/support/options.h"
#include "sherd.h"

namespace examples {

// A mistake of the user's: one line (lists are joined), exit code 2.
struct UsageError : sherd::Error {
  explicit UsageError(const std::string& text);
};

struct RunState {
  sherd::dist::ModelState model;
  sherd::optim::Optimizer& optimizer;
  sherd::optim::LRScheduler& schedule;
  sherd::data::DataLoader& loader;
};

// Applies --checkpoint_dir, --resume and --overwrite: names a folder of the run's own where none
// was given, refuses one that holds checkpoints of another run, empties it if told to, and returns
// what to resume from, if anything. A collective. Throws UsageError.
std::optional<sherd::dist::Checkpoint> open_checkpoints(Options& options);

// Weights, moments, schedule, position in the data and every rank's random numbers. Collectives; an
// error of rank 0's (a full disk) is thrown on all ranks, and leaves earlier checkpoints as they
// were.
void save_run(const std::string& folder, int64_t step, RunState& run, const nlohmann::json& config);
// Returns the step. Throws UsageError that lists all that does not fit.
int64_t load_run(const sherd::dist::Checkpoint& checkpoint, RunState& run);

}  // namespace examples
