// The README's program compiles against sherd.h alone, trains sharded over two ranks, and learns.
#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <vector>

namespace {

TEST(Readme, ItsProgramTrains) {
  std::FILE* p = popen("tests/readme/train 2>&1", "r");
  ASSERT_NE(p, nullptr);
  std::vector<double> losses;
  std::string other;
  char line[256];
  while (std::fgets(line, sizeof line, p)) {
    double loss = 0;
    if (std::sscanf(line, "loss %lf", &loss) == 1)
      losses.push_back(loss);
    else
      other += line;
  }
  EXPECT_EQ(pclose(p), 0) << other;
  ASSERT_GT(losses.size(), 10u) << other;
  EXPECT_NEAR(losses.front(), 5.7, 0.6);  // ln 256, and what a random start adds
  EXPECT_LT(losses.back(), 2.0);
}

}  // namespace
