#include "examples/support/run_state.h"

#include <unistd.h>

#include <ctime>
#include <filesystem>

#include "distributed/agree.h"
#include "examples/support/corpus.h"

namespace examples {

using namespace sherd;
namespace fs = std::filesystem;

namespace {

// Rank 0's: the ranks' clocks need not agree.
std::string own_folder() {
  char name[32];
  const std::time_t now = std::time(nullptr);
  std::strftime(name, sizeof name, "%Y%m%d-%H%M%S", std::localtime(&now));
  const std::string mine =
      (fs::path(cache_folder()) / "runs" / concat("big_model-", name, "-", int64_t(::getpid())))
          .string();
  return dist::all_gather_text(dist::default_group(), mine)[0];
}

// Weights say nothing of these, and with another value they make another model.
void need_same_model(const nlohmann::json& saved, const nlohmann::json& config) {
  if (!saved.is_object()) return;
  const auto differs = [&](const char* key) {
    return saved.contains(key) && config.contains(key) && saved[key] != config[key];
  };
  if (differs("tokenizer"))
    throw UsageError(
        "the checkpoint is of another tokenizer than this run's: give the data that it was made "
        "with, and leave tokenizer.model where it was saved");
  for (const char* key : {"heads", "causal"})
    if (differs(key))
      throw UsageError(concat("the checkpoint is of --", key, "=", saved[key].dump(), ", not --",
                              key, "=", config[key].dump(),
                              ": with these weights the model would compute something else"));
}

// Of a list of hundreds of misshapen parameters, the reason; empty: there is none.
std::string other_sizes(const nlohmann::json& saved, const nlohmann::json& config) {
  if (!saved.is_object()) return "";
  std::string theirs, ours;
  for (const char* key : {"layers", "dim", "ff_dim", "vocab_size"}) {
    if (!saved.contains(key) || saved[key] == config[key]) continue;
    theirs += concat(" --", key, "=", saved[key].dump());
    ours += concat(" --", key, "=", config[key].dump());
  }
  return theirs.empty() ? "" : concat("the checkpoint is of", theirs, ", this run of", ours, ". ");
}

// The same of --init_from; a file of weights does not say what it is of.
std::string why_no_fit(const std::string& path, const nlohmann::json& saved,
                       const nlohmann::json& config, const std::string& error) {
  const bool has_other_shapes = error.find("do not fit the model") != std::string::npos;
  if (fs::is_directory(path) || !has_other_shapes) return other_sizes(saved, config);
  return "give the --layers, --dim, --ff_dim, --vocab_size that the weights were trained with. ";
}

// What the run that saved it was given; null: it does not say.
nlohmann::json config_in(const std::string& checkpoint) {
  const nlohmann::json state = dist::open_checkpoint(checkpoint, dist::Verify::kSizes).state;
  if (!state.is_object()) return {};
  return state.value(nlohmann::json::json_pointer("/common/user"), nlohmann::json());
}
nlohmann::json newest_config(const std::string& folder) {
  try {
    const std::vector<int64_t> steps = dist::checkpoint_steps(folder);
    if (!steps.empty()) return config_in(folder + "/" + dist::checkpoint_name(steps.back()));
  } catch (const Error&) {  // then it has no say in why another could not be loaded
  }
  return {};
}

}  // namespace

void all_or_usage_error(const std::function<void()>& f) {
  dist::all_or_none<UsageError>(dist::default_group(), [&] {
    try {
      f();
    } catch (const Error& e) {
      throw UsageError(e.what());
    }
  });
}

RunFolder open_run_folder(Options& o) {
  RunFolder folder;
  if (o.resume && o.checkpoint_dir.empty()) throw UsageError("--resume needs --checkpoint_dir");
  if (o.checkpoint_dir.empty() && o.save_interval == 0) return folder;
  if (o.checkpoint_dir.empty()) o.checkpoint_dir = own_folder();
  all_or_usage_error([&] {
    if (dist::rank() == 0 && (o.save_interval > 0 || o.overwrite))
      folder.lock = std::make_unique<RunLock>(o.checkpoint_dir);
    folder.has_checkpoints = !dist::checkpoint_steps(o.checkpoint_dir).empty();
    if (folder.has_checkpoints && !o.resume && !o.overwrite)
      throw UsageError(
          o.checkpoint_dir +
          " holds checkpoints: go on from them with --resume, or start afresh with --overwrite");
    if (dist::rank() == 0 && o.overwrite) dist::need_removable_checkpoints(o.checkpoint_dir);
  });
  folder.is_to_be_emptied = folder.has_checkpoints && o.overwrite;
  if (folder.is_to_be_emptied) folder.has_checkpoints = false;
  return folder;
}

void empty_run_folder(const Options& o) {
  all_or_usage_error([&] {
    if (dist::rank() == 0) dist::remove_checkpoints(o.checkpoint_dir);
  });
}

dist::CheckpointerOptions checkpointer_options(const Options& o) {
  return {.format = o.checkpoint_format == "full" ? dist::CheckpointFormat::kFull
                                                  : dist::CheckpointFormat::kSharded,
          .keep_last = 2};
}

std::optional<std::string> resume(dist::Checkpointer& checkpointer, dist::TrainingState& state) {
  const nlohmann::json config = state.user;
  try {
    return checkpointer.load_latest(state);
  } catch (const std::exception& e) {
    std::string text = other_sizes(newest_config(checkpointer.folder()), config) + e.what();
    if (text.find("[DataLoader]") != std::string::npos)
      text +=
          ". --data, --val_data, --seq_len, --pack_documents and the tokenizer make the data: give "
          "those of the checkpoint, or begin anew with its weights by --init_from";
    if (text.find("it holds no optimizer's state") != std::string::npos)
      text += concat(": begin anew with its weights by --init_from=", checkpointer.folder(),
                     " and another --checkpoint_dir");
    throw UsageError(text);
  }
}

void load_initial_weights(const std::string& path, dist::ModelState& model,
                          const nlohmann::json& config) {
  nlohmann::json saved;
  all_or_usage_error([&] {
    if (fs::is_directory(path)) saved = config_in(path);
    need_same_model(saved, config);
  });
  try {
    dist::load_weights_from(path, model);
  } catch (const Error& e) {
    throw UsageError(why_no_fit(path, saved, config, e.what()) + e.what());
  }
}

std::string differences(const nlohmann::json& saved, const nlohmann::json& config) {
  std::string text;
  if (!saved.is_object()) return text;
  need_same_model(saved, config);
  const auto compare = [&](const char* key) {
    if (!saved.contains(key) || !config.contains(key) || saved[key] == config[key]) return;
    text +=
        concat(text.empty() ? "" : ", ", key, " ", saved[key].dump(), " -> ", config[key].dump());
  };
  for (const char* key : {"seq_len", "batch_size", "accumulate", "lr", "min_lr", "schedule",
                          "warmup_steps", "beta1", "beta2", "weight_decay", "max_norm", "precision",
                          "strategy", "world_size", "shuffle", "pack_documents", "seed"})
    compare(key);
  if (config.value("schedule", "") == "cosine") compare("steps");
  return text;
}

}  // namespace examples
