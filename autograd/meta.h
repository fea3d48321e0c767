// AutogradMeta: what autograd keeps of a tensor. Two tensors may share one (FSDP's local and full
// parameter do): then they have one gradient, one requires_grad and one list of hooks.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace sherd::autograd {

struct AutogradMeta;
class Node;

// Gets the gradient, may return another (of its shape) or an undefined tensor to leave it.
using TensorHook = std::function<Tensor(const Tensor& gradient)>;

// GradSink: takes a leaf's gradient instead of `grad` (FSDP's and DDP's flat buffers). Called by
// the engine, on the backward's thread, in the order of contributions.
class GradSink {
 public:
  struct Destination {
    Tensor
        tensor;  // of the leaf's shape; undefined: not offered, hand the contribution to accept()
    bool accumulate = false;
  };
  virtual ~GradSink() = default;
  // Where an op may write its contribution (of `dtype`) itself. It then counts as delivered.
  virtual Destination destination(AutogradMeta& leaf, DType dtype) = 0;
  virtual void accept(AutogradMeta& leaf, const Tensor& contribution) = 0;
  // After the last contribution of this backward, before any other node runs; once a backward.
  virtual void complete(AutogradMeta& leaf) = 0;
};

struct AutogradMeta : Counted {
  // ---- a result
  Ref<Node> grad_fn;
  int output = 0;  // which output of grad_fn
  // ---- a leaf
  bool requires_grad = false;
  Tensor grad;
  std::vector<TensorHook> hooks;  // before the gradient is accumulated
  std::vector<std::function<void(const Tensor&)>>
      post_hooks;  // after it was, with grad as it then is
  std::shared_ptr<GradSink> sink;
  Ref<Counted> shard;  // nn::ShardInfo of a sharded parameter
  std::string name;    // full parameter name, for messages

  ~AutogradMeta() override;
};

// The tensor's meta; none for a plain constant.
inline AutogradMeta* meta_of(const Tensor& t) {
  return t.defined() ? static_cast<AutogradMeta*>(t.impl()->autograd.get()) : nullptr;
}
AutogradMeta& make_meta(const Tensor& t);  // makes one if there is none
// Makes `t` share the other's meta.
void share_meta(const Tensor& t, const Tensor& other);

// On a leaf: before accumulation. On a result: before its node runs.
void register_hook(const Tensor& t, TensorHook hook);
// After a leaf's gradient was accumulated, with the gradient, once a backward. A hook that holds
// the leaf itself keeps it alive for good.
void register_post_accumulate_grad_hook(const Tensor& leaf,
                                        std::function<void(const Tensor&)> hook);
void run_post_hooks(const AutogradMeta& leaf, const Tensor& gradient);  // they may add others

}  // namespace sherd::autograd
