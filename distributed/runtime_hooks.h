// What Runtime hangs on the modules of its units, and on the nodes that their forwards record: for
// runtime*.cc alone.
#pragma once
#include "distributed/runtime.h"

namespace sherd::dist {

// The nodes of one call of a unit's module.
class Runtime::UnitScope : public autograd::Scope {
 public:
  UnitScope(std::shared_ptr<Runtime> runtime, int unit)
      : runtime_(std::move(runtime)), unit_(unit) {}
  const Runtime* runtime() const { return runtime_.get(); }
  int unit() const { return unit_; }
  bool reads_parameters() const { return !saved_.empty(); }

  void on_enter() override {
    for (auto& [entry, version] : saved_)
      if (entry->local.version() != version)
        fail("[backward] parameter ", entry->name,
             " was changed in place after this forward saved it for backward: run the forward "
             "again after the change");
    runtime_->enter(unit_);
  }
  void on_leave() override { runtime_->leave(unit_); }
  void on_recomputed() override { runtime_->recomputed(unit_); }
  void on_save(const Tensor& t) override {
    const Unit::Entry* e = runtime_->units_[unit_]->find_full(t);
    if (!e) return;
    for (auto& s : saved_)
      if (s.first == e) return;
    saved_.emplace_back(e, e->local.version());
  }

 private:
  std::shared_ptr<Runtime> runtime_;
  int unit_;
  // Parameters whose full tensors backward reads, with the version of the local one then.
  std::vector<std::pair<const Unit::Entry*, uint32_t>> saved_;
};

struct Runtime::Forward {
  int unit;
  ForwardKind kind;
  Ref<UnitScope> scope;
  std::unique_ptr<autograd::ScopeGuard> guard;
};

// On a unit's module. It outlives the facade, so that the module stays usable.
class Runtime::Hooks : public nn::CallHooks {
 public:
  explicit Hooks(std::shared_ptr<Unit> unit) : unit(std::move(unit)) {}
  ~Hooks() override { unit->detach_module(); }

  std::shared_ptr<Unit> unit;
  std::shared_ptr<Runtime> runtime;
  int index = 0;

  void pre(nn::Module&, const nn::TensorVisitor& inputs) override {
    runtime->forward_pre(index, inputs);
  }
  void post(nn::Module&, const nn::TensorVisitor& outputs) override {
    runtime->forward_post(index, outputs);
  }
  void unwind(nn::Module&) noexcept override { runtime->forward_unwind(index); }

  static std::shared_ptr<Hooks> on(nn::Module& m) {
    for (auto& h : m.state().hooks)
      if (auto mine = std::dynamic_pointer_cast<Hooks>(h)) return mine;
    return nullptr;
  }
};

}  // namespace sherd::dist
