#include "core/cpu/isa.h"

#include <atomic>
#include <cstdlib>

namespace sherd::cpu {
namespace {

bool supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
std::atomic<bool>& enabled() {
  static std::atomic<bool> on = supported() && !std::getenv("SHERD_NO_AVX512");
  return on;
}

}  // namespace

bool has_avx512() { return enabled().load(std::memory_order_relaxed); }
void set_avx512(bool on) { enabled() = on && supported(); }

}  // namespace sherd::cpu
