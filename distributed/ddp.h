// DistributedDataParallel: every rank holds the whole model; gradients are averaged over ranks, in
// buckets, while backward still runs. Li et al.: PyTorch Distributed. arXiv 2006.15704.
//
//     ToyModel model;
//     DistributedDataParallel ddp(model);                     // rank 0's values on all ranks
//     optim::SGD optimizer(ddp.parameters(), {.lr = 0.01});
//     F::mse_loss(ddp(x), y).backward();
//     optimizer.step();
//     save(ddp.module().state_dict());
//
// The same bits as FullyShardedDataParallel at the same world size: both are made of GradBucket.
// Parameters keep the dtype they have; for bf16 use FullyShardedDataParallel with
// ShardingStrategy::kNoShard.
#pragma once
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "autograd/engine.h"
#include "distributed/grad_bucket.h"
#include "distributed/no_sync.h"
#include "nn/module.h"

namespace sherd {

struct DdpOptions {
  dist::Group process_group = nullptr;       // default: the job's default group
  int64_t bucket_bytes = int64_t(25) << 20;  // of gradients exchanged together
  int64_t first_bucket_bytes =
      int64_t(1) << 20;  // of the one that is ready first: it starts the overlap early
  // Parameters that a backward does not reach are exchanged all the same (as zeros where another
  // rank has a gradient, untouched where none has). Off: such a parameter is an error that names
  // it.
  bool find_unused_parameters = false;
};

namespace dist {

// Which parameters share a bucket: by index, in order of use in backward (that is, backwards),
// never two dtypes in one. sizes and dtypes by parameter; the first bucket of each dtype holds at
// most first_limit bytes, the others limit.
std::vector<std::vector<int>> assign_buckets(const std::vector<int64_t>& bytes,
                                             const std::vector<DType>& dtypes, int64_t first_limit,
                                             int64_t limit);

class DdpReducer : public autograd::BackwardObserver {
 public:
  DdpReducer(nn::Module& module, const DdpOptions& options);
  ~DdpReducer() override;

  bool syncs() const { return sync_; }
  void set_sync(bool on) { sync_ = on; }
  // Error, naming `what`, inside a backward.
  void require_idle(const char* what) const {
    if (active_) fail("[ddp] ", what, " is not possible during backward");
  }
  int num_buckets() const { return int(buckets_.size()); }
  const Group& group() const { return group_; }

  bool on_plan(const autograd::Plan& plan) override;
  void on_end(bool failed) override;

 private:
  void build(nn::Module::NamedTensors parameters);
  void verify_and_broadcast(nn::Module& module);
  void ready();

  DdpOptions options_;
  Group group_;
  std::vector<std::shared_ptr<GradBucket>> buckets_;  // in the order in which they are exchanged
  std::vector<bool> complete_;
  size_t next_ = 0;  // the first bucket that was not exchanged yet in this backward
  bool active_ = false, sync_ = true, syncs_now_ = true;
};

}  // namespace dist

template <class M>
class DistributedDataParallel {
 public:
  explicit DistributedDataParallel(M& module, const DdpOptions& options = {})
      : module_(&module), reducer_(std::make_shared<dist::DdpReducer>(module, options)) {}

  template <class... A>
  auto operator()(A&&... args) {
    return nn::call(*module_, std::forward<A>(args)...);
  }
  M& module() const { return *module_; }
  M* operator->() const { return module_; }
  std::vector<Tensor> parameters() const { return module_->parameters(); }
  nn::Module::NamedTensors named_parameters() const { return module_->named_parameters(); }

  using NoSync = dist::NoSync<dist::DdpReducer>;
  [[nodiscard]] NoSync no_sync() { return NoSync(reducer_); }
  int num_buckets() const { return reducer_->num_buckets(); }
  const std::shared_ptr<dist::DdpReducer>& reducer() const { return reducer_; }

 private:
  M* module_;
  std::shared_ptr<dist::DdpReducer> reducer_;
};

}  // namespace sherd
