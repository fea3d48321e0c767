#include "distributed/mixed_precision.h"

#include "core/error.h"

namespace sherd {

void check_mixed_precision(const MixedPrecision& p) {
  auto check = [](const char* field, const std::optional<DType>& d) {
    if (d && !is_float(*d))
      fail("[fsdp] mixed_precision.", field, " must be float16, bfloat16, float32 or float64, got ",
           *d);
  };
  check("param_dtype", p.param_dtype);
  check("reduce_dtype", p.reduce_dtype);
  check("buffer_dtype", p.buffer_dtype);
}

}  // namespace sherd
