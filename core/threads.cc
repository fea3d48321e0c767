#include "core/threads.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <thread>
#include <utility>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "core/error.h"

namespace sherd {
namespace {

constexpr int kMost = 1024;  // far more, and the system has no room for their stacks

int initial_threads() {
  if (const char* s = std::getenv("OMP_NUM_THREADS"))
    if (const int n = std::atoi(s); n > 0) {
#ifdef _OPENMP
      if (n > kMost) omp_set_num_threads(kMost);
#endif
      return std::min(n, kMost);
    }
  return std::max(1u, std::thread::hardware_concurrency());
}

std::atomic<int>& threads() {
  static std::atomic<int> n = initial_threads();
  return n;
}

thread_local bool one_thread = false;

}  // namespace

int num_threads() { return one_thread ? 1 : threads().load(std::memory_order_relaxed); }

OneThread::OneThread() : before_(std::exchange(one_thread, true)) {}
OneThread::~OneThread() { one_thread = before_; }

void set_num_threads(int n) {
  if (n < 1) fail("[set_num_threads] needs at least one thread, got ", n);
  if (n > kMost) fail("[set_num_threads] takes at most ", kMost, " threads, got ", n);
  threads() = n;
#ifdef _OPENMP
  omp_set_num_threads(n);  // oneDNN asks OpenMP
#endif
}

}  // namespace sherd
