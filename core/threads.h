// How many threads kernels use.
#pragma once

namespace sherd {

int num_threads();  // of this process's kernels; starts as OMP_NUM_THREADS or the number of cores
void set_num_threads(int n);  // n >= 1; libraries that kernels call use as many

// For the scope, kernels that this thread calls run on it alone: num_threads() is 1 for it.
class OneThread {
 public:
  OneThread();
  ~OneThread();
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  bool before_;
};

}  // namespace sherd
