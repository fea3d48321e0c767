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
// ShardingStrategy::kNoShard. How it works: docs/ddp.md.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "autograd/engine.h"
#include "distributed/comm_hooks.h"
#include "distributed/ddp_buckets.h"
#include "distributed/grad_bucket.h"
#include "distributed/join.h"
#include "distributed/no_sync.h"
#include "nn/module.h"

namespace sherd {

// Names and meanings are PyTorch's.
struct DdpOptions {
  dist::Group process_group = nullptr;  // default: the job's default group
  double bucket_cap_mb = 25;            // MiB of gradients that are exchanged together, above 0
  // Bytes of the bucket that is ready first: a small one starts the overlap early.
  int64_t first_bucket_bytes = int64_t(1) << 20;
  // Rank 0's buffers on all ranks before a forward in training mode that records; under no_sync
  // before the first of its forwards alone. Forwards under no_grad or in eval mode exchange
  // nothing.
  bool broadcast_buffers = true;
  // Parameters that a backward does not reach are exchanged all the same (as zeros where another
  // rank has a gradient, untouched where none has). Off: such a parameter is an error that names
  // it.
  bool find_unused_parameters = false;
  // Each `.grad` is a view of a bucket's sum: nothing is copied, and one gradient that is kept
  // keeps the bytes of its bucket. Off: each has its own.
  bool gradient_as_bucket_view = true;
  // The same parameters are used in every step (not: on every rank). Unused ones are allowed, and a
  // step that uses others than the first is an error that names one.
  bool static_graph = false;
  // Compare the ranks' models, take rank 0's values and, for bfloat16, its way of computing products
  // (core/gemm.h). Off: they are alike already.
  bool init_sync = true;
  // Nobody's business but the user's, or another wrapper's: fsdp.parameters() of a part that is
  // sharded. Neither compared, nor sent, nor reduced.
  std::vector<Tensor> ignored_parameters = {};
};

namespace dist {

class DdpReducer : public autograd::BackwardObserver, public Joinable {
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
  // The parameters' names, by bucket, in the order of exchange.
  std::vector<std::vector<std::string>> bucket_names() const;
  const Group& group() const { return group_; }
  Device device() const;  // where the parameters are
  void register_comm_hook(CommHook hook);

  // Before the module's forward: broadcasts buffers where they are due, and tells a Join.
  void begin_forward();

  // ---- engine
  bool on_plan(const autograd::Plan& plan) override;
  void on_end(bool failed) override;

  // ---- Join
  std::unique_ptr<JoinHook> join_hook(Join& join) override;
  Group join_process_group() override { return group_; }

 private:
  class Hook;
  class OrderedBucket;

  nn::Module::NamedTensors managed_parameters(const nn::Module& module) const;
  nn::Module::NamedTensors take_parameters(nn::Module& module);  // all but the ignored ones
  void verify(const nn::Module& module, const nn::Module::NamedTensors& managed) const;
  std::vector<Tensor> buffers() const;
  bool broadcasts_buffers() const;
  void build(const std::vector<int>& order);
  void rebuild();
  void exchange_with(GradBucket& bucket, int index, const std::vector<int>& members);
  std::string name_of_parameter(int index) const;
  void check_usage(const std::vector<bool>& used);
  void reduce(size_t bucket);
  void ready();
  void finish(bool keep);
  void set_divisor(double divisor);
  void shadow(Join& join);

  DdpOptions options_;
  Group group_;
  nn::ModuleState* module_;
  std::vector<nn::Slot*> buffers_;
  nn::Module::NamedTensors parameters_;  // those that are trained, in module order
  nn::Module::NamedTensors frozen_;      // the others
  std::unordered_map<autograd::AutogradMeta*, int> index_;  // of a parameter, by its meta
  std::vector<std::shared_ptr<GradBucket>> buckets_;  // in the order in which they are exchanged
  std::vector<bool> complete_;
  size_t next_ = 0;  // the first bucket that was not exchanged yet in this backward
  bool active_ = false, sync_ = true, syncs_now_ = true;
  double divisor_;
  CommHook hook_;
  bool buffers_due_ = true;   // the forward before was not one of no_sync
  bool announced_ = true;     // what this rank told a Join: that its backward exchanges
  bool rebuild_due_ = false;  // after the first backward that exchanges
  bool rebuilt_ = false;      // and no backward began since
  std::vector<int> ready_;    // until then: parameters in the order in which they are complete
  std::vector<bool> graph_;   // static_graph: by parameter, used in the first step
};

// Moves the tensors in a value (see nn/visit_tensors.h) to a device; others are left alone.
template <class T>
void move_tensors(T& value, Device device) {
  nn::visit_tensors(value, [&](Tensor& t) {
    if (t.device() != device) t = t.to(device);
  });
}

}  // namespace dist

template <class M>
class DistributedDataParallel {
 public:
  explicit DistributedDataParallel(M& module, const DdpOptions& options = {})
      : module_(&module), reducer_(std::make_shared<dist::DdpReducer>(module, options)) {}

  // The module's forward. Tensors in the arguments are moved to the device of its parameters.
  template <class... A>
  auto operator()(A&&... args) {
    reducer_->begin_forward();
    std::tuple<nn::KeptArgument<A>...> inputs(std::forward<A>(args)...);
    dist::move_tensors(inputs, reducer_->device());
    return std::apply([this](auto&... a) { return nn::call(*module_, a...); }, inputs);
  }
  M& module() const { return *module_; }
  M* operator->() const { return module_; }
  std::vector<Tensor> parameters() const { return module_->parameters(); }
  nn::Module::NamedTensors named_parameters() const { return module_->named_parameters(); }

  // While the result lives, backwards add up gradients on each rank; the next one without it
  // exchanges them.
  using NoSync = dist::NoSync<dist::DdpReducer>;
  [[nodiscard]] NoSync no_sync() { return NoSync(reducer_); }

  // While the result lives, ranks may have different numbers of inputs: see join.h.
  [[nodiscard]] dist::Join join(const dist::JoinOptions& options = {}) {
    return dist::Join({joinable()}, options);
  }
  dist::Joinable& joinable() const { return *reducer_; }

  // hook(state, bucket) instead of averaging: see comm_hooks.h. Once, before training; on all ranks
  // the same.
  template <class State, class Hook>
  void register_comm_hook(State state, Hook hook) {
    reducer_->register_comm_hook(
        [state, hook](dist::CommBucket& bucket) { return hook(state, bucket); });
  }

  int num_buckets() const { return reducer_->num_buckets(); }
  const std::shared_ptr<dist::DdpReducer>& reducer() const { return reducer_; }

 private:
  M* module_;
  std::shared_ptr<dist::DdpReducer> reducer_;
};

}  // namespace sherd
