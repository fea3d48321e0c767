// ShardInfo: what a sharded parameter is a part of. FSDP puts one on each local parameter's
// autograd meta; optimizers and clipping ask it, and so are right on sharded parameters without
// knowing of distribution.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "autograd/meta.h"
#include "core/ref.h"
#include "core/tensor.h"

namespace sherd::nn {

class ShardInfo : public Counted {
 public:
  virtual Dims full_shape() const = 0;
  virtual int64_t begin()
      const = 0;  // this rank's elements of the flattened parameter: [begin, end)
  virtual int64_t end() const = 0;
  virtual std::string name() const = 0;
  // Identifies the group of ranks that hold the pieces: parameters of one group are reduced
  // together.
  virtual const void* group() const = 0;
  // Sums integers over that group, in place: int64 [n], the same on all its ranks after. A
  // collective.
  virtual void sum_exact(const Tensor& values) const = 0;
  virtual void max(const Tensor& values) const = 0;  // of any dtype, [n]; likewise
  // For what needs whole parameters: which elements each rank of the group holds, [begin, end), and
  // an exchange between all of them, outputs[r] from rank r and inputs[r] to it. A collective.
  virtual int ranks() const = 0;
  virtual int rank() const = 0;
  virtual std::pair<int64_t, int64_t> part(int rank) const = 0;
  virtual void all_to_all(const std::vector<Tensor>& outputs,
                          const std::vector<Tensor>& inputs) const = 0;
};

// The parameter's; null for one that is whole.
inline ShardInfo* shard_info(const Tensor& parameter) {
  autograd::AutogradMeta* m = autograd::meta_of(parameter);
  return m ? static_cast<ShardInfo*>(m->shard.get()) : nullptr;
}

}  // namespace sherd::nn
