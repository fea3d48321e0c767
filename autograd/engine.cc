#include "autograd/engine.h"

#include <algorithm>
#include <array>
#include <mutex>
#include <unordered_map>

#include "autograd/ops.h"
#include "autograd/pointwise.h"
#include "core/context.h"

namespace sherd {
namespace autograd {
namespace {

struct Observers {
  std::vector<BackwardObserver*> list;
};

bool owned(const Tensor& t) { return t.impl()->count == 1 && t.storage()->count == 1; }

// a + b; into a's bytes where nobody else can see them.
void add_to(Tensor& into, Tensor g) {
  if (!into.defined())
    into = std::move(g);
  else if (!grad_enabled() && owned(into) && into.is_contiguous() && into.dtype() == g.dtype())
    into.add_(g);
  else
    into = into + g;
}

struct Task {
  Ref<Node> node;
  std::vector<Tensor> gradients;
  bool needed = true;
};

struct LeafState {
  Ref<AutogradMeta> meta;
  int expected = 0;
  Tensor sum;  // where hooks want the whole gradient
  bool contributed = false;
};

// The gradient that `n` gave for its input `i`, in the input's shape and dtype.
Tensor fitted(const Node& n, size_t i, const Edge& input, Tensor g) {
  if (!(g.sizes() == input.sizes)) {
    bool expanded = g.dim() >= input.sizes.n;
    for (int d = 1; expanded && d <= input.sizes.n; ++d) {
      const int64_t size = input.sizes[input.sizes.n - d];
      expanded = size == 1 || size == g.sizes()[g.dim() - d];
    }
    if (!expanded)
      fail("[", n.op(), "] its backward returned a gradient of shape ", g.sizes(), " for input ", i,
           " of shape ", input.sizes, ": it must have that shape, or one that it broadcasts to");
    g = sum_to(g, input.sizes);
  }
  if (g.device() != input.device)
    fail("[", n.op(), "] its backward returned a gradient on ", g.device(), " for input ", i,
         ", which is on ", input.device);
  return g.dtype() == input.dtype ? g : g.to(input.dtype);
}

class Run {
 public:
  // `outer`: the run that this one is nested in (a recomputation), or null.
  Run(Run* outer, const std::vector<Tensor>& roots, std::span<const Tensor> gradients,
      const std::vector<Tensor>& inputs, bool accumulate, bool retain, bool create_graph);
  void execute();
  std::vector<Tensor> captured;

  // The task that runs now.
  Node* node = nullptr;
  std::span<const Edge> edges;
  std::vector<Tensor> handed;  // by edge: destinations given out
  GradSink::Destination destination(int i, DType dtype);

  Run* const outer;

 private:
  using Key = std::pair<Node*, int>;
  struct KeyHash {
    size_t operator()(const Key& k) const {
      return std::hash<void*>()(k.first) * 31 + size_t(k.second);
    }
  };

  void collect(const std::vector<Edge>& roots);
  void mark_needed();
  Plan make_plan();
  Tensor* capture(AutogradMeta* leaf);
  void run_task(Task& task);
  void deliver(const Edge& edge, Tensor g);
  void add_to_leaf(AutogradMeta& meta, Tensor g);
  void count_down(AutogradMeta& meta);
  void enter_scopes(const Node& node);
  bool is_entered(Scope* s) const;
  // Where a nested run ends: at results from outside of the region, whose history is the outer
  // run's.
  bool is_boundary(const Edge& e) const {
    return outer && e.node && node_captures_.count({e.node.get(), e.output});
  }
  void leave_until(uint64_t sequence);

  Run& outermost() { return outer ? outer->outermost() : *this; }

