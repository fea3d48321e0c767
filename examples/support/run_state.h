// A training run in files: what is needed to go on as if nothing had happened.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "distributed/checkpoint/checkpointer.h"
#include "examples/support/main.h"
#include "examples/support/options.h"
#include "examples/support/run_lock.h"
#include "sherd.h"

namespace examples {

// Calls f. If it throws on any rank, UsageError on all. A collective.
void all_or_usage_error(const std::function<void()>& f);

// The folder of this run's checkpoints, which no other run writes to while this lives.
struct RunFolder {
  std::unique_ptr<RunLock> lock;  // on rank 0, if anything is going to be written
  bool has_checkpoints = false;   // to resume from
  bool is_to_be_emptied = false;  // --overwrite: of the checkpoints there are
};

// Applies --checkpoint_dir, --resume and --overwrite: names a folder of the run's own where none
// was given, refuses one that holds checkpoints of another run or that another run writes to. A
// collective. Throws UsageError.
RunFolder open_run_folder(Options& options);

// Removes the checkpoints of an earlier run. A collective. UsageError where something else lies
// among them.
void empty_run_folder(const Options& options);

// What --checkpoint_format says.
sherd::dist::CheckpointerOptions checkpointer_options(const Options& options);

// Loads the last whole checkpoint and returns its folder. Throws UsageError that lists all that
// does not fit.
std::optional<std::string> resume(sherd::dist::Checkpointer& checkpointer,
                                  sherd::dist::TrainingState& state);

// The weights of a file, or of a checkpoint's folder. A collective. UsageError as resume's, and if
// the model would compute another function with these weights.
void load_initial_weights(const std::string& path, sherd::dist::ModelState& model,
                          const nlohmann::json& config);

// What a run does otherwise than the one whose config a checkpoint holds: "seed 0 -> 1, ...";
// empty: nothing that matters. UsageError if the model would compute another function with the same
// weights.
std::string differences(const nlohmann::json& saved, const nlohmann::json& config);

}  // namespace examples
