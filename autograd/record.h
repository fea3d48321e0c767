// Recording an operator: its backward is a lambda beside its forward; no macro, no class to write.
//
//     using autograd::kOutput, autograd::Needs, autograd::record, autograd::Saved;
//     Tensor exp(const Tensor& x) {
//       Tensor y = ...;                                            // forward, by whatever kernel
//       return record<1>("exp", y, {&x}, [y = Saved(y, kOutput)](const Tensor& g, Needs) {
//         return std::array{g * y.get()};
//       });
//     }
//
// Written in public ops, it can be differentiated again. Where a fused backward exists it is used
// if nobody wants a graph of the gradient: `if (!grad_enabled()) fused`. Forward kernels must see
// detached inputs or run under NoGrad.
#pragma once
#include <array>
#include <functional>
#include <optional>

#include "autograd/checkpoint_tracker.h"
#include "autograd/node.h"
#include "autograd/saved.h"

namespace sherd::autograd {

// Which inputs want a gradient, and where an op may write one itself.
struct Needs {
  std::span<const Edge> edges;
  bool operator[](int i) const { return bool(edges[i]); }
  // See GradSink: an undefined tensor means "return the gradient".
  GradSink::Destination destination(int i, DType dtype) const {
    return gradient_destination(i, dtype);
  }
};

// Error if `t` is a sharded parameter that is not gathered. Recording does this by itself; an op
// that is not pointwise also says it for no_grad, where copies and in-place arithmetic on the local
// part are what optimizers do.
void refuse_placeholder(const char* op, const Tensor& t);

template <class F, int N>
class LambdaNode final : public Node {
 public:
  LambdaNode(const char* op, std::array<Edge, N> edges, F f)
      : Node(op), edges_(std::move(edges)), f_(std::move(f)) {}
  void backward(std::span<const Tensor> g, std::span<Tensor> out) override {
    std::array<Tensor, N> r = (*f_)(g[0], Needs{edges_});
    std::move(r.begin(), r.end(), out.begin());
  }
  void release() override { f_.reset(); }
  std::span<Edge> edges() override { return edges_; }

 private:
  std::array<Edge, N> edges_;
  std::optional<F> f_;
};

// x without its history. In-place changes are refused as those of a view: they would change x.
Tensor alias_of_input(const Tensor& x);
// y; or, where it is one of the inputs, an alias for another history, whose edges lead to a view of
// the input (so that a later change of the input is noticed).
Tensor apart_from(std::span<const Tensor* const> inputs, std::span<Edge> edges, const Tensor& y);

inline void set_history(const Tensor& y, Ref<Node> node, int output = 0) {
  AutogradMeta& m = make_meta(y);
  m.grad_fn = std::move(node);
  m.output = output;
}

// The node of an operator with the result y; none if nothing is to be recorded. `in_place`: y is the
// first input, which was changed.
template <int N, class F>
Ref<Node> node_for(const char* op, Tensor& y, const Tensor* const (&inputs)[N], F f,
                   bool in_place) {
  if (!grad_enabled()) {
    track_leaves(inputs);
    return {};
  }
  for (auto* t : inputs) refuse_placeholder(op, *t);
  std::array<Edge, N> e;
  bool any = false;
  for (int i = 0; i < N; ++i) e[i] = Edge(*inputs[i]), any = any || e[i];
  if (!any || !is_float(y.dtype())) return {};  // integers stay constants
  if (!in_place) y = apart_from(inputs, e, y);
  return Ref<Node>(new LambdaNode<F, N>(op, std::move(e), std::move(f)));
}

// Hangs a backward on y: f(gradient, needs) returns std::array<Tensor, N>, a gradient an input
// (undefined: none), of the input's shape or one that it broadcasts to.
template <int N, class F>
Tensor record(const char* op, Tensor y, const Tensor* const (&inputs)[N], F f) {
  if (Ref<Node> node = node_for(op, y, inputs, std::move(f), false))
    set_history(y, std::move(node));
  return y;
}

// x under a history of its own that leads to x's: a gradient taken for it goes no further, and is
// apart from that of another alias of x. For backwards that are computed by a graph within.
inline Tensor alias(const Tensor& x) {
  if (!x.defined() || !x.requires_grad()) return x;
  return record<1>("alias", x.detach(), {&x}, [](const Tensor& g, Needs) { return std::array{g}; });
}

// The same for any number of inputs and several outputs: f(gradients, needs), where gradients[k] is
// undefined if output k got none, returns a gradient an input. Outputs that are integers stay
// constants.
using ManyBackward =
    std::function<std::vector<Tensor>(std::span<const Tensor> gradients, Needs needs)>;
std::vector<Tensor> record_many(const char* op, std::vector<Tensor> outputs,
                                const std::vector<Tensor>& inputs, ManyBackward f);

}  // namespace sherd::autograd