  bool accumulate_, retain_, create_graph_;
  std::vector<Edge> roots_;
  std::vector<Tensor> root_gradients_;
  std::vector<Task> tasks_;  // by falling sequence number
  std::unordered_map<Node*, int> index_;
  std::unordered_map<AutogradMeta*, LeafState> leaves_;  // of the outermost run
  std::unordered_map<AutogradMeta*, std::vector<int>> leaf_captures_;
  std::unordered_map<Key, std::vector<int>, KeyHash> node_captures_;
  std::vector<Ref<Scope>> entered_;
};

thread_local Run* current_run = nullptr;

// Each may replace the gradient by one of the same shape and dtype. A copy: hooks may add others.
void run_hooks(const std::vector<TensorHook> hooks, const char* of, Tensor& g) {
  for (auto& hook : hooks) {
    Tensor r = hook(g);
    if (!r.defined()) continue;
    if (r.sizes() != g.sizes() || r.dtype() != g.dtype())
      fail("[backward] a hook on ", of, " returned a gradient ", r.sizes(), " ", r.dtype(),
           " for one of ", g.sizes(), " ", g.dtype(), ": it must keep shape and dtype");
    g = std::move(r);
  }
}

Run::Run(Run* outer, const std::vector<Tensor>& roots, std::span<const Tensor> gradients,
         const std::vector<Tensor>& inputs, bool accumulate, bool retain, bool create_graph)
    : captured(inputs.size()),
      outer(outer),
      accumulate_(accumulate),
      retain_(retain || create_graph),
      create_graph_(create_graph) {
  if (!gradients.empty() && gradients.size() != roots.size())
    fail("[backward] ", gradients.size(), " gradients were given for ", roots.size(), " outputs");
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].requires_grad())
      fail("[grad] input ", i,
           " does not require a gradient: call requires_grad_() before it is used");
    Edge e(inputs[i]);
    if (e.leaf) {
      if (e.leaf->shard)
        fail("[grad] input ", i, " (", e.leaf->name,
             ") is a sharded parameter: use backward(), or grad() on the unwrapped model");
      leaf_captures_[e.leaf.get()].push_back(int(i));
    } else {
      node_captures_[{e.node.get(), e.output}].push_back(int(i));
    }
  }
  for (size_t i = 0; i < roots.size(); ++i) {
    const Tensor& y = roots[i];
    Tensor g = i < gradients.size() ? gradients[i] : Tensor();
    if (!y.defined()) fail("[backward] output ", i, " is undefined");
    if (!y.requires_grad()) {
      if (outer) continue;
      fail("[backward] output ", i, " of shape ", y.sizes(),
           " does not require a gradient and has no history: none of its inputs asked for one, or "
           "it was computed under no_grad");
    }
    if (!g.defined()) {
      if (y.numel() != 1)
        fail("[backward] a gradient is needed for an output of shape ", y.sizes(),
             ": only a tensor of one element has an implicit gradient of 1");
      g = ones(y.sizes(), y.dtype(), y.device());
    } else if (!(g.sizes() == y.sizes())) {
      fail("[backward] the gradient's shape ", g.sizes(), " is not the output's ", y.sizes());
    } else if (g.device() != y.device()) {
      fail("[backward] the gradient of output ", i, " is on ", g.device(), ", and that on ",
           y.device());
    } else if (g.dtype() != y.dtype()) {
      g = g.to(y.dtype());
    }
    roots_.emplace_back(y);
    root_gradients_.push_back(std::move(g));
  }
  collect(roots_);
  mark_needed();
}

void Run::collect(const std::vector<Edge>& roots) {
  std::vector<Node*> stack;
  auto visit = [&](const Ref<Node>& node) {
    if (!node || !index_.emplace(node.get(), 0).second) return;
    if (node->released())
      fail("[", node->op(),
           "] backward was run a second time through a part of the graph whose saved values were "
           "freed: use "
           "retain_graph the first time");
    tasks_.push_back({node, {}, true});
    stack.push_back(node.get());
  };
  for (auto& e : roots)
    if (!is_boundary(e)) visit(e.node);
  while (!stack.empty()) {
    Node* n = stack.back();
    stack.pop_back();
    for (auto& e : n->edges())
      if (!is_boundary(e)) visit(e.node);
  }
  std::sort(tasks_.begin(), tasks_.end(),
            [](const Task& a, const Task& b) { return a.node->sequence() > b.node->sequence(); });
  for (size_t i = 0; i < tasks_.size(); ++i) {
    index_[tasks_[i].node.get()] = int(i);
    tasks_[i].gradients.resize(tasks_[i].node->outputs());
  }
}

