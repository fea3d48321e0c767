// Node: one recorded operation. Edges lead from it to the nodes that made its inputs, or into
// leaves.
#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "autograd/grad_mode.h"
#include "autograd/meta.h"
#include "autograd/scope.h"

namespace sherd::autograd {

// Where an input's gradient goes. Empty: nobody wants it.
struct Edge {
  Ref<Node> node;
  int output = 0;          // of node
  Ref<AutogradMeta> leaf;  // instead of node
  DType dtype = kFloat32;  // of the input, and so of its gradient
  Device device = kCPU;
  Dims sizes;

  Edge() = default;
  explicit Edge(const Tensor& t);
  Edge(const Edge&) = default;
  Edge(Edge&&) = default;
  Edge& operator=(const Edge&) = default;
  Edge& operator=(Edge&&) = default;
  ~Edge();
  explicit operator bool() const { return node || leaf; }
};

// [Note: order] Sequence numbers rise with creation, so a node's is larger than those of the nodes
// whose outputs it takes, and running the taking-part nodes by falling number is a topological
// order. All of FSDP's and DDP's claims about backward (scopes are runs of nodes, all users of a
// gradient came before) rest on this.
class Node : public Counted {
 public:
  Node(const char* op, int outputs = 1);
  ~Node() override;

  // out[i]: the gradient for edges()[i], undefined where there is none or the edge is empty. The
  // engine converts it to the input's dtype and sums over what was broadcast; Error for another
  // shape or device. gradients[k] is undefined where output k got none (never all of them).
  virtual void backward(std::span<const Tensor> gradients, std::span<Tensor> out) = 0;
  // Frees what was saved for backward. backward() is not called any more.
  virtual void release() {}
  virtual std::span<Edge> edges() = 0;
  // What a checkpointed region will reach when it is recomputed; none for other nodes.
  virtual std::span<const Ref<Scope>> listed_scopes() const { return {}; }
  virtual std::span<const Ref<AutogradMeta>> listed_leaves() const { return {}; }

  const char* op() const { return op_; }
  uint64_t sequence() const { return sequence_; }
  int outputs() const { return outputs_; }
  const Ref<Scope>& scope() const { return scope_; }
  bool released() const { return released_; }
  void set_released() { released_ = true; }

  struct Hooks {
    std::vector<std::vector<TensorHook>> output_hooks;  // by output: on the gradient of a result
    std::vector<std::function<void(std::span<Tensor> gradients)>> before;
    std::vector<std::function<void(std::span<const Tensor> gradients, std::span<Tensor> out)>>
        after;
  };
  Hooks& hooks();
  const Hooks* hooks_or_null() const { return hooks_.get(); }

 private:
  const char* op_;
  int outputs_;
  bool released_ = false;
  uint64_t sequence_;
  Ref<Scope> scope_;
  std::unique_ptr<Hooks> hooks_;
};

// Drops a reference without recursion, however long the chain of nodes behind it.
void dispose(Ref<Node> node);

// The node that runs on this thread; null outside of backward.
Node* running_node();

// While an op's backward runs: where it may write the gradient for its edge `i` itself (see
// GradSink). It then returns that very tensor as out[i].
GradSink::Destination gradient_destination(int i, DType dtype);

}  // namespace sherd::autograd
