// Pieces of tensors, each held by some rank, into the files of one checkpoint and back: a
// safetensors file a rank and an index.
//
//     run/step-000100/  rank-00000-of-00004.safetensors … index.json state.json
//
//     LocalState mine{.pieces = {{"w", {1000, 8}, lo, hi, values}}};
//     save_shards(group, "run", 100, mine, {.keep_last = 2});       // every rank calls it
//     ...
//     ShardReader reader(*latest_checkpoint("run"));                // any rank, any number of them
//     reader.verify(reader.index().reads("w", begin, end));
//     reader.read("w", begin, end, memory);
//
// Models and optimizers: see sharded_state.h. How a checkpoint is published: checkpoint_folder.h.
//
// [Note: what is written once] All ranks learn of all pieces. A piece that several ranks hold (data
// parallelism, replicas) is written by one of them: of its holders the one with the least to write
// so far, so that the work is spread. Who writes what follows from the list of pieces alone, so all
// ranks find the same without asking.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/tensor.h"
#include "distributed/checkpoint/checkpoint_folder.h"
#include "distributed/checkpoint/shard_index.h"
#include "distributed/fd.h"
#include "distributed/process_group.h"

namespace sherd::dist {

// The checkpoint's files are not what was written.
struct DamagedCheckpoint : Error {
  using Error::Error;
};

struct ShardPiece {
  std::string name;
  Dims shape;           // of the whole
  int64_t begin, end;   // elements of the flattened whole
  Tensor values;        // those, on the CPU, contiguous, in any shape of as many elements
  bool shared = false;  // every rank must have it
};

// What one rank gives to a checkpoint.
struct LocalState {
  std::vector<ShardPiece> pieces = {};
  // Second names of tensors: (name, the one that it is the same as). The same on all ranks.
  std::vector<std::pair<std::string, std::string>> aliases = {};
  nlohmann::json own = nullptr;     // kept a rank
  nlohmann::json common = nullptr;  // rank 0's is kept
};

// A collective; a null group is one rank. Returns the checkpoint's folder, whose state is
// {"ranks": [own of each], "common": …}. One Error on all ranks, with nothing published, if any
// rank fails (it lists which, and why), if ranks disagree about a tensor's dtype, shape or, of one
// element, value, or if some elements are nobody's. `options` matter on rank 0 but for on_stage,
// which each rank calls with "write" before its file.
std::string save_shards(const Group& group, const std::string& folder, int64_t step,
                        const LocalState& mine, const CheckpointOptions& options = {});

inline constexpr const char* kShardIndex = "index.json";
// What a whole file's tensors are called here: "model." or "optimizer." and their names there.
inline constexpr const char *kModelFile = "model.safetensors",
                            *kOptimizerFile = "optimizer.safetensors";

class ShardReader {
 public:
  // Reads the index alone, or, of a checkpoint of whole files (model.safetensors and
  // optimizer.safetensors), their headers. DamagedCheckpoint if it is not whole.
  explicit ShardReader(const Checkpoint& checkpoint);

  const std::string& path() const { return checkpoint_.path; }
  const ShardIndex& index() const { return index_; }
  const nlohmann::json& state() const { return checkpoint_.state; }
  // Reads the blocks that these reads touch and compares checksums. DamagedCheckpoint names the
  // file and the first byte of the block. Whole files have checksums of their own, which
  // open_checkpoint verifies.
  void verify(const std::vector<ShardIndex::Read>& reads);
  // Elements [begin, end) in the stored dtype.
  void read(const std::string& name, int64_t begin, int64_t end, void* to);
  // Bytes that read() has taken from files.
  int64_t bytes_read() const { return bytes_read_; }

 private:
  void open(int file);
  void read_bytes(int file, int64_t offset, int64_t bytes, void* to);

  Checkpoint checkpoint_;
  ShardIndex index_;
  int open_file_ = -1;
  Fd descriptor_;
  int64_t bytes_read_ = 0;
};

}  // namespace sherd::dist
