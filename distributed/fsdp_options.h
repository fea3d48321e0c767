// FsdpOptions: what the user of FullyShardedDataParallel can choose. Every member has a default.
#pragma once
#include <optional>

#include "core/device.h"
#include "distributed/gather_schedule.h"
#include "distributed/mixed_precision.h"
#include "distributed/process_group.h"
#include "distributed/wrap_policy.h"

namespace sherd {

enum class ShardingStrategy : uint8_t {
  // parameters, gradients and optimizer state are cut; parameters are gathered in forward and in
  // backward
  kFullShard,
  kShardGradOp,  // the same, but parameters stay gathered from forward to backward
  kNoShard,      // every rank holds all, gradients are averaged: data parallelism
};
const char* name_of(ShardingStrategy s);

enum class GatherInBackward : uint8_t {
  kAlways,  // every unit that backward reaches, as PyTorch does
  // only units whose parameters backward reads: an embedding's gradient needs none of its values
  kIfSaved,
};

struct FsdpOptions {
  WrapPolicy auto_wrap_policy =
      nullptr;  // none: the root is the only unit (and those wrapped by hand)
  ShardingStrategy sharding_strategy = ShardingStrategy::kFullShard;
  MixedPrecision mixed_precision = {};
  Device device = kCPU;
  dist::Group process_group = nullptr;  // default: the job's default group
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
};

}  // namespace sherd
