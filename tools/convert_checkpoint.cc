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

#include "cli/command_line.h"
#include "cli/kept_tokenizer.h"
#include "cli/paths.h"
#include "core/error.h"
#include "distributed/checkpoint/checkpoint_folder.h"
#include "distributed/checkpoint/convert.h"

int main(int argc, char** argv) {
  using namespace sherd;
  constexpr const char* kProgram = "convert_checkpoint";
  std::string source, destination, optimizer;
  int files = 1;
  int64_t step = 0;
  CLI::App app{"Converts between a checkpoint's folder and .safetensors files."};
  app.add_option("source", source,
                 "a checkpoint's folder, a run's (its last checkpoint), a .safetensors file, or an "
                 ".index.json")
      ->required();
  app.add_option("destination", destination,
                 "a .safetensors file, or the folder in which to make a checkpoint")
      ->required();
  app.add_option("--optimizer", optimizer,
                 "the optimizer's .safetensors file, written or read as the model's");
  auto* number_of_files =
      app.add_option("--files", files, "number of files to cut the model into (1 to 10000)")
          ->transform(cli::whole_number(1, 10000));
  auto* its_step =
      app.add_option("--step", step, "of the checkpoint to make")->transform(cli::whole_number(0));
  if (const auto code = cli::parse(app, kProgram, argc, argv)) return *code;
  std::function<std::string()> convert;  // returns what it made
  try {
    for (std::string* path : {&source, &destination, &optimizer}) *path = cli::from_user(*path);
    cli::need_input("source", source);
    if (std::filesystem::is_directory(source)) {
      if (its_step->count() > 0) fail("--step is of a checkpoint that is made: this one is read");
      if (const auto steps = dist::checkpoint_steps(source); !steps.empty())
        source += "/" + dist::checkpoint_name(steps.back());
      cli::need_output_file("destination", destination);
      cli::need_output_file("--optimizer", optimizer);
      cli::need_different({}, {{"destination", destination}, {"--optimizer", optimizer}});
      for (const std::string& made : {destination, optimizer})
        dist::need_outside_of_checkpoints(made);
      convert = [&] {
        const std::string place = cli::tokenizer_of_weights(destination);
        const auto tokenizer = cli::tokenizer_to_carry(source, place);
        dist::to_full(source, destination, {.optimizer = optimizer, .files = files});
        if (tokenizer) tokenizer->save(place);
        return concat(destination, ", from ", source);
      };
    } else {
      if (number_of_files->count() > 0)
        fail("--files is of .safetensors files that are written: a checkpoint's folder is made");
      cli::need_input("--optimizer", optimizer);
      cli::need_folder("destination", destination);
      convert = [&] {
        const std::string place = cli::tokenizer_of_run(destination);
        const auto tokenizer = cli::tokenizer_to_carry(source, place);
        const std::string made = dist::to_sharded(source, optimizer, destination, step);
        if (tokenizer) tokenizer->save(place);
        return made;
      };
    }
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
