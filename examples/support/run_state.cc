#include "examples/support/run_state.h"

#include <ctime>
#include <filesystem>

#include "examples/support/corpus.h"

namespace examples {

using namespace sherd;
namespace fs = std::filesystem;

namespace {

std::string in_one_line(const std::string& text) {
  std::string line;
  for (const char c : text) {
    const bool space = c == ' ' || c == '\n';
    if (!space || !line.ends_with(' ')) line += space ? ' ' : c;
  }
  return line;
}

}  // namespace

UsageError::UsageError(const std::string& text) : Error(in_one_line(text)) {}

bool open_checkpoints(Options& o) {
  if (o.resume && o.checkpoint_dir.empty()) throw UsageError("--resume needs --checkpoint_dir");
  if (o.checkpoint_dir.empty()) {
    if (o.save_interval > 0) {
      char name[32];
      const std::time_t now = std::time(nullptr);
      std::strftime(name, sizeof name, "%Y%m%d-%H%M%S", std::localtime(&now));
      o.checkpoint_dir = (fs::path(cache_folder()) / "runs" / concat("big_model-", name)).string();
    }
    return false;
  }
  const bool any = !dist::checkpoint_steps(o.checkpoint_dir).empty();
  dist::barrier();  // all have looked before anything is removed
  if (!any) return false;
  if (o.overwrite) {
    if (dist::rank() == 0) dist::remove_checkpoints(o.checkpoint_dir);
    dist::barrier();
    return false;
  }
  if (!o.resume)
    throw UsageError(
        o.checkpoint_dir +
        " holds checkpoints: go on from them with --resume, or start afresh with --overwrite");
  return true;
}

dist::CheckpointerOptions checkpointer_options(const Options& o) {
  return {.format = o.checkpoint_format == "full" ? dist::CheckpointFormat::kFull
                                                  : dist::CheckpointFormat::kSharded,
          .keep_last = 2};
}

std::optional<std::string> resume(dist::Checkpointer& checkpointer, dist::TrainingState& state) {
  try {
    return checkpointer.load_latest(state);
  } catch (const std::exception& e) {
    throw UsageError(e.what());
  }
}

}  // namespace examples