// grad() runs only what lies between the outputs and its inputs.
void Run::mark_needed() {
  const bool all = accumulate_;
  auto add_leaf = [&](AutogradMeta* m) {
    LeafState& s = outermost().leaves_[m];
    s.meta = Ref<AutogradMeta>(m);
    if (!outer) ++s.expected;
  };
  for (auto it = tasks_.rbegin(); it != tasks_.rend(); ++it) {
    bool needed = all;
    for (auto& e : it->node->edges()) {
      if (needed) break;
      needed = is_boundary(e) ? true
               : e.node       ? tasks_[index_[e.node.get()]].needed ||
                              node_captures_.count({e.node.get(), e.output})
                        : capture(e.leaf.get()) != nullptr;
    }
    for (auto& m : it->node->listed_leaves()) needed = needed || capture(m.get());
    it->needed = needed;
    if (!needed) continue;
    for (auto& e : it->node->edges())
      if (e.leaf) add_leaf(e.leaf.get());
    for (auto& m : it->node->listed_leaves()) add_leaf(m.get());
  }
  for (auto& e : roots_)
    if (e.leaf) add_leaf(e.leaf.get());
}

Tensor* Run::capture(AutogradMeta* leaf) {
  for (Run* r = this; r; r = r->outer)
    if (auto it = r->leaf_captures_.find(leaf); it != r->leaf_captures_.end())
      return &r->captured[it->second[0]];
  return nullptr;
}

Plan Run::make_plan() {
  Plan plan;
  plan.accumulates = accumulate_;
  plan.create_graph = create_graph_;
  std::vector<Scope*> seen;
  auto add = [&](Scope* s, bool recomputed) {
    if (std::find(seen.begin(), seen.end(), s) != seen.end()) return;
    seen.push_back(s);
    plan.scopes.push_back({s, recomputed});
  };
  for (auto& t : tasks_) {
    if (!t.needed) continue;
    std::vector<Scope*> chain;
    for (Scope* s = t.node->scope().get(); s; s = s->parent().get()) chain.push_back(s);
    for (auto it = chain.rbegin(); it != chain.rend(); ++it) add(*it, false);
    for (auto& s : t.node->listed_scopes()) add(s.get(), true);
  }
  for (auto& [m, s] : leaves_) plan.leaves.emplace_back(m, s.expected);
  return plan;
}

bool Run::is_entered(Scope* s) const {
  for (const Run* r = this; r; r = r->outer)
    for (auto& e : r->entered_)
      if (e.get() == s) return true;
  return false;
}

void Run::leave_until(uint64_t sequence) {
  while (!entered_.empty() && entered_.back()->begin() > sequence) {
    Ref<Scope> s = std::move(entered_.back());
    entered_.pop_back();
    s->on_leave();
  }
}

void Run::enter_scopes(const Node& n) {
  if (!n.scope() || is_entered(n.scope().get())) return;
  std::vector<Scope*> chain;
  for (Scope* s = n.scope().get(); s && !is_entered(s); s = s->parent().get()) chain.push_back(s);
  for (auto it = chain.rbegin(); it != chain.rend(); ++it) {
    entered_.emplace_back(*it);
    (*it)->on_enter();
  }
}

