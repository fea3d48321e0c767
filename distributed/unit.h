// Unit: the parameters that are gathered and reduced as one: those below one module that no other
// unit claimed. It owns the flat buffers, and knows how to gather, show and release; when that
// happens is the runtime's business.
//
// [Note: local and full] Each parameter has two tensors that share one autograd meta (one gradient,
// one requires_grad): `local`, the Tensor that existed before wrapping, now a 1-D view of this
// rank's part of the piece (maybe empty), which optimizers step; and `full`, a view in the
// parameter's own shape of the flat full buffer, whose bytes come and go. The module's slots show
// the one or the other. With one rank and no lower precision they are the same tensor and nothing
// is ever gathered.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "distributed/flat_layout.h"
#include "distributed/grad_bucket.h"
#include "distributed/mixed_precision.h"
#include "distributed/process_group.h"
#include "distributed/sharding_strategy.h"
#include "nn/module.h"
#include "nn/shard_info.h"

namespace sherd::dist {

struct UnitOptions {
  Group shard, replicate;  // null: a group of one
  MixedPrecision precision;
  ShardingStrategy strategy = ShardingStrategy::kFullShard;
  // Default: by the strategy, and a root keeps its parameters.
  std::optional<bool> reshard_after_forward = {};
  bool reshard_after_backward = true;
  bool sync_module_states = false;  // rank 0's values, where parameters have values already
};

class Unit {
 public:
  struct Entry {
    std::vector<nn::Slot*> slots;
    std::string name;  // full; the first slot's
    Dims shape;
    Tensor local, full;
    OwnedPart owned;
    std::pair<int, int> place;   // (group, entry)
    uint32_t shown_version = 0;  // full's, when it was shown
  };
  struct FlatGroup {
    const FlatLayout* layout = nullptr;
    DType master = kFloat32, compute = kFloat32;
    Tensor piece;  // [c], master
    Tensor full,
        own;  // [s c] in compute dtype, without bytes while sharded; this rank's place in it
    std::vector<Entry> entries;  // in flat order
    std::shared_ptr<GradBucket> bucket;
    bool whole = false;  // full is the piece
  };

  // Takes the parameters of `slots` (each group of tied slots once): cuts them, or fills this
  // rank's part by their initialisers. A collective where sync_module_states is set.
  Unit(nn::Module& module, std::string name, const std::vector<nn::Slot*>& slots,
       const UnitOptions& options, uint64_t seed);
  ~Unit();

  nn::Module& module() const { return *module_; }
  // The module is going: what is left serves a backward that is still to come.
  void detach_module();
  // Parameters that outlive their runtime accumulate gradients by themselves again.
  void detach_sinks();
  const std::string& name() const { return name_; }
  const std::vector<FlatGroup>& groups() const { return groups_; }
  const UnitOptions& options() const { return options_; }
  UnitOptions& options() { return options_; }
  // The entry of a full tensor or a view of it; null for another tensor.
  const Entry* find_full(const Tensor& t) const;
  // In module order.
  const std::vector<std::pair<int, int>>& order() const { return order_; }  // (group, entry)
  const Entry& entry(std::pair<int, int> place) const {
    return groups_[place.first].entries[place.second];
  }

  bool gathers() const;            // has something to gather
  int64_t full_bytes() const;      // of the gathered parameters
  int64_t gradient_bytes() const;  // of the flat gradients
  int64_t num_parameters() const;  // elements, all ranks together

  void gather(const std::string& label);  // issue
  void wait();                            // for the gather
  void show();                            // after wait(): slots show the full parameters
  void release();                         // slots show the local ones; the full bytes are freed
  bool is_shown() const { return shown_; }
  // A full parameter was changed in place while it was shown, which is lost at release; or null.
  const Entry* changed_full() const;
  bool is_stale() const;  // a piece was changed after it was gathered
  // Full parameters may be read: their unit is pinned.
  void set_usable(bool usable);

  // Takes over what the user put into slots since: another tensor, or data moved or converted (see
  // the note above).
  void check_slots();
  // The whole parameter on the ranks of `root` (of the shard group), an empty tensor elsewhere: of
  // any tensor that is laid out as the local parameter (the parameter itself, or a moment of the
  // optimizer). A collective.
  Tensor collect(const Entry& entry, const Tensor& local, int root) const;

 private:
  void cut(FlatGroup& g, Entry& e, uint64_t seed);
  void attach(FlatGroup& g);
  void take_over(FlatGroup& g, Entry& e, const Tensor& values);
  Dims local_shape(const Entry& e) const;  // of e.local
  uint32_t piece_version() const;

  nn::Module* module_;
  std::string name_;
  UnitOptions options_;
  std::shared_ptr<const UnitLayout> layout_;
  std::vector<FlatGroup> groups_;
  std::vector<std::pair<int, int>> order_;
  std::unordered_map<ViewFamily*, std::pair<int, int>> by_full_;  // also finds their views
  Work gathering_;
  bool in_flight_ = false, shown_ = false;
  uint64_t gathered_version_ = 0;
};

}  // namespace sherd::dist
