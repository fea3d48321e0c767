// Communication hooks: what becomes of a bucket of gradients instead of the mean over ranks.
//
//     ddp.register_comm_hook(nullptr, dist::bf16_compress_hook);      // half the bytes on the wire
//     fsdp.register_comm_hook(nullptr, dist::bf16_compress_hook);
//     ddp.register_comm_hook(state, [](State s, dist::CommBucket& bucket) {
//       return dist::Future(bucket.process_group->all_reduce(bucket.buffer), bucket.buffer);
//     });
//
// A hook is called on the backward's thread when a bucket is complete, on all ranks for the same
// buckets in the same order, and returns at once: the Future is waited for later in backward. Its
// tensor replaces the bucket's gradients as it is: dividing by the number of ranks is the hook's
// business. It must have the size and dtype of bucket.output. Names and meanings are PyTorch's
// (torch.distributed.algorithms.ddp_comm_hooks.default_hooks).
#pragma once
#include <functional>
#include <vector>

#include "distributed/future.h"
#include "distributed/process_group.h"

namespace sherd::dist {

struct CommBucket {
  int index = 0;         // in DDP: in the order of exchange; in FSDP: of the unit
  bool is_last = false;  // of this backward; in FSDP: the root's
  // The local sums of this rank, [n]; parameters that got none, and what lies between parameters,
  // are zeros. The hook may change it.
  Tensor buffer;
  // Where the result is wanted: the buffer itself, or of a sharded unit this rank's part, [n / s].
  Tensor output;
  std::vector<Tensor> gradients;   // views of the buffer, in the parameters' shapes
  std::vector<Tensor> parameters;  // in the same order; of a sharded unit this rank's parts
  Group process_group;             // all ranks
  Group shard_group;      // those that share the unit's pieces; null: not sharded, as in DDP
  Group replicate_group;  // those that hold the same; null: nobody else does
};

using CommHook = std::function<Future(CommBucket& bucket)>;

// For DDP and all strategies of FSDP. A process_group stands in for DDP's own; null: that of the
// model.
//
// The mean over ranks, divided in the dtype that is reduced in: the same bits as without a hook
// where that is the parameters' own.
Future allreduce_hook(const Group& process_group, CommBucket& bucket);
// Divided by the number of ranks, rounded to that dtype, summed in it, and cast up again.
Future fp16_compress_hook(const Group& process_group, CommBucket& bucket);
Future bf16_compress_hook(const Group& process_group, CommBucket& bucket);

}  // namespace sherd::dist
