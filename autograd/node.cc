#include "autograd/node.h"

#include <algorithm>

#include "autograd/checkpoint_tracker.h"
#include "autograd/record.h"

namespace sherd {
namespace {
thread_local bool recording = true;
}  // namespace

bool grad_enabled() { return recording; }
GradMode::GradMode(bool on) : before_(recording) { recording = on; }
GradMode::~GradMode() { recording = before_; }

namespace autograd {
namespace {

std::atomic<uint64_t> next_sequence{1};
thread_local Ref<Scope> innermost;

}  // namespace

// ---- scopes
const Ref<Scope>& current_scope() { return innermost; }

ScopeGuard::ScopeGuard(Ref<Scope> scope) : before_(innermost) {
  scope->begin_ = next_sequence.load();
  scope->parent_ = innermost;
  if (CheckpointTracker* tracker = checkpoint_tracker()) tracker->scopes.push_back(scope);
  innermost = std::move(scope);
}
ScopeGuard::~ScopeGuard() { innermost = std::move(before_); }

ResumeScope::ResumeScope(Ref<Scope> scope) : before_(innermost) { innermost = std::move(scope); }
ResumeScope::~ResumeScope() { innermost = std::move(before_); }

// ---- meta
AutogradMeta::~AutogradMeta() { dispose(std::move(grad_fn)); }

AutogradMeta& make_meta(const Tensor& t) {
  if (!t.impl()->autograd) t.impl()->autograd = make_ref<AutogradMeta>();
  return *static_cast<AutogradMeta*>(t.impl()->autograd.get());
}

void share_meta(const Tensor& t, const Tensor& other) {
  make_meta(other);
  t.impl()->autograd = other.impl()->autograd;
}

void register_hook(const Tensor& t, TensorHook hook) {
  if (!t.requires_grad()) fail("[register_hook] the tensor does not require a gradient");
  AutogradMeta& m = make_meta(t);
  if (m.grad_fn)
    m.grad_fn->hooks().output_hooks[m.output].push_back(std::move(hook));
  else
    m.hooks.push_back(std::move(hook));
}

void register_post_accumulate_grad_hook(const Tensor& leaf,
                                        std::function<void(const Tensor&)> hook) {
  if (!leaf.requires_grad() || !leaf.is_leaf())
    fail("[register_post_accumulate_grad_hook] needs a leaf that requires a gradient");
  make_meta(leaf).post_hooks.push_back(std::move(hook));
}

void run_post_hooks(const AutogradMeta& leaf, const Tensor& gradient) {
  const auto hooks = leaf.post_hooks;
  const Tensor kept = gradient;  // one may set it to none
  for (auto& hook : hooks) hook(kept);
}

// ---- edges and nodes
Edge::Edge(const Tensor& t) {
  const AutogradMeta* m = meta_of(t);
  if (!m) return;
  if (m->grad_fn)
    node = m->grad_fn, output = m->output;
  else if (m->requires_grad)
    leaf = Ref<AutogradMeta>(const_cast<AutogradMeta*>(m));
  else
    return;
  dtype = t.dtype(), device = t.device(), sizes = t.sizes();
}
Edge::~Edge() {
  if (node) dispose(std::move(node));
}

void dispose(Ref<Node> node) {
  // Of the outermost call. A pointer: tensors in statics go when a thread's objects are gone.
  thread_local std::vector<Ref<Node>>* waiting = nullptr;
  if (!node) return;
  if (waiting) return waiting->push_back(std::move(node));
  std::vector<Ref<Node>> mine;
  mine.push_back(std::move(node));
  waiting = &mine;
  while (!mine.empty()) {
    Ref<Node> last = std::move(mine.back());
    mine.pop_back();
  }
  waiting = nullptr;
}

Node::Node(const char* op, int outputs)
    : op_(op), outputs_(outputs), sequence_(next_sequence.fetch_add(1)), scope_(innermost) {
  for (Scope* s = scope_.get(); s; s = s->parent_.get()) ++s->nodes_;
}
Node::~Node() = default;

Node::Hooks& Node::hooks() {
  if (!hooks_) hooks_ = std::make_unique<Hooks>(), hooks_->output_hooks.resize(outputs_);
  return *hooks_;
}

void refuse_placeholder(const char* op, const Tensor& t) {
  if (!t.defined() || !t.impl()->placeholder) return;
  const AutogradMeta* m = meta_of(t);
  fail("[", op, "] parameter ", m && !m->name.empty() ? m->name : std::string("(unnamed)"),
       " is sharded: this rank holds only its own part of it outside of its module's forward. Call "
       "the module "
       "through its forward (or register the method with nn::as_forward)");
}

// ---- recording
Tensor alias_of_input(const Tensor& x) {
  Tensor y = x.detach();
  y.impl()->is_view = true;
  return y;
}

Tensor apart_from(std::span<const Tensor* const> inputs, std::span<Edge> edges, const Tensor& y) {
  const auto is_y = [&](const Tensor* t) { return t->is_same(y); };
  if (std::ranges::none_of(inputs, is_y)) return y;
  const Tensor view = y.view(y.sizes());
  for (size_t i = 0; i < inputs.size(); ++i)
    if (is_y(inputs[i])) edges[i] = Edge(view);
  return alias_of_input(view);
}

namespace {
class ManyNode final : public Node {
 public:
  ManyNode(const char* op, int outputs, std::vector<Edge> edges, ManyBackward f)
      : Node(op, outputs), edges_(std::move(edges)), f_(std::move(f)) {}
  void backward(std::span<const Tensor> g, std::span<Tensor> out) override {
    std::vector<Tensor> r = f_(g, Needs{edges_});
    if (r.size() != edges_.size())
      fail("[", op(), "] its backward returned ", r.size(), " gradients for ", edges_.size(),
           " inputs");
    std::move(r.begin(), r.end(), out.begin());
  }
  void release() override { f_ = nullptr; }
  std::span<Edge> edges() override { return edges_; }

