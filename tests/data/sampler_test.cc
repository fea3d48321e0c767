#include "data/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "core/error.h"
#include "tests/data/temp_folder.h"

namespace sherd::data {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using Indices = std::vector<int64_t>;

// torch.randperm(n, generator=torch.Generator().manual_seed(seed)), torch 2.15.
TEST(RandomPermutation, IsTorchs) {
  EXPECT_THAT(random_permutation(10, 0), ElementsAre(4, 1, 7, 5, 3, 9, 0, 8, 6, 2));
  EXPECT_THAT(random_permutation(17, 42),
              ElementsAre(13, 4, 3, 15, 8, 16, 9, 11, 12, 10, 6, 2, 1, 7, 14, 0, 5));
  EXPECT_THAT(random_permutation(5, (uint64_t(1) << 32) + 3), ElementsAre(1, 0, 3, 4, 2));
  EXPECT_THAT(random_permutation(0, 1), ElementsAre());
  EXPECT_THAT(random_permutation(1, 1), ElementsAre(0));
  const auto large = random_permutation(100'000, 7);
  int64_t sum = 0;
  for (int64_t i = 0; i < 100'000; ++i) sum = (sum + large[size_t(i)] * (i + 1)) % 1'000'000'007;
  EXPECT_EQ(sum, 302'707'150);
  EXPECT_THAT(message_of<Error>([] { random_permutation(-1, 0); }), HasSubstr("-1"));
}

Indices distributed(int64_t size, const DistributedOptions& options, int64_t epoch = 0) {
  DistributedSampler sampler(size, options);
  sampler.set_epoch(epoch);
  const auto indices = sampler.indices();
  EXPECT_EQ(int64_t(indices.size()), sampler.size());
  return indices;
}

// torch.utils.data.DistributedSampler(range(10), 3, rank, seed=4).
TEST(DistributedSampler, ShufflesAsTorch) {
  const Indices expected[2][3] = {{{0, 6, 2, 5}, {4, 7, 8, 0}, {9, 3, 1, 4}},
                                  {{0, 7, 9, 3}, {5, 6, 1, 0}, {8, 2, 4, 5}}};
  for (int64_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(distributed(10, {.num_replicas = 3, .rank = rank, .seed = 4}), expected[0][rank]);
    EXPECT_EQ(distributed(10, {.num_replicas = 3, .rank = rank, .seed = 4}, 5), expected[1][rank]);
  }
  const Indices dropped[4] = {{2, 1}, {0, 4}, {8, 5}, {7, 9}};  // range(11), epoch 2
  for (int64_t rank = 0; rank < 4; ++rank)
    EXPECT_EQ(distributed(11, {.num_replicas = 4, .rank = rank, .seed = 4, .drop_last = true}, 2),
              dropped[rank]);
}

// PyTorch's rule, said in another way: the list is repeated up to a multiple of the world size, or
// cut down to one; rank r takes every w-th.
TEST(DistributedSampler, PadsAndStridesAsTorch) {
  for (int64_t n : {0, 1, 2, 3, 7, 8, 10, 17})
    for (int64_t w : {1, 2, 3, 4, 8})
      for (bool drop : {false, true}) {
        Indices all(size_t(n), 0);
        std::iota(all.begin(), all.end(), 0);
        while (n > 0 && !drop && int64_t(all.size()) % w != 0)
          all.push_back(all[all.size() - size_t(n)]);
        while (drop && int64_t(all.size()) % w != 0) all.pop_back();
        for (int64_t rank = 0; rank < w; ++rank) {
          Indices expected;
          for (size_t i = size_t(rank); i < all.size(); i += size_t(w)) expected.push_back(all[i]);
          EXPECT_EQ(distributed(
                        n, {.num_replicas = w, .rank = rank, .shuffle = false, .drop_last = drop}),
                    expected)
              << n << " samples, " << w << " ranks, drop " << drop << ", rank " << rank;
        }
      }
}

TEST(DistributedSampler, T_22_UnevenSeesEachSampleOnce) {
  for (int64_t n : {0, 1, 2, 7, 8, 9})
    for (bool shuffle : {false, true}) {
      std::multiset<int64_t> seen;
      for (int64_t rank = 0; rank < 4; ++rank)
        for (auto i :
             distributed(n, {.num_replicas = 4, .rank = rank, .shuffle = shuffle, .uneven = true}))
          seen.insert(i);
      EXPECT_EQ(int64_t(seen.size()), n);
      EXPECT_EQ(int64_t(std::set<int64_t>(seen.begin(), seen.end()).size()), n);
    }
}

TEST(DistributedSampler, EpochsDiffer) {
  const DistributedOptions options = {.num_replicas = 2, .rank = 1};
  EXPECT_NE(distributed(100, options, 0), distributed(100, options, 1));
  EXPECT_EQ(distributed(100, options, 3), distributed(100, options, 3));
}

TEST(DistributedSampler, B_001_Refuses) {
  for (int64_t rank : {4, -1})
    EXPECT_THAT(
        message_of<Error>([&] { DistributedSampler(9, {.num_replicas = 4, .rank = rank}); }),
        HasSubstr("0…3"));
  EXPECT_THAT(message_of<Error>([] { DistributedSampler(9, {}); }), HasSubstr("num_replicas"));
  EXPECT_THAT(message_of<Error>([] {
                DistributedSampler(9, {.num_replicas = 2, .drop_last = true, .uneven = true});
              }),
              HasSubstr("exclude"));
  DistributedSampler sampler(9, {.num_replicas = 2});
  EXPECT_THAT(message_of<Error>([&] { sampler.set_epoch(-1); }), HasSubstr("-1"));
}

// list(torch.utils.data.RandomSampler(..., generator=torch.Generator().manual_seed(3))).
TEST(RandomSampler, DrawsAsTorch) {
  EXPECT_THAT(RandomSampler(7, {.replacement = true, .num_samples = 9, .seed = 3}).indices(),
              ElementsAre(5, 3, 3, 4, 0, 6, 2, 4, 5));
  EXPECT_THAT(RandomSampler(4, {.num_samples = 10, .seed = 3}).indices(),
              ElementsAre(2, 3, 1, 0, 3, 2, 1, 0, 0, 3));
}

std::map<int64_t, int> counts(const RandomSampler& sampler) {
  std::map<int64_t, int> count;
  const auto indices = sampler.indices();
  EXPECT_EQ(int64_t(indices.size()), sampler.size());
  for (auto i : indices) ++count[i];
  return count;
}

TEST(RandomSampler, B_004_CountsOfEachIndex) {
  constexpr int64_t n = 100;
  const auto replaced = counts(RandomSampler(n, {.replacement = true, .num_samples = n + 1}));
  EXPECT_LT(int64_t(replaced.size()), n);  // 101 draws of 100: all distinct is impossible, and
                                           // all values seen has probability below 1e-40
  EXPECT_GE(replaced.begin()->first, 0);
  EXPECT_LT(replaced.rbegin()->first, n);
  for (auto [index, count] : counts(RandomSampler(n, {.num_samples = 2 * n}))) EXPECT_EQ(count, 2);
  EXPECT_EQ(int64_t(counts(RandomSampler(n, {.num_samples = n - 1})).size()), n - 1);
  const auto one_more = counts(RandomSampler(n, {.num_samples = n + 1}));
  EXPECT_EQ(int64_t(one_more.size()), n);
  EXPECT_EQ(std::count_if(one_more.begin(), one_more.end(), [](auto& c) { return c.second == 2; }),
            1);
  EXPECT_THAT(message_of<Error>([] { RandomSampler(0, {.num_samples = 1}); }),
              HasSubstr("empty dataset"));
}

// What is left of an epoch, at any number of ranks; another epoch is whole again.
TEST(DistributedSampler, T_24_BeginsInTheMiddle) {
  for (int64_t replicas : {1, 2, 3})
    for (int64_t start : {0, 1, 7, 22, 23, 40}) {
      std::vector<int64_t> left, next;
      for (int64_t rank = 0; rank < replicas; ++rank) {
        DistributedSampler sampler(
            23, {.num_replicas = replicas, .rank = rank, .seed = 5, .uneven = true});
        sampler.load_state_dict({2, start});
        EXPECT_EQ(sampler.state_dict(), (SamplerState{2, start}));
        const auto mine = sampler.indices();
        EXPECT_EQ(int64_t(mine.size()), sampler.size());
        left.insert(left.end(), mine.begin(), mine.end());
        sampler.set_epoch(2);  // the same: as programs do after resuming
        EXPECT_EQ(sampler.start(), start);
        sampler.set_epoch(3);
        const auto all = sampler.indices();
        next.insert(next.end(), all.begin(), all.end());
      }
      auto expected = random_permutation(23, 5 + 2);
      expected.erase(expected.begin(), expected.begin() + std::min<int64_t>(start, 23));
      EXPECT_THAT(left, testing::UnorderedElementsAreArray(expected));
      EXPECT_EQ(next.size(), 23u);
    }
  SequentialSampler sequential(5);
  sequential.set_start(3);
  EXPECT_EQ(sequential.indices(), (std::vector<int64_t>{3, 4}));
  RandomSampler random(5, {.num_samples = 12, .seed = 1}), whole(5, {.num_samples = 12, .seed = 1});
  const auto all = whole.indices();
  random.set_start(8);
  EXPECT_EQ(random.indices(), std::vector<int64_t>(all.begin() + 8, all.end()));
  ListSampler list({1, 2});
  EXPECT_THROW(list.set_start(1), Error);
  EXPECT_THROW(sequential.set_start(-1), Error);
}

TEST(BatchSampler, Cuts) {
  SequentialSampler seven(7);
  EXPECT_THAT(BatchSampler(seven, 3).batches(),
              ElementsAre(Indices{0, 1, 2}, Indices{3, 4, 5}, Indices{6}));
  EXPECT_THAT(BatchSampler(seven, 3, true).batches(),
              ElementsAre(Indices{0, 1, 2}, Indices{3, 4, 5}));
  for (int64_t n : {0, 1, 5, 6, 7})
    for (int64_t batch : {int64_t(1), int64_t(2), int64_t(3), int64_t(10), INT64_MAX})
      for (bool drop : {false, true}) {
        SequentialSampler sampler(n);
        const BatchSampler batches(sampler, batch, drop);
        EXPECT_EQ(int64_t(batches.batches().size()), batches.size());
      }
  const BatchSampler list({{2, 3}, {4, 5, 6}});
  EXPECT_EQ(list.size(), 2);
  EXPECT_THAT(list.batches(), ElementsAre(Indices{2, 3}, Indices{4, 5, 6}));
  EXPECT_THAT(message_of<Error>([&] { BatchSampler(seven, 0); }), HasSubstr("batch_size"));
}

TEST(BatchSampler, HasItsSamplersEpoch) {
  RandomSampler sampler(10);
  BatchSampler batches(sampler, 4);
  batches.set_epoch(3);
  EXPECT_EQ(sampler.epoch(), 3);
  sampler.set_epoch(5);
  EXPECT_EQ(batches.epoch(), 5);
  EXPECT_EQ(batches.times_set(), 2);
  BatchSampler list(std::vector<Indices>{{1}});
  list.set_epoch(2);
  EXPECT_EQ(list.epoch(), 2);
}

}  // namespace
}  // namespace sherd::data
