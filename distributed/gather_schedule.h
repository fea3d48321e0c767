// GatherSchedule: when the units of a model gather their parameters, release them, and reduce their
// gradients. A state machine over unit indices and byte sizes, without tensors or communication:
// the runtime reports what happens (a module's forward begins, backward reaches it) and carries out
// the steps that come back, in order.
//
//     GatherSchedule schedule(units, {.forward_prefetch = 1});   // children first, the root last
//     for (Step s : schedule.forward_pre(unit, ForwardKind::kTraining)) carry_out(s);
//     ...
//     schedule.begin_backward(plan);
//     for (Step s : schedule.enter(unit)) carry_out(s);          // gather, show, prefetch
//     for (Step s : schedule.gradients_complete(unit)) ...       // reduce; retire the one before
//     for (Step s : schedule.leave(unit)) ...                    // post, release
//     for (Step s : schedule.end_backward()) ...
//
// All decisions depend on the order of these calls and on sizes, never on time, so ranks that run
// the same program issue the same collectives in the same order. Steps are valid until the next
// call. A call that does not fit the state (a leave without its enter) is an Error and changes
// nothing.
//
// [Note: unit states] kSharded: no full bytes. kGathering: the gather was issued, nobody waited for
// it. kInUse: full, with pins (open forwards and scopes). kIdle: full, no pins.
//
// [Note: bound on gathers] A gather is issued before it is needed only if the bytes of full
// parameters and gradients, the root's apart, stay within max_bytes, now and when the next unit's
// gradient comes while the current one's is being reduced. Otherwise it is issued when the current
// unit has been left, if it fits then, or when it is needed. What is needed is always gathered.
#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace sherd {

// When the next unit's parameters are gathered in backward: not before they are needed; before the
// current unit's gradients are computed (most overlap); after the current unit's reduction was
// issued (less memory).
enum class BackwardPrefetch : uint8_t { kNone, kPre, kPost };

}  // namespace sherd

namespace sherd::dist {

struct ScheduledUnit {
  int64_t full_bytes = 0;  // of the full parameters, as they are gathered
  int64_t grad_bytes = 0;  // of the full gradient, as it is reduced
  bool gathers = true;     // false: no parameters, or the piece is the whole (one rank)
  bool reshard_after_forward = true;
  bool reshard_after_backward = true;
};

enum class ForwardKind : uint8_t {
  kTraining,       // records; the first pass of a checkpointed region too
  kInference,      // under no_grad
  kRecomputation,  // of a checkpointed region, inside backward
};

struct Step {
  enum class Kind : uint8_t {
    kGather,   // issue the all-gather into the full buffer
    kShow,     // wait for it; the module's slots show the full parameters
    kRelease,  // the slots show the local ones; free the full buffer (wait, if still gathering)
    kPost,     // this unit's part of backward is over (nothing to do; part of the trace)
    kReduce,   // issue the reduction of the unit's gradients
    kRetire,   // wait for the unit's reduction and write the gradients
    kDrop,     // wait for the unit's reduction and forget its result (after an error)
  };
  Kind kind;
  int unit;
  bool operator==(const Step&) const = default;
};
std::string to_string(const Step& step);  // "gather 2"

class GatherSchedule {
 public:
  struct Options {
    int forward_prefetch = 1;  // units gathered ahead in forward
    BackwardPrefetch backward_prefetch = BackwardPrefetch::kPre;
    int64_t max_bytes = 0;  // 0: default_max_bytes()
  };
  enum class State : uint8_t { kSharded, kGathering, kInUse, kIdle };
  struct PlanItem {
    int unit;
    bool gather = true;  // false: backward reads none of the unit's parameters
  };
  struct Counts {
    int64_t gathers = 0;
    int64_t early = 0;         // of them, before they were needed
    int64_t mispredicted = 0;  // of those, released unused
    int64_t repaired = 0;      // units still in use at the end of a backward: a fault elsewhere
  };
  using Steps = std::vector<Step>;

  // In module order: children first, the root last. Error if there is none.
  GatherSchedule(std::vector<ScheduledUnit> units, Options options);

