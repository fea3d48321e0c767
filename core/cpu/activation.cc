#include "core/ops/activation.h"

#include "core/cpu/pointwise.h"
static const bool set = sherd::cpu::set_pointwise<sherd::Activations>();
