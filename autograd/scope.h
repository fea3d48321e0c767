// Scope: the nodes that one stretch of forward made, such as one call of a module. FSDP learns from
// scopes when a backward reaches a unit and when it has left it.
//
//     struct MyScope : autograd::Scope {
//       void on_enter() override {...}
//       void on_leave() override {...}
//     };
//     {
//       autograd::ScopeGuard guard(make_ref<MyScope>());      // nested scopes are children
//       y = module.forward(x);
//     }
//
// A backward runs its nodes in strictly falling order of their sequence numbers ([Note: order]), so
// a scope's nodes are one run of them: `on_enter` is called before the first (outer scopes first),
// `on_leave` before the first node older than the scope, or at the end (inner first). Each at most
// once a backward. A scope lives as long as its nodes do.
#pragma once
#include <cstdint>
#include <vector>

#include "core/ref.h"
#include "core/tensor.h"

namespace sherd::autograd {

class Scope : public Counted {
 public:
  virtual void on_enter() {}
  virtual void on_leave() {}
  // For a scope that the first pass of a checkpointed region opened (it has no nodes): the region
  // was recomputed and its nested backward has ended, with or without having opened such a scope
  // anew.
  virtual void on_recomputed() {}
  // An op recorded inside keeps this tensor for backward. Called for every open scope.
  virtual void on_save(const Tensor&) {}

  uint64_t begin() const {
    return begin_;
  }  // nodes of the scope have at least this sequence number
  const Ref<Scope>& parent() const { return parent_; }
  bool has_nodes() const { return nodes_ > 0; }  // some were made since it was opened

 private:
  friend class ScopeGuard;
  friend class Node;
  uint64_t begin_ = 0;
  int64_t nodes_ = 0;
  Ref<Scope> parent_;
};

// Opens the scope for this thread until destroyed.
class ScopeGuard {
 public:
  explicit ScopeGuard(Ref<Scope> scope);
  ~ScopeGuard();
  ScopeGuard(const ScopeGuard&) = delete;
  ScopeGuard& operator=(const ScopeGuard&) = delete;

 private:
  Ref<Scope> before_;
};

const Ref<Scope>& current_scope();  // innermost open one; none: null

// Sets this thread's innermost scope as it is (recomputation continues in the checkpoint's scope).
class ResumeScope {
 public:
  explicit ResumeScope(Ref<Scope> scope);
  ~ResumeScope();
  ResumeScope(const ResumeScope&) = delete;
  ResumeScope& operator=(const ResumeScope&) = delete;

 private:
  Ref<Scope> before_;
};

}  // namespace sherd::autograd