  // ---- forward of a unit's module
  // stale: the piece changed after the full parameters were gathered from it.
  const Steps& forward_pre(int unit, ForwardKind kind, bool stale = false);
  // has_graph: the call recorded nodes, or was the first pass of a checkpointed region. A unit that
  // has none, or that ran under no_grad, is released whatever its options say.
  const Steps& forward_post(int unit, ForwardKind kind, bool has_graph = true);
  // Instead of forward_post, when forward throws. At the outermost level all is released.
  const Steps& forward_unwind(int unit);

  // ---- backward
  // The plan: the scopes that take part, in the order in which they are first needed (falling
  // sequence numbers; a checkpointed region's in the order of its forward, in place). `reduces` is
  // false for grad().
  void begin_backward(std::vector<PlanItem> plan, bool reduces = true);
  const Steps& enter(int unit);  // the first node of one of its scopes is about to run
  const Steps& leave(int unit);  // the scope is over
  const Steps& skip(int unit);   // a planned scope turned out not to be reached
  // The last expected gradient of the unit is there.
  const Steps& gradients_complete(int unit);
  const Steps& end_backward();
  const Steps& abort();  // an exception left backward: everything is released

  // ---- by hand
  const Steps& unshard(int unit);
  const Steps& reshard(int unit);  // Error while it is in use
  // Read at the next post or leave.
  void set_reshard_after_forward(int unit, bool on);
  void set_reshard_after_backward(int unit, bool on);
  // Off (no_sync): the unit's gradients are kept, not reduced. Read when a backward begins; what
  // was kept is reduced by the next one that begins with it on, whether it reaches the unit or not.
  void set_sync(int unit, bool on);
  void clear_pending(int unit);  // the kept gradients were set to none

  const ScheduledUnit& unit(int unit) const { return at(unit); }
  State state(int unit) const { return at(unit).state; }
  bool is_pending(int unit) const { return at(unit).pending; }
  int size() const { return int(units_.size()); }
  int64_t max_bytes() const { return max_bytes_; }
  const Counts& counts() const { return counts_; }

  // max(2.2 L, (k + 2) M): L largest and M median of the larger of full and gradient bytes over the
  // units but the root, k the number gathered ahead. Units of one size so keep three buffers in
  // backward.
  static int64_t default_max_bytes(const std::vector<ScheduledUnit>& units, const Options& options);

 private:
  struct Unit : ScheduledUnit {
    explicit Unit(const ScheduledUnit& u) : ScheduledUnit(u) {}
    State state = State::kSharded;
    int forward_pins = 0, backward_pins = 0;
    int moved_pins = 0;         // of backward_pins: from a recomputation, no scope entered yet
    std::vector<bool> entered;  // open scopes, outer first: does it hold a pin?
    bool guessed = false;       // gathered early, not used yet
    bool sync = true, syncs_now = false, pending = false;
  };
  struct Planned : PlanItem {
    bool done = false;
  };

  int checked(int unit) const;  // Error for an index that is none
  const Unit& at(int unit) const { return units_[checked(unit)]; }
  Unit& at(int unit) { return units_[checked(unit)]; }
  void add(Step::Kind kind, int unit);
  void gather(int unit, bool early);
  void release(int unit);
  void acquire(int unit);
  void release_all();
  void reduce(int unit);
  void settle(int unit);  // after a pin was dropped in backward
  bool is_root(int unit) const { return unit == size() - 1; }
  int64_t full_bytes(int unit) const { return is_root(unit) ? 0 : units_[unit].full_bytes; }
  int64_t grad_bytes(int unit) const { return is_root(unit) ? 0 : units_[unit].grad_bytes; }
  int64_t live_bytes() const;
  void prefetch_forward();
  // current: the unit whose gradients come meanwhile; -1: it has been left.
  void prefetch_backward(int current);
  Planned* touch(int unit);
  int next_planned() const;  // index of the first item after the cursor that is not done, or size

  std::vector<Unit> units_;
  Options options_;
  int64_t max_bytes_;
  Steps steps_;
  Counts counts_;

  // The order of the last forward, by kind and outermost unit.
  std::map<std::pair<ForwardKind, int>, std::vector<int>> orders_;
  std::pair<ForwardKind, int> order_key_;
  std::vector<int> order_, seen_;
  size_t order_at_ = 0;
  int depth_ = 0;
  bool guessing_ = false;

  bool in_backward_ = false;
  std::vector<Planned> plan_;
  int plan_at_ = -1;
  int reducing_ = -1;  // the reduction in flight
};

}  // namespace sherd::dist
