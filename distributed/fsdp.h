// FullyShardedDataParallel: trains a model of which each rank holds only a part. Parameters are
// gathered unit by unit where forward and backward need them, gradients are reduce-scattered, and
// the optimizer steps the parts. Rajbhandari et al.: ZeRO. arXiv 1910.02054. Zhao et al.: PyTorch
// FSDP. arXiv 2304.11277.
//
//     BigModel model(layers, dim, ff_dim, vocab);     // declared: nothing is allocated yet
//     FullyShardedDataParallel fsdp(model, {.auto_wrap_policy = module_wrap_policy<Block>()});
//     optim::AdamW optimizer(fsdp.parameters(), {.lr = 1e-4});
//     Tensor loss = F::cross_entropy(fsdp(ids).view({-1, vocab}), labels.view({-1}));
//     loss.backward();
//     fsdp.clip_grad_norm_(1.0);
//     optimizer.step();
//
// The model is changed in place: names, tree and code stay, parameters become 1-D parts of this
// rank. All ranks make the same calls. How it works: docs/fsdp.md.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "distributed/comm_hooks.h"
#include "distributed/join.h"
#include "distributed/no_sync.h"
#include "distributed/runtime.h"
#include "distributed/summon.h"
#include "nn/state_dict.h"

namespace sherd {

// What does not depend on the model's class. Also a handle on one unit, of whatever depth: copies
// are the same unit.
class FsdpModule {
 public:
  FsdpModule(nn::Module& module, const FsdpOptions& options);
  // A module that is a unit already. Error if it is none.
  static FsdpModule of(nn::Module& unit);
  ~FsdpModule();

  nn::Module& module() const { return *module_; }
  // This rank's parts, under the model's names: what the optimizer steps, also while the module
  // shows gathered ones; ignored ones whole. Tied ones once.
  std::vector<Tensor> parameters() const;
  nn::Module::NamedTensors named_parameters() const;

  // Scales gradients so that their norm over all ranks is at most max_norm; returns the norm
  // before, a 0-d tensor of the gradients' dtype, the same on all ranks and for every strategy.
  // Ignored parameters, whose gradients differ between ranks, are left out. norm_type: 2, 1, or
  // infinity. A collective. Error on a unit below the root.
  Tensor clip_grad_norm_(double max_norm, double norm_type = 2);

  using NoSync = dist::NoSync<dist::Runtime>;
  [[nodiscard]] NoSync no_sync() { return NoSync(runtime()); }
  // For a Join, with a JoinableStep behind it: see join.h.
  dist::Joinable& joinable() const { return runtime()->joinable(); }
  // no_sync, by unit and until the next call.
  void set_requires_gradient_sync(bool on, bool recurse = true);

  // hook(state, bucket) instead of the reduction of this unit and those below: see comm_hooks.h.
  // Once a unit, before training; on all ranks the same. A unit of several dtypes has a bucket
  // each.
  template <class State, class Hook>
  void register_comm_hook(State state, Hook hook) {
    set_comm_hook([state, hook](dist::CommBucket& bucket) { return hook(state, bucket); });
  }

  // While the result lives, this module and those below show whole parameters: see summon.h.
  [[nodiscard]] dist::SummonFullParams summon_full_params(const SummonOptions& options = {});
  // f(module) for all modules below and this one, children first, with whole parameters, of which
  // changes are kept: to initialise by hand.
  void apply(const std::function<void(nn::Module&)>& f);

  // Whether the unit's full parameters are freed at the end of its forward, and of its part of
  // backward. At the first one's default a root keeps them.
  void set_reshard_after_forward(bool on, bool recurse = true);
  void set_reshard_after_backward(bool on, bool recurse = true);
  // This unit's gradients are divided by it, not by the number of ranks. Error unless above 0.
  void set_gradient_divide_factor(double factor);

  // All parameters, one at a time: f(name, values) runs on rank 0 alone, in the order of the
  // model's state_dict. `values` is in the master's dtype and lives for the call. A collective.
  // What f throws ends the calls of f, and is an Error on all ranks.
  void for_each_full_parameter(
      const std::function<void(const std::string& name, const Tensor& values)>& f);
  // The same of tensors laid out as the local parameters, such as an optimizer's moments: `local`
  // is asked for each parameter's, on every rank (zero elements where this rank holds none).
  void for_each_full(
      const std::function<Tensor(const std::string& name, const Tensor& parameter)>& local,
      const std::function<void(const std::string& name, const Tensor& values)>& f);
  // All of it on rank 0, in memory, with persistent buffers; empty on other ranks. For large models
  // stream with for_each_full_parameter.
  nn::StateDict full_state_dict();
  // Every rank gives the whole state and keeps its part. One Error lists all names that are
  // missing, unexpected or misshapen, on all ranks where it is so on one; nothing is changed then.
  nn::LoadResult load_full_state_dict(const nn::StateDict& state, bool strict = true);
  // In the dtypes that they have in state, whatever mixed_precision.buffer_dtype made of them.
  nn::Module::NamedTensors persistent_buffers() const;
  // What this rank holds of each parameter, in the order of the model's names; tied ones under each
  // name.
  struct Part {
    std::string name;
    Dims full_shape;
    int64_t begin, end;  // elements of the flattened parameter
    Tensor parameter;    // the one that the optimizer steps
  };
  std::vector<Part> parts() const;

  // Gathers this unit and those below: their modules show full parameters until the next release,
  // to be read.
  void unshard();
  // Only issues the gathers; wait() of the result shows the parameters, and so does a forward.
  class Unsharding;
  [[nodiscard]] Unsharding unshard_async();
  void reshard();

  // A table for people: units, what they hold, what is gathered when.
  std::string summary() const;
  FsdpStats stats() const { return runtime()->stats(); }
  void reset_stats() { runtime()->reset_stats(); }
  const std::vector<std::shared_ptr<dist::Unit>>& units() const { return runtime()->units(); }
  std::shared_ptr<dist::Runtime> runtime()
      const;  // the outermost one, once a module above was wrapped too

 private:
  explicit FsdpModule(nn::Module& unit) : module_(&unit) {}
  void set_comm_hook(const dist::CommHook& hook);

  nn::Module* module_;
};

class FsdpModule::Unsharding {
 public:
  explicit Unsharding(const FsdpModule& module) : module_(module) {}
  void wait() { module_.unshard(); }

 private:
  FsdpModule module_;
};

// The same by the names of PyTorch's newer API: units are made one by one, inner ones first, and
// the outermost call makes the root.
//
//     for (auto& layer : *model.layers) fully_shard(*layer, {.mp_policy = bf16});
//     FsdpModule fsdp = fully_shard(model, {.mp_policy = bf16});
//     nn::call(model, x).sum().backward();
struct FullyShardOptions {
  dist::DeviceMesh mesh = {};  // two dimensions: hybrid sharding; default: all ranks of the job
  // Default: on, and off for the root.
  std::optional<bool> reshard_after_forward = {};
  MixedPrecision mp_policy = {};
  CPUOffload offload_policy = {};
  std::vector<Tensor> ignored_params = {};
};
FsdpModule fully_shard(nn::Module& module, const FullyShardOptions& options = {});

template <class M>
class FullyShardedDataParallel : public FsdpModule {
 public:
  explicit FullyShardedDataParallel(M& module, const FsdpOptions& options = {})
      : FsdpModule(module, options), model_(&module) {}

  template <class... A>
  auto operator()(A&&... args) {
    return nn::call(*model_, std::forward<A>(args)...);
  }
  M& module() const { return *model_; }
  M* operator->() const { return model_; }

 private:
  M* model_;
};

}  // namespace sherd
