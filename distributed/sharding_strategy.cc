#include "distributed/sharding_strategy.h"

#include <array>
#include <utility>

#include "core/error.h"

namespace sherd {
namespace {

constexpr std::array kStrategies = {
    std::pair{ShardingStrategy::kFullShard, "full_shard"},
    std::pair{ShardingStrategy::kShardGradOp, "shard_grad_op"},
    std::pair{ShardingStrategy::kNoShard, "no_shard"},
    std::pair{ShardingStrategy::kHybridShard, "hybrid_shard"},
    std::pair{ShardingStrategy::kHybridShardZero2, "hybrid_shard_zero2"}};

}  // namespace

const char* name_of(ShardingStrategy s) {
  for (auto& [strategy, name] : kStrategies)
    if (strategy == s) return name;
  fail("[fsdp] there is no sharding strategy number ", int(s));
}
ShardingStrategy sharding_strategy(const std::string& name) {
  std::string all;
  for (auto& [strategy, known] : kStrategies) {
    if (name == known) return strategy;
    all += concat(all.empty() ? "" : ", ", known);
  }
  fail("[fsdp] there is no sharding strategy '", name, "': there are ", all);
}
bool is_hybrid(ShardingStrategy s) {
  return s == ShardingStrategy::kHybridShard || s == ShardingStrategy::kHybridShardZero2;
}

}  // namespace sherd
