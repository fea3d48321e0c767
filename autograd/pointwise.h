// Recording of pointwise operators (core/pointwise.h): call(Op{}, x, ...) is the public function's
// one line, call_ its form in place, call_out the one with a given output. Derivatives of
// derivatives are the same formulas read over Tensor.
#pragma once
#include "autograd/ops.h"
#include "autograd/record.h"
#include "core/pointwise.h"

namespace sherd {

// The transpose of broadcasting: sums x down to `sizes`.
Tensor sum_to(const Tensor& x, const Dims& sizes);

namespace autograd {

template <class Op, int N>
class PointwiseNode final : public Node {
 public:
  explicit PointwiseNode(const Op& op) : Node(Op::name), op(op) {}

  Op op;
  Edge to[N];
  Saved saved[N + 1];  // inputs, output
  bool reads_output = false;

  template <int I, int... k>
  Tensor one(const Tensor& g, const Tensor* in, std::integer_sequence<int, k...>) const {
    constexpr Uses u = uses_of<Op, I>;
    if constexpr (u.operations > 0)
      if (!grad_enabled()) {
        const Tensor* like[] = {&g};
        Tensor r = output({g.sizes(), to[I].dtype, to[I].dtype, g.device()}, like);
        evaluate(Grad<Op, I>{op}, r, promote(g.dtype(), to[I].dtype), g,
                 (u.tensors >> (k + 1) & 1 ? in[k] : g)...);
        return sum_to(r, to[I].sizes);
      }
    return sum_to(Tensor(grad_of<I>(op, g, in[k]...)), to[I].sizes).to(to[I].dtype);
  }
  void backward(std::span<const Tensor> g, std::span<Tensor> out) override {
    Tensor in[N + 1];
    for (int k = 0; k <= N; ++k) in[k] = saved[k].get();
    // In formulas over Tensor a number keeps its digits: beside another one it would be a float32.
    if (grad_enabled())
      for (Tensor& t : in)
        if (t.defined() && t.impl()->wrapped) {
          const Tensor plain = empty({}, t.dtype());
          copy_raw(plain, t);
          t = plain;
        }
    [&]<int... I>(std::integer_sequence<int, I...>) {
      (
          [&] {
            if constexpr (I != condition_of<Op>)
              if (to[I]) out[I] = one<I>(g[0], in, std::make_integer_sequence<int, N + 1>{});
          }(),
          ...);
    }
    (std::make_integer_sequence<int, N>{});
  }
  void release() override {
    for (auto& s : saved) s = Saved();
  }
  std::span<Edge> edges() override { return to; }
};

// `in_place`: the first input is about to be changed, and to get this node as its history.
template <class Op, class... In>
Ref<Node> pointwise_node(const Op& op, bool in_place, const In&... in) {
  constexpr int N = sizeof...(In);
  const Tensor* t[] = {&in...};
  if constexpr (differentiable<Op>) {
    if (grad_enabled() && (in.requires_grad() || ...)) {
      (refuse_placeholder(Op::name, in), ...);
      auto* node = new PointwiseNode<Op, N>(op);
      Ref<Node> owner(node);
      unsigned read = 0;
      [&]<int... I>(std::integer_sequence<int, I...>) {
        (
            [&] {
              node->to[I] = Edge(*t[I]);
              if constexpr (I != condition_of<Op>)
                if (node->to[I]) read |= uses_of<Op, I>.tensors;
            }(),
            ...);
      }
      (std::make_integer_sequence<int, N>{});
      for (int k = 0; k < N; ++k)
        // What is changed is kept for the error that a use of it is; with its history it would
        // own the node.
        if (read >> (k + 1) & 1)
          node->saved[k] = Saved(in_place && t[k]->is_same(*t[0]) ? t[k]->detach() : *t[k]);
      node->reads_output = read >> (N + 1) & 1;
      return owner;
    }
  }
  if (!grad_enabled()) track_leaves(t);
  return {};
}

template <class Op, class... In>
void attach(const Tensor& y, Ref<Node> node) {
  if (!node) return;
  auto* n = static_cast<PointwiseNode<Op, sizeof...(In)>*>(node.get());
  if (n->reads_output) n->saved[sizeof...(In)] = Saved(y, kOutput);
  set_history(y, std::move(node));
}

// Error where an in-place change of `x` would break the graph.
// `gives_history`: another input requires a gradient.
void check_in_place(const char* op, const Tensor& x, bool gives_history);

}  // namespace autograd

template <class Op, std::same_as<Tensor>... In>
Tensor call(const Op& op, const In&... in) {
  const Tensor* t[] = {&in...};
  Plan p = plan(Op::name, t, condition_of<Op>, kinds_of<Op>, gives_bool<Op>);
  Tensor y = output(p, t);
  evaluate(op, y, p.common, in...);
  autograd::attach<Op, In...>(y, autograd::pointwise_node(op, false, in...));
  return y;
}

template <class Op, std::same_as<Tensor>... In>
Tensor& call_(const Op& op, Tensor& x, const In&... in) {  // x = op(x, in...)
  const Tensor* t[] = {&x, &in...};
  Plan p = plan(Op::name, t, condition_of<Op>, kinds_of<Op>, gives_bool<Op>);
  check_writable(Op::name, x, p, true);
  (check_no_overlap(Op::name, x, in), ...);
  autograd::check_in_place(Op::name, x, (in.requires_grad() || ...));
  Ref<autograd::Node> node = autograd::pointwise_node(op, true, x, in...);
  evaluate(op, x, p.common, x, in...);
  x.bump_version();
  autograd::attach<Op, Tensor, In...>(x, std::move(node));
  return x;
}

template <class Op, std::same_as<Tensor>... In>
Tensor& call_out(const Op& op, Tensor& out, const In&... in) {
  const Tensor* t[] = {&in...};
  Plan p = plan(Op::name, t, condition_of<Op>, kinds_of<Op>, gives_bool<Op>);
  if (grad_enabled() && (in.requires_grad() || ...))
    fail("[", Op::name,
         "] an output given by the caller does not support automatic differentiation");
  check_writable(Op::name, out, p, false);
  evaluate(op, out, p.common, in...);
  out.bump_version();
  return out;
}

}  // namespace sherd
