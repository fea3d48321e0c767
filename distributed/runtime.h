// Runtime: one root's units and their life in forward and backward. It reports what happens to
// GatherSchedule and carries out the steps that come back. It hears of forwards by module hooks,
// and of backwards by scopes, plans and gradient sinks of the engine (autograd/); nothing else ties
// it to models.
#pragma once
#include <memory>
#include <string>
#include <unordered_set>
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

class FsdpJoinable;
class Joinable;

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
  bool is_idle() const { return depth_ == 0 && !in_backward_ && !summoned_; }
  // Error, naming `what`, inside a forward, a backward, or summon_full_params.
  void require_idle(const char* what) const;
  // Its part of a Join: see fsdp_join.h.
  Joinable& joinable();
  void repeat(const GatherSchedule::Steps& steps);  // as the schedule once asked for them
  void begin_summon();
  void end_summon() noexcept { summoned_ = false; }

  // By unit: whether backwards reduce its gradients.
  const std::vector<bool>& syncs() const { return syncs_; }
  void set_sync(const std::vector<bool>& on);
  void set_sync(bool on) { set_sync(std::vector<bool>(units_.size(), on)); }
  void set_sync(int unit, bool on);
  void gather(int unit);   // issues it, if it is sharded
  void unshard(int unit);  // returns when the module shows the full parameters
  void reshard(int unit);
  // Read when the unit's forward, or its part of backward, ends.
  void set_reshard_after_forward(int unit, bool on);
  void set_reshard_after_backward(int unit, bool on);
  int index_of(const Unit& unit) const;
  // The unit of that module and, with recurse, those of modules below it.
  std::vector<int> units_of(const nn::Module& module, bool recurse) const;
  // A parameter that the options leave out.
  bool is_ignored(const Tensor& parameter) const { return ignored_.count(parameter.impl()); }
  // Of a buffer, before mixed_precision.buffer_dtype.
  DType original_dtype(const Tensor& buffer) const;

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
  struct CastBuffer {
    nn::Slot* slot;
    DType original, computed;
  };
  class Hooks;
  class UnitScope;
  struct UnitPlan;
  using Units = std::vector<std::shared_ptr<Unit>>;

  Runtime(nn::Module& root, const FsdpOptions& options);
  void find_groups();
  void find_node_groups();
  FsdpOptions options_of(nn::Module& module) const;
  UnitOptions unit_options(const FsdpOptions& o);
  UnitPlan plan_units(nn::Module& root);
  void build(nn::Module& root);
  void make_schedule(const Units& units);
  void agree_with(const Runtime& inner) const;
  void verify(nn::Module& root, const Units& units) const;
  void carry_out(const GatherSchedule::Steps& steps);
  void carry_out(const Step& step);
  ForwardKind forward_kind() const;
  void check_slots();
  void cast_buffers();
  void say(const char* what, int unit) const;  // with SHERD_DEBUG=fsdp

  FsdpOptions options_;
  Group group_;              // all ranks
  Group shard_, replicate_;  // of hybrid units; null until one needs them
  Units units_;
  std::unique_ptr<GatherSchedule> schedule_;
  std::vector<std::unique_ptr<Forward>> forwards_;  // open calls, outermost first
  int depth_ = 0;
  bool in_backward_ = false, summoned_ = false;
  const bool talks_;
  std::vector<bool> syncs_, syncs_now_;
  std::unordered_set<const TensorImpl*> ignored_;
  std::vector<CastBuffer> buffers_;
  GatherSchedule::Counts counts_before_;  // at the last reset_stats()
  std::vector<int> incomplete_;  // by unit: buckets that wait for contributions in this backward
  FsdpStats stats_;
  std::unique_ptr<FsdpJoinable> join_;  // once it was asked for
};

}  // namespace dist
}  // namespace sherd
