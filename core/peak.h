// The processor's own limits, measured: what shares of peak are shares of.
#pragma once

namespace sherd {

// Multiply-adds of one thread with the widest vectors, in float32 operations a second (2 each). Takes some milliseconds
// at the first call.
double peak_flops();

}  // namespace sherd
