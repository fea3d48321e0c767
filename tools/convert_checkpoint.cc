// Between checkpoint folders and .safetensors files under PyTorch's names.
//
//     convert_checkpoint run/step-000100 model.safetensors --optimizer=optimizer.safetensors
//     convert_checkpoint run/step-000100 model.safetensors --files=4     # and an index of the four
//     convert_checkpoint run model.safetensors                           # of run's last checkpoint
//     convert_checkpoint model.safetensors run --step=100                # a folder to resume from
//
// The tokenizer goes with the weights.
#include <cstdio>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "cli/command_line.h"
#include "cli/kept_tokenizer.h"
#include "cli/paths.h"
#include "core/error.h"
#include "distributed/checkpoint/checkpoint_folder.h"
#include "distributed/checkpoint/convert.h"

namespace {

using namespace sherd;

constexpr const char* kProgram = "convert_checkpoint";

struct Arguments {
  std::string source, destination, optimizer;
  int files = 1;
  int64_t step = 0;
  bool has_files = false, has_step = false;
};

using Conversion = std::function<std::string()>;  // returns what it made

std::string list_of(const std::vector<std::string>& made) {
  std::string text;
  for (const std::string& path : made)
    if (!path.empty()) text += (text.empty() ? "" : ", ") + path;
  return text;
}

// Of model.safetensors the first and the last of its files.
std::string numbered_files(const std::string& model, int files) {
  const std::string stem = std::filesystem::path(model).replace_extension();
  char ends[2][40];
  for (int i = 0; i < 2; ++i)
    std::snprintf(ends[i], sizeof ends[i], "-%05d-of-%05d.safetensors", i == 0 ? 1 : files, files);
  return concat(stem, ends[0], files > 2 ? " ... " : ", ", stem, ends[1]);
}

// Throws for what is wrong before anything is written.
Conversion to_files(Arguments a) {
  if (a.has_step) fail("--step is of a checkpoint that is made: this one is read");
  if (const auto steps = dist::checkpoint_steps(a.source); !steps.empty())
    a.source += "/" + dist::checkpoint_name(steps.back());
  const std::vector<cli::NamedPath> outputs = {{"destination", a.destination},
                                               {"--optimizer", a.optimizer}};
  for (auto& [flag, path] : outputs) {
    cli::need_safetensors_name(flag, path);
    cli::need_output_file(flag, path);
  }
  cli::need_different({}, outputs);
  for (auto& [flag, path] : outputs) dist::need_outside_of_checkpoints(path);
  return [a] {
    const std::string place = cli::tokenizer_of_weights(a.destination);
    const auto tokenizer = cli::tokenizer_to_carry(a.source, place);
    dist::to_full(a.source, a.destination, {.optimizer = a.optimizer, .files = a.files});
    if (tokenizer) tokenizer->save(place);
    const bool is_one = a.files == 1;
    return list_of({is_one ? a.destination : numbered_files(a.destination, a.files),
                    is_one ? "" : a.destination + ".index.json", a.optimizer,
                    tokenizer ? place : "", "from " + a.source});
  };
}

// The same.
Conversion to_checkpoint(const Arguments& a) {
  if (a.has_files)
    fail("--files is of .safetensors files that are written: a checkpoint's folder is made");
  for (const char* ending : {".safetensors", ".json"})
    if (a.destination.ends_with(ending))
      fail("destination=", a.destination,
           ": of a file of weights a checkpoint is made: destination is the folder in which to "
           "make a checkpoint");
  cli::need_input("--optimizer", a.optimizer);
  cli::need_folder("destination", a.destination);
  if (const auto steps = dist::checkpoint_steps(a.destination);
      !steps.empty() && steps.back() > a.step)
    fail("destination=", a.destination, " holds ", dist::checkpoint_name(steps.back()),
         ", and a run resumes from the last one, not from ", dist::checkpoint_name(a.step),
         ": give a larger --step, or another folder");
  return [a] {
    const std::string place = cli::tokenizer_of_run(a.destination);
    const auto tokenizer = cli::tokenizer_to_carry(a.source, place);
    const std::string made = dist::to_sharded(a.source, a.optimizer, a.destination, a.step);
    if (tokenizer) tokenizer->save(place);
    return list_of({made, tokenizer ? place : ""});
  };
}

Conversion conversion(Arguments a) {
  for (std::string* path : {&a.source, &a.destination, &a.optimizer}) *path = cli::from_user(*path);
  cli::need_input("source", a.source);
  return std::filesystem::is_directory(a.source) ? to_files(a) : to_checkpoint(a);
}

}  // namespace

int main(int argc, char** argv) {
  Arguments a;
  CLI::App app{"Converts between a checkpoint's folder and .safetensors files."};
  app.add_option("source", a.source,
                 "a checkpoint's folder, a run's (its last checkpoint), a .safetensors file, or an "
                 ".index.json")
      ->required();
  app.add_option("destination", a.destination,
                 "a .safetensors file, or the folder in which to make a checkpoint")
      ->required();
  app.add_option("--optimizer", a.optimizer,
                 "the optimizer's .safetensors file, written or read as the model's");
  auto* files = app.add_option("--files", a.files,
                               "number of files to cut the model into (1 to 10000), and the model "
                               "alone: the optimizer's stays one")
                    ->transform(cli::whole_number(1, 10000));
  auto* step = app.add_option("--step", a.step, "of the checkpoint to make")
                   ->transform(cli::whole_number(0));
  if (const auto code = cli::parse(app, kProgram, argc, argv)) return *code;
  a.has_files = files->count() > 0, a.has_step = step->count() > 0;
  Conversion convert;
  try {
    convert = conversion(a);
  } catch (const std::exception& e) {
    return cli::refuse(kProgram, e.what());
  }
  try {
    std::printf("wrote %s\n", convert().c_str());
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s: %s\n", kProgram, e.what());
    return cli::finish(kProgram, 1);
  }
  return cli::finish(kProgram, 0);
}
