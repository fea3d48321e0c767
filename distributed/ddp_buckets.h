// Which parameters share a bucket of DDP: pure arithmetic.
#pragma once
#include <cstdint>
#include <vector>

#include "core/dtype.h"

namespace sherd::dist {

// By index, in the given order, never two dtypes in one. bytes and dtypes by parameter. A bucket is
// closed when it has reached its dtype's limit: first_limit for the first one of each dtype, limit
// for the others. Buckets are ordered by their first parameter.
std::vector<std::vector<int>> assign_buckets(const std::vector<int64_t>& bytes,
                                             const std::vector<DType>& dtypes, int64_t first_limit,
                                             int64_t limit);

}  // namespace sherd::dist
