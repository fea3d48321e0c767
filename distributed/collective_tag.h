// CollectiveTag: what a rank says about the collective that it enters, sent ahead of the data to
// each rank that it exchanges with, and compared there before the data are used.
#pragma once
#include <cstdint>
#include <span>
#include <string>

#include "core/tensor.h"
#include "distributed/reduce_op.h"

namespace sherd::dist {

enum class CollectiveKind : uint8_t {
  kBroadcast,
  kAllReduce,
  kReduce,
  kAllGather,
  kGather,
  kScatter,
  kReduceScatter,
  kAllToAll,
  kBarrier,
  kLeave,  // destroy_process_group
};
const char* name_of(CollectiveKind kind);

// Plain bytes: it travels as it is.
struct CollectiveTag {
  uint64_t sequence = 0;     // the group's first collective has 1
  uint64_t fingerprint = 0;  // of dtypes, element counts and label, as far as ranks must agree
  int64_t to_peer = 0;       // elements that the sender of the tag sends to its reader,
  int64_t from_peer = 0;     // and expects from it
  int64_t numel = 0;         // elements of all tensors, for messages
  int64_t payload = 0;       // bytes, for this rank's counts
  int64_t sizes[kMaxDims] = {};
  int32_t root = -1;
  int32_t tensors = 0;
  CollectiveKind kind = CollectiveKind::kBarrier;
  ReduceOp op = ReduceOp::kSum;
  DType dtype = kFloat32;  // of the first tensor
  uint8_t dims = 0;        // and its sizes
  bool has_op = false;
  bool same_shape = false;  // ranks must agree on sizes
  char label[90] = {};      // cut; the fingerprint has all of it

  // "#12 all_reduce SUM of float32 [20, 10], root 0, 'gather unit 3'"
  std::string describe() const;
};

// Notes dtype, sizes and label, and their fingerprint. `same_shape`: the sizes of all tensors must
// be the same on all ranks; otherwise their dtypes alone.
CollectiveTag make_tag(CollectiveKind kind, std::span<const Tensor> tensors, bool same_shape,
                       const std::string& label);

// What differs between mine and a peer's, in words; empty if they belong to one collective.
std::string difference(const CollectiveTag& mine, const CollectiveTag& theirs);

}  // namespace sherd::dist
