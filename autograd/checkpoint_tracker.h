// What the first pass of a checkpointed region notes (see checkpoint.h): the leaves that its ops
// read.
#pragma once
#include <span>
#include <vector>

#include "autograd/meta.h"
#include "autograd/scope.h"

namespace sherd::autograd {

struct CheckpointTracker {
  std::vector<Ref<AutogradMeta>> leaves;  // each once, in order of first use
  std::vector<Tensor> captured;           // results from outside that they read, likewise
  std::vector<AutogradMeta*> inputs;      // the region's explicit inputs
  std::vector<Ref<Scope>> scopes;         // opened and closed in the region, in order of opening
};

CheckpointTracker* checkpoint_tracker();  // this thread's; null outside of a first pass
void note_leaf(CheckpointTracker& tracker, const Tensor& t);

inline void track_leaves(std::span<const Tensor* const> inputs) {
  if (CheckpointTracker* tracker = checkpoint_tracker()) [[unlikely]]
    for (auto* t : inputs) note_leaf(*tracker, *t);
}

}  // namespace sherd::autograd
