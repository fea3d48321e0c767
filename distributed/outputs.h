// What a collective may write into.
#pragma once
#include <span>

#include "core/tensor.h"

namespace sherd::dist {

// Error where elements of outputs lie in one place: of one tensor (an expanded one), or of two.
// What stayed there would be chance. Views that interleave are looked at element by element within
// 4 MiB; larger ones are taken to be apart. `what`: the argument's name, "outputs".
void check_outputs(const char* op, const char* what, std::span<const Tensor> outputs);

}  // namespace sherd::dist
