// The paths that a user gives, looked at before anything runs: what is read is there, what is
// written can be, and no two are the same file.
//
//     o.data = from_user(o.data);
//     need_input("--data", o.data);
//     need_output_file("--save_weights", o.save_weights);
//     need_different({{"--data", o.data}}, {{"--save_weights", o.save_weights}});
//
// Errors are one line with flag, path and reason. An empty path is none.
#pragma once
#include <string>
#include <vector>

namespace sherd::cli {

// `bazel run` starts programs in a folder of its own; the user's paths are from where the user is.
// Absolute, with no slash at the end; Error if the folder that it is relative to is gone.
std::string from_user(const std::string& path);

void need_input(const std::string& flag, const std::string& path);  // a regular file or a folder
void need_output_file(const std::string& flag, const std::string& path);  // put there by renaming
void need_log(const std::string& flag, const std::string& path);          // written where it is
void need_folder(const std::string& flag, const std::string& path);       // in which to put files
// Not one of PyTorch's pickles (.pt, .bin, ...), which torch.load would take the file for.
void need_safetensors_name(const std::string& flag, const std::string& path);

struct NamedPath {
  std::string flag, path;
};
// No output is an input or another output, under whatever names.
void need_different(const std::vector<NamedPath>& inputs, const std::vector<NamedPath>& outputs);
bool lies_in(const std::string& path, const std::string& folder);

}  // namespace sherd::cli
