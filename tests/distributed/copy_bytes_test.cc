// Every byte and no other, wherever the two lie.
#include "distributed/copy_bytes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace sherd::dist {
namespace {

TEST(CopyBytes, CopiesAllAndNothingElse) {
  constexpr int64_t kMost = 1200, kGuard = 80;
  std::vector<char> from(kMost + 64);
  for (size_t i = 0; i < from.size(); ++i) from[i] = char(i * 31 + i / 256 + 1);
  for (bool stream : {false, true})
    for (int64_t bytes : {0, 1, 63, 64, 65, 255, 256, 257, 383, 384, 640, 1000, 1200})
      for (int64_t to_at : {0, 1, 31, 32, 63})
        for (int64_t from_at : {0, 1, 17, 32}) {
          std::vector<char> to(kGuard + kMost + 64 + kGuard, 0);
          char* begin = to.data() + kGuard + to_at;
          copy_bytes(begin, from.data() + from_at, bytes, stream);
          std::vector<char> want(to.size(), 0);
          std::copy_n(from.begin() + from_at, bytes, want.begin() + kGuard + to_at);
          ASSERT_TRUE(to == want) << bytes << " bytes to " << to_at << " from " << from_at;
        }
}

}  // namespace
}  // namespace sherd::dist
