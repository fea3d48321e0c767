// summon_full_params: outside of forward and backward, a sharded module's slots show its whole
// parameters, to be read and to be changed.
//
//     {
//       auto summoned = fsdp.summon_full_params();             // or {.writeback = false}, ...
//       Tensor w = model.output->weight;                       // whole, in the master's dtype
//       NoGrad off;
//       w.mul_(0.5);                                           // on every rank alike
//     }                                                        // written into the pieces
//
// Takes the master's bytes of all summoned units on each rank (rank0_only: on rank 0). Gathers and
// release of the model's own full parameters are left alone: they are other buffers.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "distributed/runtime.h"

namespace sherd {

struct SummonOptions {
  bool recurse = true;  // off: only the parameters of this very unit
  // What was changed inside, in place or by another tensor in a slot, goes into the pieces. All
  // ranks must change alike: each takes its own part. What is not cut (one shard) is changed at
  // once, whatever this says.
  bool writeback = true;
  bool rank0_only = false;      // other ranks keep showing their pieces; not with writeback
  bool offload_to_cpu = false;  // on the cpu they are there already
  // Gradients too: reduced ones whole, which writeback cuts again; absent ones stay absent. Where
  // no_sync left a parameter's gradient pending on some rank, each rank shows its own pending sum,
  // or none, and what was reduced before waits unseen.
  bool with_grads = false;
};

namespace dist {

// Lives as long as the parameters are shown. A collective, its end too. Left by an exception,
// nothing is written back: then all ranks must leave so. What cannot be written back on one rank
// (another shape) is an Error on all.
class SummonFullParams {
 public:
  SummonFullParams(std::shared_ptr<Runtime> runtime, std::vector<int> units,
                   const SummonOptions& options);
  ~SummonFullParams() noexcept(false);
  SummonFullParams(const SummonFullParams&) = delete;
  SummonFullParams& operator=(const SummonFullParams&) = delete;

 private:
  struct Shown;  // a parameter
  void summon(Unit& unit);
  void gather_gradients(Unit& unit, size_t first);
  std::string misfits() const;
  void write_back();
  void put_back();

  std::shared_ptr<Runtime> runtime_;
  SummonOptions options_;
  int exceptions_;  // under way when it began
  std::vector<Shown> shown_;
};

}  // namespace dist
}  // namespace sherd
