// Tests over the backend that is their parameter; mpi is skipped where it is missing.
//
//     class Groups : public OverBackends {};
//     INSTANTIATE_TEST_SUITE_P(All, Groups, testing::Values("gloo", "shm"), name_of_backend);
//     TEST_P(Groups, ...) { over_ranks(3, [](int rank) { ... }); }
#pragma once
#include <gtest/gtest.h>

#include <cstdlib>

#include "tests/distributed/spawn.h"

namespace sherd::dist {

// Ranks are threads, where the backend lets them; over mpi processes.
inline void run_over(const std::string& backend, int ranks, const std::function<void(int rank)>& f,
                     Milliseconds timeout = std::chrono::seconds(60)) {
  // With SHERD_TEST_ALL one start of mpirun may try the whole matrix.
  const std::chrono::seconds kill_after(std::getenv("SHERD_TEST_ALL") ? 3000 : 250);
  if (backend == "mpi")
    run_processes(ranks, f, {.timeout = timeout, .kill_after = kill_after, .backend = backend});
  else
    run_ranks(ranks, f, {.timeout = timeout, .backend = backend});
}

class OverBackends : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const std::string why = std::string(GetParam()) == "mpi" ? why_no_mpi() : "";
    if (!why.empty()) GTEST_SKIP() << why;
  }
  static void over_ranks(int ranks, const std::function<void(int rank)>& f) {
    run_over(GetParam(), ranks, f);
  }
};

inline std::string name_of_backend(const testing::TestParamInfo<const char*>& info) {
  return info.param;
}

}  // namespace sherd::dist
