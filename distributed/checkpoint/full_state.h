// The whole state of a model and its optimizer in safetensors files, whatever strategy and however
// many ranks hold it: rank 0 writes, a parameter at a time, and each rank reads only what it holds.
//
//     dist::ModelState state(fsdp);     // or (ddp), or (module, group); a null group: one rank
//     dist::save_weights("model.safetensors", state);            // under PyTorch's names
//     dist::load_weights("model.safetensors", state);
//     dist::save_optimizer("optimizer.safetensors", state, optimizer);
//
// All calls are collectives: every rank makes them. If rank 0 cannot write (a full disk), every
// rank throws, with rank 0's reason.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "core/atomic_file.h"
#include "distributed/ddp.h"
#include "distributed/fsdp.h"
#include "optim/optimizer.h"

namespace sherd::dist {

// A model as files see it.
class ModelState {
 public:
  using Part = FsdpModule::Part;
  using Local = std::function<Tensor(const Part& part)>;
  using Whole = std::function<void(const std::string& name, const Tensor& values)>;

  explicit ModelState(FsdpModule& fsdp);
  template <class M>
  explicit ModelState(const DistributedDataParallel<M>& ddp)
      : ModelState(ddp.module(), ddp.reducer()->group()) {}
  // Every rank of the group holds all; null: one rank.
  ModelState(nn::Module& module, Group group);

  const Group& group() const { return group_; }
  bool is_rank0() const { return !group_ || group_->rank() == 0; }
  // What this rank holds, in the order of for_each_full.
  const std::vector<Part>& parts() const { return parts_; }
  // Persistent ones, which every rank holds whole, in the dtypes that they compute in.
  const nn::Module::NamedTensors& buffers() const { return buffers_; }
  // What files have a buffer in: the dtype before mixed_precision.buffer_dtype.
  DType stored_dtype(const Tensor& buffer) const;
  // Error inside a forward or a backward, where parts are in use.
  void require_idle(const char* what) const {
    if (fsdp_) fsdp_->runtime()->require_idle(what);
  }
  // f on rank 0, for each parameter whole; `local` gives a tensor laid out as the local parameter
  // (it or a moment).
  void for_each_full(const Local& local, const Whole& f);

 private:
  FsdpModule* fsdp_ = nullptr;
  Group group_;
  std::vector<Part> parts_;
  nn::Module::NamedTensors buffers_;
};

// The files' sizes and checksums are returned on rank 0 (see core/atomic_file.h); elsewhere they
// are empty.
FileSummary save_weights(const std::string& path, ModelState& model);
// One Error, the same on all ranks, lists all names that are missing, unexpected or misshapen;
// nothing is changed then.
void load_weights(const std::string& path, ModelState& model);

// Moments in full shape under the names of Optimizer::state_dict, and the groups' options.
FileSummary save_optimizer(const std::string& path, ModelState& model,
                           const optim::Optimizer& optimizer);
void load_optimizer(const std::string& path, ModelState& model, optim::Optimizer& optimizer);

}  // namespace sherd::dist
