// Means over uneven ranks.
#include "distributed/metrics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "tests/distributed/spawn.h"

namespace sherd::dist {
namespace {

std::vector<double> random_values(int64_t n) {
  std::mt19937_64 random(4);
  std::vector<double> v;
  for (int64_t i = 0; i < n; ++i)
    v.push_back(std::ldexp(double(int64_t(random())) / 9e18, int(random() % 60) - 30));
  return v;
}

TEST(MeanMetric, T_14_SameBitsHoweverSamplesAreSpread) {
  const auto values = random_values(101);
  MeanMetric all;
  for (double v : values) all.update(v);
  const double expected = all.compute(nullptr);
  long double sum = 0;
  for (double v : values) sum += v;
  EXPECT_NEAR(expected, double(sum / 101), std::abs(expected) * 1e-12);
  for (int world : {2, 3, 4})
    run_ranks(world, [&](int rank) {
      // The last rank has nothing, rank 0 most.
      MeanMetric mine, valid, weighted;
      std::vector<double> own, padded;
      const Tensor which = empty({101}, kBool);
      for (size_t i = 0; i < values.size(); ++i) {
        const bool is_mine = (i < 60 ? 0 : int(i) % (world - 1)) == rank;
        if (is_mine) own.push_back(values[i]);
        padded.push_back(is_mine ? values[i] : std::nan(""));
        which.data<bool>()[i] = is_mine;
      }
      EXPECT_EQ(own.empty(), rank == world - 1);
      mine.update(tensor<double>(std::span<const double>(own), {int64_t(own.size())}));
      valid.update(tensor<double>(std::span<const double>(padded), {101}), which);
      for (double v : own) weighted.update(v, 1);
      weighted.update(123, 0);
      EXPECT_EQ(mine.compute(), expected);
      EXPECT_EQ(valid.compute(), expected);
      EXPECT_EQ(MeanMetric::compute({&weighted, &mine}, default_group()),
                (std::vector<double>{expected, expected}));
    });
}

TEST(MeanMetric, WeightsByCount) {
  run_ranks(3, [&](int rank) {
    MeanMetric m;
    m.update(double(rank), 1 << rank);  // 0 once, 1 twice, 2 four times
    EXPECT_EQ(m.compute(), 10.0 / 7);
    EXPECT_EQ(m.count(), 1 << rank);
    m.reset();
    if (rank == 1) m.update(full({2, 3}, -0.5, kBFloat16));
    EXPECT_EQ(m.compute(), -0.5);
  });
}

TEST(MeanMetric, WhatIsNoNumberShows) {
  MeanMetric none, infinite, broken;
  EXPECT_TRUE(std::isnan(none.compute(nullptr)));
  infinite.update(-std::numeric_limits<double>::infinity());
  infinite.update(3);
  EXPECT_EQ(infinite.compute(nullptr), -std::numeric_limits<double>::infinity());
  broken.update(std::nan(""));
  broken.update(3);
  EXPECT_TRUE(std::isnan(broken.compute(nullptr)));
  EXPECT_THROW(none.update(zeros({2}, kInt64)), Error);
  EXPECT_THROW(none.update(zeros({2}), zeros({3}, kBool)), Error);
  EXPECT_THROW(none.update(1, -1), Error);
}

}  // namespace
}  // namespace sherd::dist
