#include "distributed/comm_hooks.h"

#include "autograd/grad_mode.h"

namespace sherd::dist {
namespace {

// The groups that a bucket is summed over.
struct Ranks {
  Group shard, replicate;
  Ranks(const Group& given, const CommBucket& b)
      : shard(b.shard_group), replicate(given ? given : b.replicate_group) {
    if (given && shard)
      fail(
          "[comm_hook] a process group was given for the hook of a sharded unit, which has its "
          "own: give null");
  }
  double count() const { return double(size_of_group(shard)) * size_of_group(replicate); }
};

// The sum over ranks of `full`, [n], or of a sharded unit this rank's part of it.
Future sum(const Ranks& ranks, const CommBucket& bucket, const Tensor& full) {
  CollectiveOptions o;
  o.label = concat("comm hook of bucket ", bucket.index);
  if (!ranks.shard)
    return ranks.replicate ? Future(ranks.replicate->all_reduce(full, ReduceOp::kSum, o), full)
                           : Future(full);
  const Tensor part = full.dtype() == bucket.output.dtype()
                          ? bucket.output
                          : empty(bucket.output.sizes(), full.dtype());
  const Work scattered = ranks.shard->reduce_scatter_pieces({part}, {full}, ReduceOp::kSum, o);
  if (!ranks.replicate) return Future(scattered, part);
  o.on_start = [scattered] { scattered.event().wait(); };
  return Future(ranks.replicate->all_reduce_coalesced({part}, ReduceOp::kSum, o), part);
}

Future compressed(const Group& group, CommBucket& bucket, DType dtype) {
  const Ranks ranks(group, bucket);
  NoGrad off;
  // Before rounding, so that nothing overflows that the mean would not.
  bucket.buffer.div_(Tensor(ranks.count()));
  return sum(ranks, bucket, to_raw(bucket.buffer, dtype))
      .then([output = bucket.output](const Tensor& low) {
        copy_raw(output, low);
        return output;
      });
}

}  // namespace

Future allreduce_hook(const Group& group, CommBucket& bucket) {
  const Ranks ranks(group, bucket);
  return sum(ranks, bucket, bucket.buffer).then([n = ranks.count()](const Tensor& total) {
    NoGrad off;
    Tensor mean = total;
    return mean.div_(Tensor(n));
  });
}

Future fp16_compress_hook(const Group& group, CommBucket& bucket) {
  return compressed(group, bucket, kFloat16);
}
Future bf16_compress_hook(const Group& group, CommBucket& bucket) {
  return compressed(group, bucket, kBFloat16);
}

}  // namespace sherd::dist
