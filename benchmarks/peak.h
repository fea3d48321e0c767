// What this machine could do at most, on one thread: the yardstick of the benchmarks.
#pragma once

namespace sherd::bench {

// The processor time of the calling thread: what other processes take does not count.
double thread_seconds();

// GFLOP/s of float32 fused multiply-adds, on AVX-512 where the processor has it, else AVX2.
double fma_peak();
// GB/s read from memory: a sum over an array larger than the caches.
double read_bandwidth();

}  // namespace sherd::bench
