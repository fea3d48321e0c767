// MixedPrecision: which dtypes a sharded model computes and reduces in. The pieces that the
// optimizer steps (the master weights) keep the dtype that the model was built in.
//
//     {.param_dtype = kBFloat16, .reduce_dtype = kFloat32}
#pragma once
#include <optional>

#include "core/dtype.h"

namespace sherd {

struct MixedPrecision {
  // of gathered parameters and of the computation; default: as built
  std::optional<DType> param_dtype = {};
  std::optional<DType> reduce_dtype = {};  // of the gradients' sum over ranks; default: param_dtype
  // of floating point buffers, from the first forward on; state keeps the dtype they had. Default:
  // as they are
  std::optional<DType> buffer_dtype = {};
  // gradients stay in reduce_dtype; else they get the master's dtype
  bool keep_low_precision_grads = false;
  bool cast_forward_inputs = true;  // floating point inputs of forward become param_dtype
};

// Error for a dtype that is not floating point, naming the field.
void check_mixed_precision(const MixedPrecision& p);

}  // namespace sherd
