// Wrap policies: which modules of a tree become units, each gathered and reduced as one.
//
//     size_based_auto_wrap_policy(1'000'000)   // modules of at least so many parameters, bottom up
//     module_wrap_policy<TransformerBlock>()          // by type
//     lambda_auto_wrap_policy([](nn::Module& m) { return m.full_name() == "head"; })
//
// What no unit claims belongs to the nearest unit above, in the end to the root. List-like
// containers are never units.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "nn/module.h"

namespace sherd {

// The modules below `root` (never itself) that become units.
using WrapPolicy = std::function<std::vector<nn::Module*>(nn::Module& root)>;

struct SizeBasedOptions {
  // Not looked into: their insides never become units. Default: MultiheadAttention.
  std::function<bool(nn::Module&)> force_leaf = nullptr;
};
// As PyTorch's: bottom up, a module whose parameters outside of units below it number at least
// `min_num_params`.
WrapPolicy size_based_auto_wrap_policy(int64_t min_num_params,
                                       const SizeBasedOptions& options = {});
// Modules for which the predicate holds.
WrapPolicy lambda_auto_wrap_policy(std::function<bool(nn::Module&)> predicate);
// Modules of the given types, or derived from them.
template <class... M>
WrapPolicy module_wrap_policy() {
  return lambda_auto_wrap_policy([](nn::Module& m) { return (dynamic_cast<M*>(&m) || ...); });
}

}  // namespace sherd
