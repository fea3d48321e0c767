// What this processor could do at most, measured on one thread: what shares of peak are shares of.
#pragma once

namespace sherd {

// GFLOP/s of float32 multiply-adds (2 each), on AVX-512 where the processor has it, else AVX2. Some
// milliseconds.
double fma_peak();
// GB/s read from memory: a sum over 512 MiB.
double read_bandwidth();
// Processor time of the calling thread: what other processes take does not count.
double thread_seconds();

}  // namespace sherd
