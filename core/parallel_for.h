// parallel_for(n, grain, f): f(begin, end) over [0, n) in fixed pieces of `grain`, whatever the
// number of threads, so that sums made a piece at a time have the same bits on any number of
// threads.
#pragma once
#include <algorithm>
#include <cstdint>
#include <exception>
#include <mutex>

#include "core/threads.h"

namespace sherd {

template <class F>
void parallel_for(int64_t n, int64_t grain, const F& f) {
  const int64_t pieces = (n + grain - 1) / grain;
  if (pieces <= 1 || num_threads() == 1) {
    for (int64_t i = 0; i < pieces; ++i) f(i * grain, std::min(n, (i + 1) * grain));
    return;
  }
  std::exception_ptr
      error;  // an exception may not leave a parallel region: the first is kept and thrown after it
  std::mutex mutex;
#pragma omp parallel for schedule(static) num_threads(num_threads())
  for (int64_t i = 0; i < pieces; ++i) {
    try {
      f(i * grain, std::min(n, (i + 1) * grain));
    } catch (...) {
      std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace sherd
