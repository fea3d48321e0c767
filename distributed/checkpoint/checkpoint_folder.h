// A folder of checkpoints, one folder a step, each there whole or not at all:
//
//     run/step-000100/  model.safetensors  optimizer.safetensors  state.json
//     run/step-000200/  ...
//
//     CheckpointWriter writer("run", 200, {.keep_last = 3});
//     writer.add("model.safetensors", save_safetensors(writer.path("model.safetensors"), model));
//     writer.commit({{"lr", 1e-4}, {"sampler", {{"epoch", 2}}}});
//     ...
//     if (std::optional<Checkpoint> c = latest_checkpoint("run"))     // the last whole one
//       load_safetensors(c->file("model.safetensors"));
//
// It knows files, not tensors. What `state` holds is the caller's; state.json adds the step and
// each file's size and checksum, and a checksum of its own.
//
// [Note: publishing a checkpoint] Files are written to a hidden folder beside the final name and
// brought to the disk; then one rename publishes them. So a process that dies at any moment leaves
// the checkpoints before it as they were, and at most a hidden folder, which the next writer
// removes. A writer holds a lock (flock) on its hidden folder, by which others know that it lives;
// the lock of the outer folder is held only to look, to publish and to remove. Renaming also hides
// what is to be removed, so that no half checkpoint has a step's name. On a file system without
// locks all this holds but for the removal of leftovers. On one that cannot exchange two names in
// one step (NFS, some FUSE ones), a step that is overwritten is first set aside under a hidden name
// that says which it is; whoever next looks into the folder gives it its name back, if the writer
// died before the new one had it.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/atomic_file.h"

namespace sherd::dist {

struct Checkpoint {
  std::string path;  // of its folder
  int64_t step = 0;
  nlohmann::json state = {};
  std::map<std::string, FileSummary> files = {};
  std::string file(const std::string& name) const;  // its path; Error if there is none of that name
};

// A line of text for the user; the default writes to stderr.
using Report = std::function<void(const std::string& line)>;
void report_to_stderr(const std::string& line);

enum class Verify { kSizes, kChecksums };
// Reads and verifies the checkpoint in that folder, by its files' sizes or, which reads all of
// them, by their checksums too. Error naming what is missing, cut short or changed.
Checkpoint open_checkpoint(const std::string& path, Verify verify = Verify::kChecksums);
// Error if this process may not read the checkpoint, which may well be whole.
void need_readable(const std::string& path);
// The whole checkpoint of the highest step. Those above it that are not whole are passed over, with
// a line each that says why. None: the folder is not there or has no checkpoints. Error if it has
// some and none is whole, for then to start afresh would be a surprise, or if one may not be read.
std::optional<Checkpoint> latest_checkpoint(const std::string& folder,
                                            const Report& report = report_to_stderr);
// The checkpoint whose folder holds this path, or would; empty: none does. Through links.
std::string checkpoint_around(const std::string& path);
// Error if a file of this path would lie in a checkpoint.
void need_outside_of_checkpoints(const std::string& path);
// Steps that have a folder, rising, whole or not.
std::vector<int64_t> checkpoint_steps(const std::string& folder);
// Error if a folder that remove_checkpoints() would remove holds what is no part of a checkpoint.
void need_removable_checkpoints(const std::string& folder);
// Removes all of them, for a run that is to start afresh; other files stay.
void remove_checkpoints(const std::string& folder);
// "step-000123"
std::string checkpoint_name(int64_t step);

struct CheckpointOptions {
  int keep_last = 0;               // after a save, whole checkpoints that stay, the newest; 0: all
  std::set<int64_t> damaged = {};  // steps that are known not to be whole, whatever they look like
  bool overwrite = false;          // a whole checkpoint of this step is replaced, not refused
  Report report = report_to_stderr;
  // Called at each stage of a save, with its name, for tests that stop there.
  std::function<void(const std::string& stage)> on_stage = {};
};

class CheckpointWriter {
 public:
  // Makes the folder if need be, removes what dead writers left, and begins a hidden folder. Error
  // if the folder has a whole checkpoint of this step and `overwrite` is off; one that is not whole
  // is replaced.
  CheckpointWriter(std::string folder, int64_t step, CheckpointOptions options = {});
  ~CheckpointWriter();  // without commit(): removes what was written
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  // Where to write the file of that name, which must be a plain one and not state.json. Other
  // ranks may write there too.
  std::string path(const std::string& name) const;
  // Says that the file is whole, and what it holds.
  void add(const std::string& name, const FileSummary& summary);
  // Publishes; then removes what keep_last says. Error, with nothing published, if a file was
  // written but not added, was added but is not there, or if another writer published this step
  // meanwhile. What cannot be removed after that is reported. Returns the checkpoint's folder.
  std::string commit(const nlohmann::json& state);

 private:
  class HiddenFolder;

  void stage(const std::string& name) const;
  void sync_files() const;
  void write_state(const nlohmann::json& state) const;
  void publish(const std::string& target) const;
  void remove_old(const std::string& path) const;
  void prune() const;

  std::string folder_;
  int64_t step_;
  CheckpointOptions options_;
  std::unique_ptr<HiddenFolder> hidden_;
  std::map<std::string, FileSummary> files_;
};

}  // namespace sherd::dist
