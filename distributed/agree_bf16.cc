#include "distributed/agree_bf16.h"

#include <algorithm>

#include "core/gemm.h"
#include "distributed/agree.h"

namespace sherd::dist {

void agree_on_bf16_products(const Group& group) {
  if (size_of_group(group) == 1) return;
  const bool is_native =
      group->rank() == 0 ? bf16_products() == Bf16Products::kNative : has_native_bf16_products();
  const auto all = all_gather_number(group, is_native, {.label = "bf16 products"});
  set_bf16_products(std::ranges::all_of(all, [](int64_t n) { return n != 0; })
                        ? Bf16Products::kNative
                        : Bf16Products::kConverted);
}

}  // namespace sherd::dist
