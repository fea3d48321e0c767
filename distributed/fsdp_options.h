// FsdpOptions: what the user of FullyShardedDataParallel can choose. Every member has a default.
#pragma once
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/device.h"
#include "distributed/device_mesh.h"
#include "distributed/gather_schedule.h"
#include "distributed/mixed_precision.h"
#include "distributed/process_group.h"
#include "distributed/sharding_strategy.h"
#include "distributed/wrap_policy.h"

namespace sherd {

enum class GatherInBackward : uint8_t {
  kAlways,  // every unit that backward reaches, as PyTorch does
  // only units whose parameters backward reads: an embedding's gradient needs none of its values
  kIfSaved,
};

// Pieces, gradients, moments and the step on the host. On the cpu device they are there already:
// accepted, and changes nothing.
struct CPUOffload {
  bool offload_params = false;
  bool pin_memory = true;
};

struct FsdpOptions {
  WrapPolicy auto_wrap_policy =
      nullptr;  // none: the root is the only unit (and those wrapped by hand)
  ShardingStrategy sharding_strategy = ShardingStrategy::kFullShard;
  MixedPrecision mixed_precision = {};
  Device device = kCPU;
  dist::Group process_group = nullptr;  // all ranks; default: the mesh's only group, or the job's
  // Of the hybrid strategies: the ranks that share the pieces, and those that hold the same piece
  // elsewhere. Default, with an auto_wrap_policy: the ranks of one node shard.
  dist::Group shard_group = nullptr, replicate_group = nullptr;
  // Instead of groups: one dimension, or "replicate" and "shard" (or other names: the first
  // replicates, the second shards).
  dist::DeviceMesh device_mesh = {};
  BackwardPrefetch backward_prefetch = BackwardPrefetch::kPre;
  int forward_prefetch =
      1;  // units gathered ahead of their forward, from the second forward on; 0: none
  GatherInBackward gather_in_backward = GatherInBackward::kAlways;
  // Bytes of gathered parameters and gradients that gathers ahead may bring together, the root's
  // apart; 0: chosen.
  int64_t max_gathered_bytes = 0;
  bool reshard_root_after_forward =
      false;  // the root keeps its parameters from forward to backward
  // Take rank 0's values of buffers, and of parameters that have values already.
  bool sync_module_states = true;
  // The seed of parameters that are declared and not filled yet. Default: that of rank 0's
  // generator.
  std::optional<uint64_t> seed = {};
  bool record_trace = false;  // see FsdpStats
  // Left as they are: whole on each rank, with gradients that nobody reduces. They stay part of
  // state and of parameters(), not of clip_grad_norm_.
  std::vector<nn::Module*> ignored_modules = {};
  std::vector<Tensor> ignored_parameters = {};
  CPUOffload cpu_offload = {};
  // Called for each unit with these options, of which it may change, for this unit alone,
  // sharding_strategy and mixed_precision.
  std::function<void(nn::Module& unit, FsdpOptions& options)> unit_options = nullptr;
};

}  // namespace sherd
