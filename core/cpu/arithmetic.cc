#include "core/ops/arithmetic.h"

#include "core/cpu/pointwise.h"
static const bool set = sherd::cpu::set_pointwise<sherd::Arithmetic>();
