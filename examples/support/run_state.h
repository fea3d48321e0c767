// A training run in files: what is needed to go on as if nothing had happened.
#pragma once
#include <optional>
#include <string>

#include "distributed/checkpoint/checkpointer.h"
#include "examples/support/options.h"
#include "sherd.h"

namespace examples {

// A mistake of the user's: one line (lists are joined), exit code 2.
struct UsageError : sherd::Error {
  explicit UsageError(const std::string& text);
};

// Applies --checkpoint_dir, --resume and --overwrite: names a folder of the run's own where none
// was given, refuses one that holds checkpoints of another run, empties it if told to. Whether
// there is something to resume from. A collective. Throws UsageError.
bool open_checkpoints(Options& options);

// What --checkpoint_format says.
sherd::dist::CheckpointerOptions checkpointer_options(const Options& options);

// Loads the last whole checkpoint and returns its folder. Throws UsageError that lists all that does
// not fit.
std::optional<std::string> resume(sherd::dist::Checkpointer& checkpointer,
                                  sherd::dist::TrainingState& state);

}  // namespace examples
