// Activation checkpointing by module, without a change of the model's code: calls of the chosen
// modules keep their inputs alone and are computed again in backward (autograd/checkpoint.h).
//
//     nn::apply_activation_checkpointing(model, nn::every_nth<Block>(2));     // every second block
//     nn::apply_activation_checkpointing(model, [](nn::Module& m) { return is_large(m); });
//
// Same bits as without. A chosen module inside of a chosen one is computed twice again: choose one.
// Before or after wrapping by FSDP, whose unit is then gathered again for the second computation.
#pragma once
#include <memory>

#include "nn/module.h"

namespace sherd::nn {

// Of all modules below `root`, those for which `check` holds; calls of others keep their
// activations (so it also undoes an earlier choice).
inline void apply_activation_checkpointing(Module& root,
                                           const std::function<bool(Module&)>& check) {
  for (auto& [name, module] : root.named_modules())
    if (module != &root) module->state().checkpointed = check(*module);
}

// Every n-th module of type M, in order: the n-th, the 2n-th, ... Error for n < 1.
template <class M>
std::function<bool(Module&)> every_nth(int64_t n) {
  if (n < 1) fail("[every_nth] n must be at least 1, got ", n);
  return [n, seen = std::make_shared<int64_t>(0)](Module& m) {
    return dynamic_cast<M*>(&m) && ++*seen % n == 0;
  };
}

}  // namespace sherd::nn
