#include "core/threads.h"

#include <gtest/gtest.h>

#include "core/error.h"

namespace sherd {
namespace {

TEST(Threads, AnAbsurdNumberIsRefused) {
  const int before = num_threads();
  for (int n : {0, -1, 1025}) EXPECT_THROW(set_num_threads(n), Error) << n;
  EXPECT_EQ(num_threads(), before);
}

}  // namespace
}  // namespace sherd
