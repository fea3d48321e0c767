// The engine: runs the taking-part nodes in strictly falling order of their sequence numbers, on
// the calling thread.
//
//     loss.backward();                                        // into the leaves' grad()
//     auto g = grad({loss}, {w}, {}, {.create_graph = true}); // returned instead
#pragma once
#include <utility>

#include "autograd/node.h"

namespace sherd {

struct GradOptions {
  bool retain_graph =
      false;  // keep saved values, so that backward can run again; implied by create_graph
  bool create_graph = false;  // the gradients can be differentiated again
  bool allow_unused =
      false;  // an input that `outputs` do not depend on gets an undefined gradient, not an error
};

// d(sum(outputs * gradients)) / d(inputs); gradients may be left out for outputs of one element.
// Inputs may be leaves or results. No leaf's grad() changes.
std::vector<Tensor> grad(const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs,
                         const std::vector<Tensor>& gradients = {},
                         const GradOptions& options = {});

// As Tensor::backward, of several outputs at once.
void backward(const std::vector<Tensor>& outputs, const std::vector<Tensor>& gradients = {},
              const GradOptions& options = {});

namespace autograd {

// What one outermost backward is going to do, known before its first node runs.
struct Plan {
  struct Item {
    Scope* scope;
    bool recomputed;  // listed by a checkpointed region: entered through its recomputation
  };
  std::vector<Item> scopes;  // in the order in which they will be entered
  std::vector<std::pair<AutogradMeta*, int>>
      leaves;                 // those that get a gradient; number of contributions
  bool create_graph = false;  // the gradients are to be differentiated again
  bool accumulates = true;    // false for grad(): no leaf and no sink is touched
};

// Told about every outermost backward of its context (FSDP, DDP).
class BackwardObserver {
 public:
  virtual ~BackwardObserver() = default;
  // Whether it takes part in this backward: only then is on_end called for it.
  virtual bool on_plan(const Plan& plan) = 0;
  virtual void on_end(bool failed) = 0;  // after the last node, also when one threw
};
void add_observer(BackwardObserver* observer);  // to the current context
void remove_observer(BackwardObserver* observer);

// Runs `roots` as a nested backward of the running one (checkpoint's recomputation); returns the
// inputs' gradients.
std::vector<Tensor> nested_backward(const std::vector<Tensor>& roots,
                                    std::span<const Tensor> gradients,
                                    const std::vector<Tensor>& inputs);

}  // namespace autograd
}  // namespace sherd
