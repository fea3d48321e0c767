// Checkpointer: a training run in a folder of checkpoints, to go on as if nothing had happened.
//
//     dist::Checkpointer checkpointer("run", dist::default_group(), {.keep_last = 2});
//     dist::TrainingState state{.model = dist::ModelState(fsdp),
//                               .optimizer = &optimizer,
//                               .scheduler = &schedule,
//                               .loader = &loader};
//     int64_t step = checkpointer.load_latest(state) ? state.step : 0;
//     while (step < steps) {
//       ...
//       state.step = ++step;
//       if (step % 100 == 0) checkpointer.async_save(state);      // or save(state)
//     }
//     checkpointer.wait();                          // and throws what went wrong in the last one
//
// All calls are collectives. What is saved: weights, buffers, moments and options of the optimizer,
// the schedule's step, every rank's random state and position in the data, and the caller's own
// JSON. It loads at any other number of ranks, strategy and wrapping; then random states start
// anew, and the data go on after the samples that are done (see data/data_loader.h).
//
// [Note: asynchronous saves] async_save copies this rank's part to memory of its own and returns; a
// thread writes it, over a process group of its own, so that its collectives and those of training
// never mix. At most one save is in flight: the next one waits for it, and throws its error, on all
// ranks alike. The memory for copies is kept from one save to the next.
#pragma once
#include <atomic>
#include <exception>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <thread>

#include "data/data_loader.h"
#include "distributed/checkpoint/sharded_state.h"
#include "optim/lr_scheduler.h"

namespace sherd::dist {

struct TrainingState {
  ModelState model;
  // What is null is neither saved nor loaded.
  optim::Optimizer* optimizer = nullptr;
  optim::LRScheduler* scheduler = nullptr;
  data::DataLoader* loader = nullptr;
  int64_t step = 0;
  nlohmann::json user = nullptr;  // rank 0's is saved; loading gives it to all
};

enum class CheckpointFormat {
  kSharded,  // a file a rank, and an index
  kFull,     // model.safetensors and optimizer.safetensors, written by rank 0
};

struct CheckpointerOptions {
  CheckpointFormat format = CheckpointFormat::kSharded;  // of saves; both are loaded
  int keep_last = 0;                 // whole checkpoints that stay, the newest; 0: all
  bool overwrite = true;             // a checkpoint of the same step is replaced, not refused
  Report report = report_to_stderr;  // on rank 0
  std::function<void(const std::string& stage)> on_stage = {};  // see CheckpointOptions
};

class Checkpointer {
 public:
  // Null: one rank. Every rank of the group makes it.
  Checkpointer(std::string folder, Group group, CheckpointerOptions options = {});
  // Waits for a save in flight; its error, if nobody asked for it, goes to `report`. Ends the group
  // that asynchronous saves made.
  ~Checkpointer();
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  const std::string& folder() const { return folder_; }
  // Returns when it is on the disk, under its name. An error is thrown on all ranks, and leaves
  // earlier checkpoints as they were.
  void save(const TrainingState& state);
  // Returns when the state is copied: training may go on. Only of kSharded.
  void async_save(const TrainingState& state);
  bool is_saving() const { return saving_; }  // of this rank's part
  void wait();

  // The whole checkpoint of the highest step; others are passed over, each with a line in `report`.
  // Returns its folder; none: there is no checkpoint. Error if it does not fit (all names at once),
  // if there are checkpoints and none is whole, or if this process may not read one.
  std::optional<std::string> load_latest(TrainingState& state, const LoadOptions& options = {});
  // That one. DamagedCheckpoint if it is not whole. An Error of one that does not fit leaves all as
  // it was. A schedule or position in the data that the checkpoint lacks (see convert.h) begins
  // anew, with a line in `report`.
  void load(const std::string& path, TrainingState& state, const LoadOptions& options = {});

 private:
  // Which must hold that step, where one is given.
  void load(const std::string& path, std::optional<int64_t> step, TrainingState& state,
            const LoadOptions& options);
  void begin(int64_t step);  // a save of it; Error if ranks give different ones
  void start(const TrainingState& state, bool async);
  void save_full(const TrainingState& state);

  std::string folder_;
  Group group_, own_group_;
  CheckpointerOptions options_;
  std::thread thread_;
  std::atomic<bool> saving_ = false;
  std::exception_ptr error_;
  std::set<int64_t> damaged_;  // steps that load_latest passed over: not counted in keep_last
  LocalState copies_;
};

// Weights alone, of a checkpoint folder of either format or of one .safetensors file. A collective.
void load_weights_from(const std::string& path, ModelState& model);

}  // namespace sherd::dist
