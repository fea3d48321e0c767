#include "cli/kept_tokenizer.h"

#include <filesystem>
#include <vector>

#include "core/atomic_file.h"
#include "core/error.h"
#include "distributed/checkpoint/checkpoint_folder.h"

namespace sherd::cli {

namespace fs = std::filesystem;

std::string tokenizer_of_run(const std::string& folder) {
  return fs::path(folder) / "tokenizer.model";
}
std::string tokenizer_of_weights(const std::string& file) {
  fs::path path = target_of(file);
  if (path.string().ends_with(".safetensors.index.json"))
    path.replace_extension().replace_extension();
  return path.replace_extension("tokenizer.model");
}

std::string kept_tokenizer(const std::string& weights) {
  if (weights.empty()) return "";
  std::vector<std::string> places = {fs::is_directory(weights) ? tokenizer_of_run(weights)
                                                               : tokenizer_of_weights(weights)};
  if (const std::string step = dist::checkpoint_around(weights + "/state.json"); !step.empty())
    places.push_back(tokenizer_of_run(fs::path(step).parent_path()));
  std::error_code error;
  for (const std::string& path : places)
    if (fs::is_regular_file(path, error)) return path;
  return "";
}

void need_tokenizer_place(const std::string& whose, const std::string& path) {
  if (fs::exists(path) && !data::Tokenizer::is_saved_at(path))
    fail(path, ", where the tokenizer of ", whose,
         " would lie, is another program's: move it, or take another folder");
}

std::shared_ptr<data::Tokenizer> tokenizer_to_carry(const std::string& weights,
                                                    const std::string& path) {
  const std::string kept = kept_tokenizer(weights);
  if (kept.empty() && fs::exists(path))
    fail(path, " is of other weights, for no tokenizer lies with ", weights,
         ": move it, or take another destination");
  if (kept.empty()) return nullptr;
  need_tokenizer_place(weights, path);
  return data::Tokenizer::load(kept);
}

}  // namespace sherd::cli
