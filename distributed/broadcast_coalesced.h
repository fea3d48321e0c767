// One rank's values of many tensors, given to all: small ones travel together.
//
//     broadcast_coalesced(group, tensors, /*root=*/0, "ddp construction");
#pragma once
#include <string>
#include <vector>

#include "distributed/process_group.h"

namespace sherd::dist {

// All ranks of the group give tensors of the same sizes and dtypes, in the same order; any strides,
// dtypes mixed, empty ones too. They travel in buffers of at most buffer_bytes, or of a larger
// tensor's size, two at a time. A collective; waits. Where a tensor has the root's values already
// it is not written, and its version stays: what autograd saved of it stays good.
void broadcast_coalesced(const Group& group, const std::vector<Tensor>& tensors, int root,
                         const std::string& label, int64_t buffer_bytes = int64_t(1) << 20);

}  // namespace sherd::dist
