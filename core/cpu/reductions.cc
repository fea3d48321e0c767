#include "core/ops/reductions.h"

#include "core/cpu/reduce.h"

static const bool set = []<class... Ops>(sherd::List<Ops...>) {
  (sherd::reduction<Ops>.set(sherd::DeviceType::kCPU, sherd::cpu::reduction_kernel<Ops>), ...);
  return true;
}(sherd::Reductions{});
