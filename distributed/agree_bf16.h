// One way of computing bfloat16 products on all ranks (core/gemm.h): two ways have different bits.
#pragma once
#include "distributed/process_group.h"

namespace sherd::dist {

// Rank 0's choice on all, and converted products if some rank's processor has no native ones. Only
// rank 0 measures. A collective, where there are several ranks.
void agree_on_bf16_products(const Group& group);

}  // namespace sherd::dist