void Run::add_to_leaf(AutogradMeta& m, Tensor g) {
  if (m.sink) {
    m.sink->accept(m, g);
    return;
  }
  // Backwards of other threads may have the same leaf.
  static std::array<std::mutex, 64> locks;
  std::lock_guard lock(locks[(reinterpret_cast<uintptr_t>(&m) >> 6) % locks.size()]);
  if (!m.grad.defined()) {
    if (create_graph_) {
      m.grad = g.clone();
      return;
    }
    MemoryScope scope(MemoryCategory::kGradients);
    if (owned(g) && g.is_contiguous() && g.nbytes() == g.storage()->bytes()) {
      g.storage()->set_category(MemoryCategory::kGradients);
      m.grad = std::move(g);
    } else {
      m.grad = g.detach().clone();
    }
  } else if (create_graph_ || m.grad.requires_grad()) {
    m.grad = m.grad + g;
  } else {
    m.grad.add_(g);
  }
}

void Run::deliver(const Edge& edge, Tensor g) {
  if (is_boundary(edge)) {
    for (int i : node_captures_[{edge.node.get(), edge.output}])
      if (g.defined()) add_to(captured[i], g);
    return;
  }
  if (edge.node) {
    if (g.defined()) add_to(tasks_[index_[edge.node.get()]].gradients[edge.output], std::move(g));
    return;
  }
  AutogradMeta& m = *edge.leaf;
  if (Tensor* to = capture(&m)) {
    if (g.defined()) add_to(*to, std::move(g));
  } else if (outermost().accumulate_) {
    if (g.defined()) {
      LeafState& s = outermost().leaves_[&m];
      s.contributed = true;
      if (m.hooks.empty())
        add_to_leaf(m, std::move(g));
      else
        add_to(s.sum, std::move(g));
    }
    if (!outer) count_down(m);
  }
}

void Run::count_down(AutogradMeta& m) {
  LeafState& s = leaves_[&m];
  if (--s.expected > 0 || !accumulate_ || capture(&m)) return;
  if (s.sum.defined()) {
    Tensor g = std::move(s.sum);
    s.sum = {};
    run_hooks(m.hooks, m.name.empty() ? "a leaf" : m.name.c_str(), g);
    add_to_leaf(m, std::move(g));
  }
  if (m.sink) m.sink->complete(m);
  if (!m.sink && s.contributed) run_post_hooks(m, m.grad);
}

GradSink::Destination Run::destination(int i, DType dtype) {
  const Edge& e = edges[i];
  if (const Node::Hooks* h = node->hooks_or_null(); h && !h->after.empty()) return {};
  if (!e.leaf || !e.leaf->sink || !e.leaf->hooks.empty() || create_graph_ ||
      !outermost().accumulate_)
    return {};
  if (capture(e.leaf.get())) return {};
  GradSink::Destination d = e.leaf->sink->destination(*e.leaf, dtype);
  handed[i] = d.tensor;
  return d;
}

void Run::run_task(Task& task) {
  Node& n = *task.node;
  std::vector<Tensor> g = std::move(task.gradients);
  if (const Node::Hooks* h = n.hooks_or_null()) {
    for (int k = 0; k < n.outputs(); ++k)
      if (g[k].defined()) run_hooks(h->output_hooks[k], n.op(), g[k]);
    if (task.needed)
      for (auto& hook : std::vector(h->before)) hook(g);
  }
  for (int k = 0; k < n.outputs(); ++k)
    if (auto it = node_captures_.find({&n, k}); it != node_captures_.end())
      for (int i : it->second) captured[i] = g[k];
  if (!task.needed) return;

  std::span<Edge> to = n.edges();
  std::vector<Tensor> out(to.size());
  const bool any = std::any_of(g.begin(), g.end(), [](const Tensor& t) { return t.defined(); });
  if (any) {
    node = &n, edges = to;
    handed.assign(to.size(), Tensor());
    n.backward(g, out);
    node = nullptr;
    if (const Node::Hooks* h = n.hooks_or_null())
      for (auto& hook : std::vector(h->after)) hook(g, out);
  }
  g.clear();
  if (!retain_) n.release(), n.set_released();
  const auto is_delivered = [&](size_t i) {
    return any && handed[i].defined() && out[i].defined() && out[i].is_same(handed[i]);
  };
  for (size_t i = 0; i < to.size(); ++i)  // all, before one is added to anything
    if (to[i] && out[i].defined() && !is_delivered(i))
      out[i] = fitted(n, i, to[i], std::move(out[i]));
  for (size_t i = 0; i < to.size(); ++i) {
    if (!to[i]) continue;
    if (!is_delivered(i))
      deliver(to[i], std::move(out[i]));
    else if (!outer)
      count_down(*to[i].leaf);
    out[i] = {};
  }
  handed.clear();
  for (auto& s : n.listed_scopes()) s->on_recomputed();
  if (!outer)
    for (auto& m : n.listed_leaves()) count_down(*m);
}

