// DataLoader::state_dict and load_state_dict: interrupted equals uninterrupted, at any number of
// workers and ranks, and states that do not fit are refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <thread>

#include "core/generator.h"
#include "core/philox.h"
#include "data/token_dataset.h"
#include "tests/data/data_loader_scenario.h"
#include "tests/data/temp_folder.h"

namespace sherd::data {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

// Whatever the number of workers before and after, wherever the cut: the rest of the epoch comes,
// and then the next epochs, as if nothing had happened. Random numbers in get() too.
TEST(DataLoader, T_24_ResumesInTheMiddleOfAnEpoch) {
  const TestDataset dataset(23, [](int64_t i) {
    const auto draw = default_generator().next();
    return Sample{{"x", tensor<int64_t>({i, int64_t(philox(draw.key, draw.number, 0)[0])})}};
  });
  DistributedSampler first_sampler(23, {.num_replicas = 2, .rank = 1});
  DistributedSampler second_sampler(23, {.num_replicas = 2, .rank = 1});
  for (bool distributed : {false, true})
    for (int64_t workers : {0, 3}) {
      const auto options = [&](DistributedSampler& sampler, int64_t its_workers, uint64_t seed) {
        LoaderOptions o = {.batch_size = 2, .num_workers = its_workers, .seed = seed};
        o.shuffle = !distributed;
        if (distributed) o.sampler = &sampler;
        return o;
      };
      first_sampler.set_epoch(0);
      DataLoader loader(dataset, options(first_sampler, workers, 11));
      std::vector<Indices> all;
      std::vector<LoaderState> states = {loader.state_dict()};
      for (int epoch = 0; epoch < 3; ++epoch)
        for (auto& batch : loader) {
          all.push_back(values(batch.at("x")));
          states.push_back(loader.state_dict());
        }
      ASSERT_EQ(int64_t(all.size()), 3 * loader.size());
      for (size_t cut = 0; cut < all.size(); ++cut) {
        // A new process: another seed there, which the state overrides, and other workers. Cut a
        // second time, three batches later.
        std::vector<Indices> rest;
        LoaderState state = states[cut];
        for (size_t most : {size_t(3), all.size()}) {
          second_sampler.set_epoch(0);
          DataLoader resumed(dataset, options(second_sampler, 3 - workers, 99));
          resumed.load_state_dict(state);
          EXPECT_EQ(resumed.state_dict(), state);
          for (int64_t epoch = state.epoch; epoch < 3 && most > 0; ++epoch) {
            if (distributed) second_sampler.set_epoch(epoch);  // as programs do
            for (auto& batch : resumed) {
              rest.push_back(values(batch.at("x")));
              state = resumed.state_dict();
              if (--most == 0) break;
            }
          }
        }
        EXPECT_EQ(rest, std::vector<Indices>(all.begin() + int64_t(cut), all.end()))
            << "cut after " << cut << " batches, " << workers << " workers";
      }
    }
}

TEST(DataLoader, StateCountsWhatTheLoopHas) {
  const TestDataset dataset(40);
  DataLoader loader(dataset, {.batch_size = 2, .num_workers = 4, .prefetch_factor = 5, .seed = 1});
  EXPECT_EQ(loader.state_dict(), (LoaderState{0, 0, 20, 1, 0, 2, 40}));
  int64_t taken = 0;
  for ([[maybe_unused]] auto& batch : loader) {
    EXPECT_EQ(loader.state_dict(), (LoaderState{0, ++taken, 20, 1, 0, 2, 40}));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // workers run ahead
  }
  EXPECT_EQ(loader.state_dict(), (LoaderState{0, 20, 20, 1, 0, 2, 40}));
}

TEST(DataLoader, StateOfAFinishedEpochAndOfAnother) {
  const TestDataset dataset(10);
  DataLoader loader(dataset, {.batch_size = 2, .shuffle = true, .seed = 1});
  const auto epochs = {epoch_of(loader), epoch_of(loader), epoch_of(loader)};
  loader.load_state_dict({1, 5, 5, 1, 0, 2, 10});
  EXPECT_THAT(epoch_of(loader), ElementsAre());
  EXPECT_EQ(epoch_of(loader), epochs.begin()[2]);
  loader.load_state_dict({1, 3, 5, 1, 0, 2, 10});
  loader.set_epoch(2);  // another epoch: from its beginning
  EXPECT_EQ(epoch_of(loader), epochs.begin()[2]);
  loader.load_state_dict({1, 3, 5, 1, 0, 2, 10});
  loader.set_epoch(1);
  EXPECT_EQ(epoch_of(loader).size(), 2u);
}

TEST(DataLoader, RefusesAStateThatDoesNotFit) {
  const TestDataset dataset(10);
  DataLoader loader(dataset, {.batch_size = 2});
  EXPECT_THAT(message_of<Error>([&] {
                loader.load_state_dict({0, 1, 6, 0, 0, 2, 12});
              }),
              AllOf(HasSubstr("of 12 samples"), HasSubstr("this one has 10")));
  for (const LoaderState& state : {LoaderState{0, 6, 5, 0, 0, 2, 10},
                                   {0, -1, 5, 0, 0, 2, 10},
                                   {-1, 0, 5, 0, 0, 2, 10},
                                   {0, 0, 5, 0, -1, 2, 10},
                                   {0, 0, 5, 0, 0, -2, 10}})
    EXPECT_THAT(message_of<Error>([&] { loader.load_state_dict(state); }), HasSubstr("damaged"));
  // Batches of another size, where the order cannot begin in the middle.
  ListSampler list({3, 1, 4, 1, 5});
  DataLoader fixed(dataset, {.batch_size = 2, .sampler = &list});
  EXPECT_THAT(message_of<Error>([&] {
                fixed.load_state_dict({0, 1, 2, 0, 0, 4, 10});
              }),
              HasSubstr("cannot begin in the middle"));
  BatchSampler batches({{1, 2}, {3, 4}});
  DataLoader listed(dataset, {.batch_sampler = &batches});
  EXPECT_THAT(message_of<Error>([&] {
                listed.load_state_dict({0, 1, 2, 0, 0, 4, 10});
              }),
              HasSubstr("from a list"));
  EXPECT_THAT(message_of<Error>([&] {
                listed.load_state_dict({0, 1, 6, 0, 0, 0, 10});
              }),
              AllOf(HasSubstr("6 batches"), HasSubstr("this one has 2")));
  listed.load_state_dict({0, 1, 2, 0, 0, 0, 10});
  EXPECT_EQ(epoch_of(listed).size(), 1u);
  // What is refused changes nothing.
  for (DataLoader* l : {&fixed, &listed}) {
    l->set_epoch(3);
    const auto open = l->begin();
    const uint64_t seed = l->seed();
    const LoaderState before = l->state_dict();
    EXPECT_THROW(l->load_state_dict({1, 1, 9, 77, 0, l == &fixed ? 4 : 0, 10}), Error);
    EXPECT_THROW(l->load_state_dict({1, 1, l->size(), 77, 2, l == &fixed ? 2 : 0, 10}), Error);
    EXPECT_EQ(l->seed(), seed);
    EXPECT_EQ(l->state_dict(), before);
    EXPECT_NO_THROW((void)*open);
  }
}

// As batches of like lengths have.
TEST(DataLoader, StateOfASamplerWhoseSizeDependsOnTheEpoch) {
  class ByEpoch : public BatchSampler {
   public:
    int64_t size() const override { return epoch() + 2; }
    std::vector<std::vector<int64_t>> batches() const override {
      std::vector<std::vector<int64_t>> all;
      for (int64_t i = 0; i < size(); ++i) all.push_back({i});
      return all;
    }
  };
  const TestDataset dataset(10);
  ByEpoch batches;
  DataLoader loader(dataset, {.batch_sampler = &batches});
  loader.load_state_dict({3, 2, 5, 0, 0, 0, 10});
  EXPECT_EQ(flat(epoch_of(loader)), (std::vector<int64_t>{2, 3, 4}));
  EXPECT_EQ(flat(epoch_of(loader)).size(), 6u);
  EXPECT_THAT(message_of<Error>([&] {
                loader.load_state_dict({1, 1, 6, 0, 0, 0, 10});
              }),
              HasSubstr("this one has 3"));
  EXPECT_EQ(flat(epoch_of(loader)).size(), 7u) << "a refusal changes no epoch";
}

TEST(DataLoader, RefusesAStateOfOtherDataOfTheSameSize) {
  std::vector<uint16_t> ids(101);
  std::iota(ids.begin(), ids.end(), uint16_t(0));
  const TokenDataset first(ids, {.sequence_length = 10});
  ids[57] = 0;
  const TokenDataset second(ids, {.sequence_length = 10});
  ASSERT_EQ(first.size(), second.size());
  DataLoader saved(first), same(first), other(second);
  same.load_state_dict(saved.state_dict());
  EXPECT_THAT(message_of<Error>([&] { other.load_state_dict(saved.state_dict()); }),
              AllOf(HasSubstr("of another dataset of 10 samples"), HasSubstr("take the data")));
  // A state that knows of none, as those of earlier versions.
  LoaderState unknown = saved.state_dict();
  unknown.dataset_fingerprint = 0;
  other.load_state_dict(unknown);
}

// Saved by some ranks and gone on with by others, twice in one epoch: what is left of it is what
// nobody had, each once, in the same order.
TEST(DataLoader, T_24_T_32_GoesOnAtAnotherNumberOfRanks) {
  struct World {
    int64_t ranks, batch, steps;  // that it runs
  };
  const int64_t n = 61;
  const TestDataset dataset(n);
  for (bool drop_last : {false, true})
    for (auto [first, second, third] :
         {std::array{World{2, 3, 4}, World{3, 2, 3}, World{1, 5, 100}},
          {World{4, 2, 2}, World{1, 3, 4}, World{2, 4, 100}},
          {World{1, 7, 3}, World{5, 1, 5}, World{5, 1, 100}},
          {World{2, 3, 100}, World{3, 2, 100}, World{1, 1, 100}}}) {
      std::vector<int64_t> seen;  // in the order of the global batches
      std::optional<LoaderState> state;
      bool ended = false;
      for (const World& w : {first, second, third}) {
        std::vector<std::vector<Indices>> by_rank;
        std::vector<LoaderState> states;
        for (int64_t r = 0; r < w.ranks; ++r) {
          DistributedSampler sampler(
              n, {.num_replicas = w.ranks, .rank = r, .seed = 9, .uneven = !drop_last});
          if (drop_last)
            sampler = DistributedSampler(
                n, {.num_replicas = w.ranks, .rank = r, .seed = 9, .drop_last = true});
          DataLoader loader(dataset, {.batch_size = w.batch,
                                      .sampler = &sampler,
                                      .num_workers = r % 2,
                                      .drop_last = drop_last});
          if (state)
            loader.load_state_dict(*state);
          else
            loader.set_epoch(1);
          auto& batches = by_rank.emplace_back();
          for (auto& batch : loader) {
            EXPECT_EQ(loader.state_dict().epoch, 1);
            batches.push_back(values(batch.at("x")));
            if (int64_t(batches.size()) == w.steps) break;
          }
          states.push_back(loader.state_dict());
        }
        for (size_t step = 0; step < by_rank[0].size(); ++step)
          for (int64_t i = 0; i < w.batch; ++i)
            for (auto& batches : by_rank)
              if (step < batches.size() && i < int64_t(batches[step].size()))
                seen.push_back(batches[step][size_t(i)]);
        state = states[0];
        EXPECT_FALSE(ended && !by_rank[0].empty());  // a finished epoch stays finished
        ended = ended || state->batches == state->batches_per_epoch;
      }
      std::vector<int64_t> expected = random_permutation(n, 9 + 1);
      if (drop_last) {
        EXPECT_GE(seen.size(), size_t(n - 8));
        expected.resize(seen.size());
      }
      EXPECT_EQ(seen, expected) << first.ranks << " " << drop_last;
    }
}

}  // namespace
}  // namespace sherd::data
