// Runtime: one root's units and their life in forward and backward. It reports what happens to
// GatherSchedule and carries out the steps that come back. It hears of forwards by module hooks,
// and of backwards by scopes, plans and gradient sinks of the engine (autograd/); nothing else ties
// it to models.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "autograd/engine.h"
#include "distributed/fsdp_options.h"
#include "distributed/unit.h"

namespace sherd {

// What a runtime did, since it was made.
struct FsdpStats {
  int64_t gathers = 0, reductions = 0;  // collectives; several dtypes of a unit count once
  int64_t gathered_bytes = 0, reduced_bytes = 0;  // payload: the full buffers'
  int64_t early_gathers = 0, mispredicted = 0, repaired = 0;
  int64_t wait_gather_ns = 0, wait_reduce_ns = 0;  // time that compute stood waiting
  // With record_trace: "gather 2", "show 2", "release 2", "reduce 2", "post 2", "retire 2", in
  // order of issue.
  std::vector<std::string> trace;
};

namespace dist {

class Runtime : public autograd::BackwardObserver, public std::enable_shared_from_this<Runtime> {
 public:
  static std::shared_ptr<Runtime> make(nn::Module& root, const FsdpOptions& options);
  ~Runtime() override;
  // The runtime of a module that is a unit; null of another.
  static std::shared_ptr<Runtime> of(nn::Module& module);

  const std::vector<std::shared_ptr<Unit>>& units() const {
    return units_;
  }  // children first, the root last
  Unit& root() const { return *units_.back(); }
  const Group& group() const { return group_; }
  const FsdpOptions& options() const { return options_; }
  FsdpStats stats() const;
  void reset_stats();
  GatherSchedule& schedule() { return *schedule_; }
  bool is_idle() const { return depth_ == 0 && !in_backward_; }
  // Error, naming `what`, inside a forward or backward.
  void require_idle(const char* what) const;

  bool syncs() const { return sync_; }
  void set_sync(bool on);
  void unshard(int unit);  // returns when the module shows the full parameters
  void reshard(int unit);
  int index_of(const Unit& unit) const;

  // ---- module hooks
  void forward_pre(int unit, const nn::TensorVisitor& inputs);
  void forward_post(int unit, const nn::TensorVisitor& outputs);
  void forward_unwind(int unit) noexcept;

  // ---- engine
  bool on_plan(const autograd::Plan& plan) override;
  void on_end(bool failed) override;
  void enter(int unit);
  void leave(int unit);
  void recomputed(int unit);
  void gradients_complete(int unit);

 private:
  struct Forward;  // one open call of a unit's module
  class Hooks;
  class UnitScope;

  Runtime(nn::Module& root, const FsdpOptions& options);
  void build(nn::Module& root);
  void verify() const;
  void carry_out(const GatherSchedule::Steps& steps);
  void carry_out(const Step& step);
  ForwardKind forward_kind() const;
  void check_slots();

  FsdpOptions options_;
  Group group_;
  std::vector<std::shared_ptr<Unit>> units_;
  std::unique_ptr<GatherSchedule> schedule_;
  std::vector<std::unique_ptr<Forward>> forwards_;  // open calls, outermost first
  int depth_ = 0;
  bool in_backward_ = false, sync_ = true, syncs_now_ = true;
  GatherSchedule::Counts counts_before_;  // at the last reset_stats()
  std::vector<int> incomplete_;  // by unit: buckets that wait for contributions in this backward
  FsdpStats stats_;
};

}  // namespace dist
}  // namespace sherd
