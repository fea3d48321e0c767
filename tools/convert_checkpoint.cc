// Between checkpoint folders and .safetensors files under PyTorch's names.
//
//     convert_checkpoint run/step-000100 model.safetensors --optimizer=optimizer.safetensors
//     convert_checkpoint run/step-000100 model.safetensors --files=4     # and an index of the four
//     convert_checkpoint model.safetensors run --step=100                # a folder to resume from
#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "core/error.h"
#include "distributed/checkpoint/convert.h"

int main(int argc, char** argv) {
  namespace fs = std::filesystem;
  // Where `bazel run` was called.
  if (const char* folder = std::getenv("BUILD_WORKING_DIRECTORY")) fs::current_path(folder);
  std::string source, destination, optimizer;
  int files = 1;
  int64_t step = 0;
  CLI::App app{"Converts between a checkpoint's folder and .safetensors files."};
  app.add_option("source", source, "a checkpoint's folder, a .safetensors file, or an .index.json")
      ->required()
      ->check(CLI::ExistingPath);
  app.add_option("destination", destination,
                 "a .safetensors file, or the folder in which to make a checkpoint")
      ->required();
  app.add_option("--optimizer", optimizer,
                 "the optimizer's .safetensors file, written or read as the model's");
  app.add_option("--files", files, "number of files to cut the model into")
      ->check(CLI::PositiveNumber);
  app.add_option("--step", step, "of the checkpoint to make")->check(CLI::NonNegativeNumber);
  CLI11_PARSE(app, argc, argv);
  try {
    if (fs::is_directory(source)) {
      sherd::dist::to_full(source, destination, {.optimizer = optimizer, .files = files});
      std::printf("wrote %s\n", destination.c_str());
    } else {
      const std::string made = sherd::dist::to_sharded(source, optimizer, destination, step);
      std::printf("wrote %s\n", made.c_str());
    }
  } catch (const std::exception& e) {
    std::fprintf(stderr, "convert_checkpoint: %s\n", e.what());
    return 1;
  }
}