 private:
  std::vector<Edge> edges_;
  ManyBackward f_;
};
}  // namespace

std::vector<Tensor> record_many(const char* op, std::vector<Tensor> outputs,
                                const std::vector<Tensor>& inputs, ManyBackward f) {
  std::vector<const Tensor*> all;
  bool any = false;
  for (auto& t : inputs)
    refuse_placeholder(op, t), all.push_back(&t), any = any || t.requires_grad();
  if (!grad_enabled()) {
    track_leaves(all);
    return outputs;
  }
  if (!any) return outputs;
  std::vector<Edge> edges(inputs.begin(), inputs.end());
  for (auto& y : outputs) y = apart_from(all, edges, y);
  Ref<Node> node(new ManyNode(op, int(outputs.size()), std::move(edges), std::move(f)));
  for (size_t k = 0; k < outputs.size(); ++k)
    if (is_float(outputs[k].dtype())) set_history(outputs[k], node, int(k));
  return outputs;
}

// ---- saved tensors
Saved::Saved(const Tensor& t, SavedAs as, int output) {
  if (!t.defined()) return;
  output_ = as == kOutput ? output : -1;
  tensor_ = as == kOutput ? t.detach() : t;
  version_ = t.version();
  for (Scope* s = innermost.get(); s; s = s->parent().get()) s->on_save(t);
}

Tensor Saved::get() const {
  if (!tensor_.defined()) return {};
  const char* op = running_node() ? running_node()->op() : "backward";
  if (uint32_t now = tensor_.version(); now != version_)
    fail("[", op, "] a tensor of shape ", tensor_.sizes(),
         " that its backward needs was changed in place after it was saved: it is at version ", now,
         ", expected ", version_, ". Make the change on a clone");
  if (!tensor_.storage()->has_bytes())
    fail("[", op, "] a tensor of shape ", tensor_.sizes(), " that its backward needs was released");
  if (output_ < 0 || !grad_enabled()) return tensor_;
  Tensor t = tensor_.detach();
  set_history(t, Ref<Node>(running_node()), output_);
  return t;
}

}  // namespace autograd
}  // namespace sherd
