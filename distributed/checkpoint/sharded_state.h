// A model and its optimizer in a sharded checkpoint: each rank writes what it holds and reads what
// it needs.
//
//     dist::ModelState model(fsdp);                 // or (module, group): DDP, or one rank
//     dist::save_shards(group, "run", 100, dist::local_state(model, &optimizer));
//     ...                                           // another world, strategy or wrapping:
//     dist::ShardReader reader(*dist::latest_checkpoint("run"));
//     dist::load_state(reader, model, &optimizer);
//
// Names: "model.<name>" of parameters and persistent buffers, and "optimizer.<name>" of what
// Optimizer::state_dict has. World size, strategy and wrapping are nowhere in the files.
#pragma once
#include <functional>
#include <string>

#include "distributed/checkpoint/full_state.h"
#include "distributed/checkpoint/shard_files.h"
#include "nn/state_dict.h"
#include "optim/optimizer.h"

namespace sherd::dist {

// What this rank holds, without copying: valid until the next step. Null: no optimizer.
LocalState local_state(const ModelState& model, const optim::Optimizer* optimizer);
// The same with copies of the values, into those of `before` where they fit: they are reused from
// one save to the next. `before` is left empty.
LocalState staged(LocalState state, LocalState& before);

struct LoadOptions {
  bool strict = true;  // of the model; off: missing and unexpected names are returned
  // Whether values may lose precision: float32 in the file, bfloat16 in the model. Widening is
  // always allowed.
  bool allow_narrowing = true;
  // Parameters and buffers to load, by name; null: all. The others are left alone, not read, and
  // not missing.
  std::function<bool(const std::string& name)> only = nullptr;
};

// A collective. One Error, the same on all ranks, lists all names of model and optimizer that are
// missing, unexpected or misshapen, before anything is read; DamagedCheckpoint, if what would be
// read is not what was written. Nothing is changed then. The optimizer may be null: then it is not
// read.
nn::LoadResult load_state(ShardReader& reader, const ModelState& model, optim::Optimizer* optimizer,
                          const LoadOptions& options = {});

}  // namespace sherd::dist