void Run::execute() {
  GradMode mode(create_graph_);
  std::vector<BackwardObserver*> observers, taking_part;
  if (!outer) observers = Context::current().state<Observers>().list;
  struct Restore {
    Run* before;
    ~Restore() { current_run = before; }
  } restore{current_run};
  current_run = this;
  try {
    if (!observers.empty()) {
      const Plan plan = make_plan();
      for (auto* o : observers)
        if (o->on_plan(plan)) taking_part.push_back(o);
    }
    for (size_t i = 0; i < roots_.size(); ++i) deliver(roots_[i], std::move(root_gradients_[i]));
    for (auto& task : tasks_) {
      if (task.needed) {
        leave_until(task.node->sequence());
        enter_scopes(*task.node);
      }
      run_task(task);
    }
    leave_until(0);
    for (auto& [leaf, places] : leaf_captures_) {
      if (Tensor& g = captured[places[0]]; g.defined())
        run_hooks(leaf->hooks, leaf->name.empty() ? "a leaf" : leaf->name.c_str(), g);
      for (int i : places) captured[i] = captured[places[0]];
    }
  } catch (...) {
    entered_.clear();
    current_run = restore.before;
    for (auto* o : taking_part) {
      try {
        o->on_end(true);
      } catch (const std::exception&) {  // what broke the backward is on its way already
      }
    }
    throw;
  }
  current_run = restore.before;
  std::exception_ptr error;  // every observer is told, whatever another one throws
  for (auto* o : taking_part) {
    try {
      o->on_end(false);
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace

Node* running_node() { return current_run ? current_run->node : nullptr; }

GradSink::Destination gradient_destination(int i, DType dtype) {
  return current_run ? current_run->destination(i, dtype) : GradSink::Destination{};
}

void add_observer(BackwardObserver* o) { Context::current().state<Observers>().list.push_back(o); }
void remove_observer(BackwardObserver* o) {
  std::erase(Context::current().state<Observers>().list, o);
}

std::vector<Tensor> nested_backward(const std::vector<Tensor>& roots,
                                    std::span<const Tensor> gradients,
                                    const std::vector<Tensor>& inputs) {
  Run run(current_run, roots, gradients, inputs, true, false, false);
  run.execute();
  return std::move(run.captured);
}

}  // namespace autograd

std::vector<Tensor> grad(const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs,
                         const std::vector<Tensor>& gradients, const GradOptions& options) {
  autograd::Run run(nullptr, outputs, gradients, inputs, false, options.retain_graph,
                    options.create_graph);
  run.execute();
  if (!options.allow_unused)
    for (size_t i = 0; i < inputs.size(); ++i)
      if (!run.captured[i].defined())
        fail("[grad] the outputs do not depend on input ", i, " of shape ", inputs[i].sizes(),
             ": set allow_unused if that is intended");
  return std::move(run.captured);
}

void backward(const std::vector<Tensor>& outputs, const std::vector<Tensor>& gradients,
              const GradOptions& options) {
  autograd::Run run(nullptr, outputs, gradients, {}, true, options.retain_graph,
                    options.create_graph);
  run.execute();
}

void Tensor::backward(const Tensor& gradient, bool retain_graph, bool create_graph) const {
  sherd::backward({*this},
                  gradient.defined() ? std::vector<Tensor>{gradient} : std::vector<Tensor>{},
                  {.retain_graph = retain_graph, .create_graph = create_graph});
}

}  // namespace sherd
