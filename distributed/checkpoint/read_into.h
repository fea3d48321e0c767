// What was stored in one dtype, into a tensor of maybe another.
//
//     read_into(parameter, kBFloat16, [&](void* to) { reader.read(name, begin, end, to); });
#pragma once
#include "autograd/grad_mode.h"
#include "core/tensor.h"

namespace sherd::dist {

// read(memory) puts as many elements as `to` has, in dtype `stored`, at that place.
template <class Read>
void read_into(const Tensor& to, DType stored, const Read& read) {
  if (to.numel()) {
    const bool direct = to.dtype() == stored && to.is_contiguous() && to.device().is_cpu();
    const Tensor values = direct ? to : empty({to.numel()}, stored);
    read(values.bytes());
    if (!direct) {
      NoGrad off;
      copy_raw(to, values.as_strided_raw(to.sizes(), contiguous_strides(to.sizes()), 0));
    }
  }
  // Also where there is nothing of it: FSDP decides by versions what to gather, on all ranks alike.
  to.bump_version();
}

}  // namespace sherd::dist
