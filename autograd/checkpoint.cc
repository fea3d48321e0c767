#include "autograd/checkpoint.h"

#include <algorithm>

#include "autograd/checkpoint_tracker.h"
#include "autograd/engine.h"
#include "autograd/record.h"
#include "core/generator.h"

namespace sherd {
namespace autograd {
namespace {

thread_local CheckpointTracker* tracker = nullptr;
thread_local bool recomputing = false;

template <class T>
class Restore {
 public:
  Restore(T& variable, T value) : variable_(variable), before_(variable) { variable = value; }
  ~Restore() { variable_ = before_; }

 private:
  T& variable_;
  T before_;
};

// Draws what was drawn then, and goes on from where it was.
class RestoreGenerator {
 public:
  explicit RestoreGenerator(const Generator::State& then) : now_(default_generator().state()) {
    default_generator().set_state(then);
  }
  ~RestoreGenerator() { default_generator().set_state(now_); }

 private:
  Generator::State now_;
};

class CheckpointNode final : public Node {
 public:
  CheckpointNode(TensorFunction f, const std::vector<Tensor>& inputs, CheckpointTracker tracked,
                 int outputs, Generator::State random)
      : Node("checkpoint", outputs),
        f_(std::move(f)),
        scopes_(std::move(tracked.scopes)),
        leaves_(std::move(tracked.leaves)),
        random_(random) {
    for (auto& t : inputs) edges_.emplace_back(t), inputs_.emplace_back(t);
    // [Note: captured results] The function reads them by itself; their gradients leave the region
    // as an input's do.
    for (auto& t : tracked.captured) edges_.emplace_back(t), captured_.push_back(t);
    // What the region's leaves are to FSDP: kept for backward, by every scope that is open around
    // the region.
    for (Scope* s = scope().get(); s; s = s->parent().get())
      for (auto& t : inputs) s->on_save(t);
  }

  void backward(std::span<const Tensor> gradients, std::span<Tensor> out) override {
    if (grad_enabled())
      fail(
          "[checkpoint] create_graph through a checkpointed region is not supported: checkpoint "
          "less, or take the "
          "second derivative without it");
    std::vector<Tensor> inputs, wanted;
    for (size_t i = 0; i < inputs_.size(); ++i) {
      Tensor t = inputs_[i].get();
      if (edges_[i]) t = t.detach().set_requires_grad(true), wanted.push_back(t);
      inputs.push_back(t);
    }
    std::vector<Tensor> outputs;
    {
      GradMode on(true);
      Restore<bool> flag(recomputing, true);
      // [Note: recomputation's scope] Its nodes belong where the region stood in forward.
      ResumeScope resume(scope());
      RestoreGenerator generator(random_);
      outputs = f_(inputs);
      if (outputs.size() != gradients.size())
        fail("[checkpoint] the recomputation returned ", outputs.size(),
             " outputs, the first pass ", gradients.size());
    }
    std::vector<Tensor> roots, root_gradients;
    bool any = false;
    for (size_t k = 0; k < outputs.size(); ++k) {
      if (!gradients[k].defined()) continue;
      if (!(outputs[k].sizes() == gradients[k].sizes()))
        fail("[checkpoint] output ", k, " of the recomputation has shape ", outputs[k].sizes(),
             ", that of the first pass ", gradients[k].sizes(),
             ": the function must do the same both times");
      any = any || outputs[k].requires_grad();
      roots.push_back(outputs[k]), root_gradients.push_back(gradients[k]);
    }
    if (!any)
      fail(
          "[checkpoint] no output of the recomputation that a gradient came for has a history: the "
          "function must do the same both times, and compute them from its inputs or parameters");
    outputs.clear();
    for (auto& t : captured_) wanted.push_back(t);
    std::vector<Tensor> got = nested_backward(roots, root_gradients, wanted);
    for (size_t i = 0, k = 0; i < inputs_.size(); ++i)
      if (edges_[i]) out[i] = std::move(got[k++]);
    for (size_t i = 0; i < captured_.size(); ++i)
      out[inputs_.size() + i] = std::move(got[got.size() - captured_.size() + i]);
  }
  void release() override { f_ = nullptr, inputs_.clear(), captured_.clear(); }
  std::span<Edge> edges() override { return edges_; }
  std::span<const Ref<Scope>> listed_scopes() const override { return scopes_; }
  std::span<const Ref<AutogradMeta>> listed_leaves() const override { return leaves_; }

 private:
  TensorFunction f_;
  std::vector<Edge> edges_;
  std::vector<Saved> inputs_;
  std::vector<Tensor> captured_;
  std::vector<Ref<Scope>> scopes_;
  std::vector<Ref<AutogradMeta>> leaves_;
  Generator::State random_;
};

}  // namespace

CheckpointTracker* checkpoint_tracker() { return tracker; }
bool is_checkpointing() { return tracker != nullptr; }
bool is_recomputing() { return recomputing; }

void note_leaf(CheckpointTracker& tracker, const Tensor& t) {
  AutogradMeta* m = meta_of(t);
  if (!m || std::find(tracker.inputs.begin(), tracker.inputs.end(), m) != tracker.inputs.end())
    return;
  if (m->grad_fn) {
    for (auto& known : tracker.captured)
      if (meta_of(known) == m) return;
    tracker.captured.push_back(t);
    return;
  }
  if (!m->requires_grad) return;
  for (auto& known : tracker.leaves)
    if (known.get() == m) return;
  tracker.leaves.emplace_back(m);
  for (Scope* s = current_scope().get(); s; s = s->parent().get()) s->on_save(t);
}

}  // namespace autograd

std::vector<Tensor> checkpoint(const TensorFunction& f, const std::vector<Tensor>& inputs) {
  using namespace autograd;
  if (!grad_enabled() || is_checkpointing()) return f(inputs);
  CheckpointTracker tracked;
  for (auto& t : inputs)
    if (AutogradMeta* m = meta_of(t)) tracked.inputs.push_back(m);
  const Generator::State random = default_generator().state();
  std::vector<Tensor> outputs;
  {
    NoGrad off;
    Restore<CheckpointTracker*> first_pass(tracker, &tracked);
    outputs = f(inputs);
  }
  bool any = !tracked.leaves.empty() || !tracked.captured.empty();
  for (auto& t : inputs) any = any || (t.defined() && t.requires_grad());
  if (!any) return outputs;
  auto node =
      Ref<Node>(new CheckpointNode(f, inputs, std::move(tracked), int(outputs.size()), random));
  for (size_t k = 0; k < outputs.size(); ++k) {
    if (!is_float(outputs[k].dtype())) continue;
    for (auto& t : inputs)
      if (outputs[k].is_same(t)) outputs[k] = alias_of_input(t);
    if (meta_of(outputs[k])) outputs[k] = outputs[k].detach();
    set_history(outputs[k], node, int(k));
  }
  return outputs;
}

Tensor checkpoint(const std::function<Tensor(const Tensor&)>& f, const Tensor& input) {
  return checkpoint([f](const std::vector<Tensor>& in) { return std::vector<Tensor>{f(in[0])}; },
                    std::vector<Tensor>{input})[0];
}

}  // namespace sherd
