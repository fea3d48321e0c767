// What a collective may write into.
#pragma once
#include <span>

#include "core/tensor.h"

namespace sherd::dist {

// Error where elements of outputs lie in one place: of one tensor (an expanded one), or of two.
// What stayed there would be chance. `what`: the argument's name, "outputs".
void check_outputs(const char* op, const char* what, std::span<const Tensor> outputs);

}  // namespace sherd::dist
