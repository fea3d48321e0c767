// Join: training on when ranks have unequal numbers of inputs. Ranks that ran out go on taking part
// in the others' collectives, with zeros. PyTorch's torch.distributed.algorithms.Join.
//
//     DistributedDataParallel ddp(model);
//     {
//       dist::Join join({ddp});                       // or: auto join = ddp.join();
//       for (auto& batch : loader) {                  // of any length, on each rank
//         optimizer.zero_grad();
//         loss(ddp(batch.at("x"))).backward();
//         optimizer.step();
//       }
//     }                                               // waits for the rank with the most inputs
//
// A sharded model (and a data parallel one, if its optimizer's state is to stay equal on all ranks)
// needs the step too, since a rank that ran out still owns its parts:
//
//     dist::JoinableStep step([&] { fsdp.clip_grad_norm_(1.0); optimizer.step();
//                                   optimizer.zero_grad(); });
//     {
//       dist::Join join({fsdp, step});
//       for (auto& batch : loader) {
//         loss(fsdp(batch.at("x"))).backward();
//         step();
//       }
//     }
//
// [Note: an iteration] It begins with a forward of the first joinable, where all ranks exchange one
// number: ranks with inputs say what they are about to do, ranks that ran out say that. So everyone
// knows who is still there. Then each rank that ran out calls the joinables' main_hook in their
// order, which issues what the others issue. One forward a backward; other collectives of the loop
// must be a joinable's too. A difference is an error that names both operations, never a hang.
//
// The end of the Join is a collective, and throws; left by an exception it does nothing.
#pragma once
#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "distributed/process_group.h"

namespace sherd::dist {

class Join;

struct JoinOptions {
  bool enable = true;  // off: nothing happens and nothing is sent
  // Instead of going on, all ranks throw in the first iteration that not all of them have inputs
  // for: those without at the end of their Join, the others in their forward.
  bool throw_on_early_termination = false;
  // Gradients are divided by the number of ranks, so that each input weighs the same. Off: by the
  // number of those that still have inputs.
  bool divide_by_initial_world_size = true;
};

// What is known to all ranks of an iteration.
struct JoinIteration {
  // In it gradients are exchanged: not so under no_sync.
  static constexpr int64_t kExchanges = 1;

  std::vector<int64_t> said;  // by rank: 0 if its inputs ran out, else 1 + its note
  int active() const;         // ranks with inputs
  int authority() const;      // the highest of them; without any, of all ranks
  int64_t note() const;       // theirs; 0 if there are none
  bool exchanges() const { return note() & kExchanges; }
  bool has_inputs(int rank) const { return said.at(size_t(rank)) > 0; }
};

// What a rank that ran out does for one joinable.
class JoinHook {
 public:
  virtual ~JoinHook() = default;
  virtual void main_hook() {}  // once an iteration of the others: issue the collectives they issue
  virtual void post_hook(bool /*is_last_joiner*/) {}  // once, on all ranks, when all ran out
};

// Something whose collectives can be shadowed. Its forward (or whatever is called once an
// iteration) calls Join::notify_join_context(*this) before its own collectives.
class Joinable {
 public:
  virtual ~Joinable() = default;
  Joinable(const Joinable&) = delete;
  Joinable& operator=(const Joinable&) = delete;

  virtual std::unique_ptr<JoinHook> join_hook(Join& join) = 0;
  virtual Group join_process_group() = 0;

 protected:
  Joinable() = default;
  Join* join() const { return join_; }  // the one that it is in; null: none, or it is off

 private:
  friend class Join;
  Join* join_ = nullptr;
};

// A Joinable, or a wrapper that has one.
class JoinableRef {
 public:
  JoinableRef(Joinable& joinable) : joinable_(&joinable) {}
  template <class T>
  requires requires(T& t) {
    { t.joinable() } -> std::same_as<Joinable&>;
  }
  JoinableRef(T& wrapper) : joinable_(&wrapper.joinable()) {}
  Joinable& get() const { return *joinable_; }

 private:
  Joinable* joinable_;
};

class Join {
 public:
  // All of one process group. Error for an empty list, for several groups, and for a joinable that
  // is in a Join already.
  explicit Join(const std::vector<JoinableRef>& joinables, const JoinOptions& options = {});
  ~Join() noexcept(false);
  Join(const Join&) = delete;
  Join& operator=(const Join&) = delete;

  // By a joinable, at the beginning of what it does in an iteration. Of the first joinable: tells
  // the others that this rank has inputs. Of others, and outside of a Join: nothing.
  static void notify_join_context(Joinable& joinable);

  // The same for joinables that say more: every one of them exchanges its note, an int below 2^31,
  // equal on all ranks with inputs. Their main_hook calls shadow() first, which tells what they
  // said.
  JoinIteration begin(Joinable& joinable, int64_t note);
  JoinIteration shadow(Joinable& joinable);

  const JoinOptions& options() const { return options_; }
  // The latest in which a rank had inputs.
  const JoinIteration& iteration() const { return iteration_; }
  // Ranks that ran out step their optimizers with the others: a JoinableStep is part of it.
  bool has_step() const { return has_step_; }

 private:
  JoinIteration exchange(int64_t said);
  bool is_first(const Joinable& joinable) const { return joinables_[0] == &joinable; }
  void shadow_others();
  void detach();

  std::vector<Joinable*> joinables_;
  std::vector<std::unique_ptr<JoinHook>> hooks_;
  Group group_;
  JoinOptions options_;
  JoinIteration iteration_;
  bool has_step_ = false;
  int exceptions_;  // under way when it began
};

// What the loop does after a backward that exchanged gradients, as a function that ranks which ran
// out call too: clipping, the optimizer's step, clearing gradients, the schedule's step. Behind the
// model in the list of joinables.
class JoinableStep : public Joinable {
 public:
  explicit JoinableStep(std::function<void()> step, Group process_group = nullptr);
  void operator()();

  std::unique_ptr<JoinHook> join_hook(Join& join) override;
  Group join_process_group() override { return group_; }

 private:
  class Hook;
  std::function<void()> step_;
  Group group_;
};

}  // namespace sherd::dist
