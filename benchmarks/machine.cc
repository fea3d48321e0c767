// What this machine could do at most, on one thread, as one JSON object:
//
//     ./bazelw run //benchmarks:machine
#include <cstdio>

#include "core/gemm.h"
#include "core/peak.h"

int main() {
  // The text of describe_bf16_products() has no quotes.
  std::printf("{\"fma_gflops\": %.1f, \"read_gb_per_s\": %.1f, \"bf16\": \"%s\"}\n",
              sherd::fma_peak(), sherd::read_bandwidth(), sherd::describe_bf16_products().c_str());
}
