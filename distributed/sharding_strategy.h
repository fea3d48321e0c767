// ShardingStrategy: what of a model is cut over ranks, and when it is whole.
#pragma once
#include <cstdint>
#include <string>

namespace sherd {

enum class ShardingStrategy : uint8_t {
  // parameters, gradients and optimizer state are cut; parameters are gathered in forward and in
  // backward
  kFullShard,
  kShardGradOp,  // the same, but parameters stay gathered from forward to backward
  kNoShard,      // every rank holds all, gradients are averaged: data parallelism
  // cut as kFullShard over the ranks of a shard group, such as one node's; the groups are replicas
  // of each other, and all-reduce the gradients of their pieces
  kHybridShard,
  kHybridShardZero2,  // the same, as kShardGradOp
};
const char* name_of(ShardingStrategy s);  // "full_shard"
// Error, with the list of what exists, for another name.
ShardingStrategy sharding_strategy(const std::string& name);
bool is_hybrid(ShardingStrategy s);

}  // namespace sherd
