#include "data/data_loader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <limits>
#include <mutex>
#include <set>
#include <thread>

#include "core/context.h"
#include "core/generator.h"
#include "core/philox.h"
#include "tests/data/data_loader_scenario.h"
#include "tests/data/temp_folder.h"

namespace sherd::data {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using Clock = std::chrono::steady_clock;

static_assert(std::input_iterator<DataLoader::Iterator>);

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

int thread_count() {
  return int(std::distance(std::filesystem::directory_iterator("/proc/self/task"), {}));
}

// The system may list a thread for a moment after it was joined.
int settled_thread_count() {
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  return thread_count();
}
void expect_threads(int count) {
  for (int i = 0; i < 200 && thread_count() != count; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_EQ(thread_count(), count);
}

// ---- order

TEST(DataLoader, B_002_KeepsOrderWithAnyNumberOfWorkers) {
  const TestDataset dataset(100, [](int64_t i) {
    if (i % 7 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
    return Sample{{"x", tensor<int64_t>({i})}, {"label", tensor<int64_t>({-i})}};
  });
  for (int64_t workers : {0, 1, 4, 150})
    for (int64_t batch_size : {1, 2, 3})
      for (int64_t prefetch : {1, 2, 3}) {
        DataLoader sequential(
            dataset,
            {.batch_size = batch_size, .num_workers = workers, .prefetch_factor = prefetch});
        EXPECT_EQ(sequential.size(), (100 + batch_size - 1) / batch_size);
        const auto batches = epoch_of(sequential);
        EXPECT_EQ(int64_t(batches.size()), sequential.size());
        EXPECT_EQ(flat(batches), range(100));
        DataLoader shuffled(dataset, {.batch_size = batch_size,
                                      .shuffle = true,
                                      .num_workers = workers,
                                      .prefetch_factor = prefetch});
        Indices seen;
        for (auto& batch : shuffled) {
          for (auto i : values(batch.at("x"))) seen.push_back(i);
          for (size_t k = 0; k < values(batch.at("x")).size(); ++k)
            EXPECT_EQ(values(batch.at("x"))[k], -values(batch.at("label"))[k]);
        }
        EXPECT_NE(seen, range(100));
        std::sort(seen.begin(), seen.end());
        EXPECT_EQ(seen, range(100));
      }
}

TEST(DataLoader, DropsTheLastBatchOnRequest) {
  const TestDataset dataset(10);
  DataLoader loader(dataset, {.batch_size = 4, .drop_last = true});
  EXPECT_EQ(loader.size(), 2);
  EXPECT_THAT(epoch_of(loader), ElementsAre(Indices{0, 1, 2, 3}, Indices{4, 5, 6, 7}));
  DataLoader none(dataset, {.batch_size = 11, .num_workers = 2, .drop_last = true});
  EXPECT_EQ(none.size(), 0);
  EXPECT_THAT(epoch_of(none), ElementsAre());
  const TestDataset nothing(0);
  DataLoader empty(nothing, {.batch_size = 4, .num_workers = 2});
  EXPECT_THAT(epoch_of(empty), ElementsAre());
}

TEST(DataLoader, ABatchMayBeLargerThanAnyDataset) {
  const TestDataset dataset(5);
  DataLoader loader(dataset, {.batch_size = INT64_MAX});
  EXPECT_EQ(loader.size(), 1);
  EXPECT_EQ(flat(epoch_of(loader)), range(5));
}

TEST(DataLoader, B_003_SeedDecidesTheOrder) {
  const TestDataset dataset(50);
  const auto two_epochs = [&](int64_t workers, std::optional<uint64_t> seed) {
    DataLoader loader(dataset, {.shuffle = true, .num_workers = workers, .seed = seed});
    const auto first = epoch_of(loader);
    return std::pair(first, epoch_of(loader));
  };
  EXPECT_EQ(two_epochs(0, 7), two_epochs(2, 7));
  EXPECT_NE(two_epochs(0, 7), two_epochs(0, 8));
  manual_seed(5);
  const auto before = two_epochs(0, {});
  EXPECT_EQ(before, two_epochs(2, {}));
  manual_seed(6);
  EXPECT_NE(before, two_epochs(0, {}));
  manual_seed(5);
  EXPECT_EQ(before, two_epochs(0, {}));
  manual_seed(0);
}

TEST(DataLoader, B_005_TakesAnySamplers) {
  const TestDataset dataset(12);
  ListSampler from_two({2, 3, 4, 5, 6, 7, 8, 9, 10, 11});
  std::vector<Indices> pattern;
  for (int64_t begin = 0, i = 0; begin < 10; begin += 2 + i % 2, ++i) {
    pattern.emplace_back();
    for (int64_t k = begin; k < std::min<int64_t>(begin + 2 + i % 2, 10); ++k)
      pattern.back().push_back(11 - k);
  }
  BatchSampler batches(pattern);
  for (int64_t workers : {0, 4}) {
    DataLoader list(dataset, {.batch_size = 3, .sampler = &from_two, .num_workers = workers});
    EXPECT_EQ(list.size(), 4);
    EXPECT_EQ(flat(epoch_of(list)), from_two.indices());
    DataLoader lists(dataset, {.batch_sampler = &batches, .num_workers = workers});
    EXPECT_EQ(lists.size(), int64_t(pattern.size()));
    EXPECT_EQ(epoch_of(lists), pattern);
  }
}

TEST(DataLoader, B_001_RanksShareNoSample) {
  const TestDataset dataset(9);
  std::multiset<int64_t> seen;
  for (int64_t rank = 0; rank < 4; ++rank) {
    DistributedSampler sampler(9, {.num_replicas = 4, .rank = rank});
    DataLoader loader(dataset, {.batch_size = 2, .sampler = &sampler, .drop_last = true});
    for (auto i : flat(epoch_of(loader))) seen.insert(i);
  }
  EXPECT_EQ(std::set<int64_t>(seen.begin(), seen.end()).size(), seen.size());
  EXPECT_EQ(seen.size(), 8u);
}

TEST(DataLoader, T_22_DatasetSmallerThanTheWorld) {
  const TestDataset dataset(3);
  for (int64_t rank = 0; rank < 8; ++rank) {
    DistributedSampler sampler(3, {.num_replicas = 8, .rank = rank, .shuffle = false});
    DataLoader loader(dataset, {.batch_size = 4, .sampler = &sampler, .num_workers = 1});
    EXPECT_THAT(epoch_of(loader), ElementsAre(Indices{rank % 3}));
  }
}

// ---- epochs

TEST(DataLoader, T_21_GoesToTheNextEpochByItself) {
  const TestDataset dataset(40);
  DistributedSampler sampler(40, {.num_replicas = 2, .rank = 1});
  DataLoader loader(dataset, {.batch_size = 4, .sampler = &sampler, .num_workers = 2});
  std::vector<std::vector<Indices>> by_itself;
  for (int epoch = 0; epoch < 3; ++epoch) by_itself.push_back(epoch_of(loader));
  EXPECT_EQ(sampler.epoch(), 2);
  EXPECT_NE(by_itself[0], by_itself[1]);
  EXPECT_NE(by_itself[1], by_itself[2]);
  for (int epoch = 0; epoch < 3; ++epoch) {
    sampler.set_epoch(epoch);
    EXPECT_EQ(epoch_of(loader), by_itself[size_t(epoch)]);
  }
  // Who sets the same epoch again gets it again; a loop that was left counts as one.
  loader.set_epoch(1);
  for ([[maybe_unused]] auto& batch : loader) break;
  EXPECT_EQ(loader.state_dict().epoch, 1);
  EXPECT_EQ(epoch_of(loader), by_itself[2]);
  loader.set_epoch(1);
  EXPECT_EQ(epoch_of(loader), by_itself[1]);
}

// ---- random numbers in get()

TestDataset drawing() {
  return TestDataset(20, [](int64_t) {
    const auto draw = default_generator().next();
    return Sample{{"x", tensor<int64_t>({int64_t(philox(draw.key, draw.number, 0)[0])})}};
  });
}

TEST(DataLoader, T_23_AugmentationDependsOnSeedEpochAndIndexAlone) {
  const TestDataset dataset = drawing();
  const auto draws = [&](const LoaderOptions& options) {
    DataLoader loader(dataset, options);
    return std::pair(flat(epoch_of(loader)), flat(epoch_of(loader)));
  };
  const auto inside = draws({.seed = 3});
  EXPECT_EQ(std::set<int64_t>(inside.first.begin(), inside.first.end()).size(), 20u);
  EXPECT_NE(inside.first, inside.second);
  EXPECT_EQ(inside, draws({.batch_size = 3, .num_workers = 4, .seed = 3}));
  EXPECT_NE(inside, draws({.seed = 4}));
  // On another rank a sample has the same draw, and other samples have others.
  DistributedSampler one(20, {.num_replicas = 2, .rank = 1, .shuffle = false});
  const auto rank1 = draws({.sampler = &one, .num_workers = 1, .seed = 3});
  for (size_t i = 0; i < 10; ++i) EXPECT_EQ(rank1.first[i], inside.first[2 * i + 1]);
}

TEST(DataLoader, LeavesTheCallersGeneratorAlone) {
  const TestDataset dataset = drawing();
  const auto before = default_generator().state();
  for (int64_t workers : {0, 2}) {
    DataLoader loader(dataset, {.num_workers = workers});
    epoch_of(loader);
  }
  EXPECT_EQ(default_generator().state(), before);
}

TEST(DataLoader, B_011_T_23_WorkersKnowWhoTheyAre) {
  EXPECT_EQ(worker_info(), nullptr);
  const TestDataset dataset(6, [](int64_t) {
    const WorkerInfo* info = worker_info();
    if (!info) return Sample{{"x", tensor<int64_t>({-1, -1, -1})}};
    return Sample{{"x", tensor<int64_t>({info->id, info->num_workers, int64_t(info->seed)})}};
  });
  const auto seeds = [&](uint64_t seed, int64_t rank = 0, int64_t epoch = 0) {
    DistributedSampler sampler(12, {.num_replicas = 2, .rank = rank, .shuffle = false});
    const TestDataset twelve(12, [&](int64_t i) { return dataset.get(i % 6); });
    DataLoader loader(twelve, {.sampler = &sampler, .num_workers = 6, .seed = seed});
    loader.set_epoch(epoch);
    std::set<int64_t> set;
    int64_t id = 0;
    for (const auto& batch : epoch_of(loader)) {
      EXPECT_EQ(batch[0], id++);
      EXPECT_EQ(batch[1], 6);
      set.insert(batch[2]);
    }
    EXPECT_EQ(set.size(), 6u);
    return set;
  };
  EXPECT_EQ(seeds(1), seeds(1));
  const auto some = seeds(1);
  for (const auto& others : {seeds(2), seeds(1, 1), seeds(1, 0, 1)})
    for (auto seed : others) EXPECT_EQ(some.count(seed), 0u);
  DataLoader inside(dataset, {});
  for (const auto& batch : epoch_of(inside)) EXPECT_EQ(batch[0], -1);
}

TEST(DataLoader, WorkersWorkInTheOwnersContext) {
  Context rank;
  const ContextGuard guard(rank);
  std::atomic<int> strangers = 0;
  const TestDataset dataset(20, [&](int64_t i) {
    if (&Context::current() != &rank) ++strangers;
    return Sample{{"x", tensor<int64_t>({i})}};
  });
  DataLoader loader(dataset, {.batch_size = 2, .num_workers = 3});
  EXPECT_EQ(flat(epoch_of(loader)), range(20));
  EXPECT_EQ(strangers, 0);
}

// ---- errors

struct UsersError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

TEST(DataLoader, B_007_T_25_AnErrorComesAtItsBatchWithTheIndex) {
  for (int64_t size : {100, 41})
    for (int64_t workers : {0, 4}) {
      const TestDataset dataset(size, [](int64_t i) -> Sample {
        throw UsersError("cannot read picture " + std::to_string(i));
      });
      DataLoader loader(dataset, {.batch_size = 2, .num_workers = workers});
      int64_t errors = 0;
      for (auto it = loader.begin(); it != loader.end(); ++it) {
        try {
          *it;
          ADD_FAILURE() << "no error";
        } catch (const Error& error) {
          const std::string i = std::to_string(2 * errors);
          EXPECT_EQ(std::string(error.what()),
                    "[DataLoader] sample " + i + ": cannot read picture " + i);
          try {
            std::rethrow_if_nested(error);
            ADD_FAILURE() << "nothing is nested";
          } catch (const UsersError& inner) {
            EXPECT_EQ(inner.what(), "cannot read picture " + i);
          }
          ++errors;
          EXPECT_EQ(loader.state_dict().batches, errors);
        }
      }
      EXPECT_EQ(errors, (size + 1) / 2);
    }
}

TEST(DataLoader, GoodBatchesComeRoundABadOne) {
  for (int64_t workers : {0, 3}) {
    const TestDataset dataset(10, [](int64_t i) -> Sample {
      if (i == 5) throw 7;  // no std::exception
      return {{"x", tensor<int64_t>({i})}};
    });
    DataLoader loader(dataset, {.batch_size = 2, .num_workers = workers});
    Indices good;
    std::string message;
    for (auto it = loader.begin(); it != loader.end(); ++it) try {
        for (auto i : values(it->at("x"))) good.push_back(i);
      } catch (const Error& error) {
        message = error.what();
        EXPECT_THROW(*it, Error);  // asked again, it says so again
      }
    EXPECT_EQ(good, (Indices{0, 1, 2, 3, 6, 7, 8, 9}));
    EXPECT_THAT(message, HasSubstr("sample 5"));
    // In a range-for it leaves the loop; the next one is a new epoch.
    EXPECT_THAT(message_of<Error>([&] { epoch_of(loader); }), HasSubstr("sample 5"));
  }
}

TEST(DataLoader, CollationAndSamplerErrors) {
  for (int64_t workers : {0, 2}) {
    const TestDataset ragged(8, [](int64_t i) { return Sample{{"x", zeros({i / 7 + 1})}}; });
    DataLoader stacked(ragged, {.batch_size = 4, .num_workers = workers});
    EXPECT_THAT(
        message_of<Error>([&] {
          for ([[maybe_unused]] auto& batch : stacked) continue;
        }),
        AllOf(HasSubstr("batch 1"), HasSubstr("[1] in sample 4"), HasSubstr("[2] in sample 7")));
    const TestDataset dataset(8);
    ListSampler wrong({1, 2, 8});
    DataLoader outside(dataset, {.sampler = &wrong, .num_workers = workers});
    EXPECT_THAT(message_of<Error>([&] { epoch_of(outside); }),
                AllOf(HasSubstr("sample 8"), HasSubstr("dataset of 8")));
  }
}

TEST(DataLoader, B_007_WorkerInitRunsFirstAndItsErrorEndsTheLoop) {
  const TestDataset dataset(8);
  std::atomic<int> started = 0;
  DataLoader loader(dataset, {.num_workers = 3, .worker_init_fn = [&](const WorkerInfo& info) {
                                EXPECT_EQ(worker_info(), &info);
                                ++started;
                              }});
  EXPECT_EQ(flat(epoch_of(loader)), range(8));
  EXPECT_EQ(started, 3);

  const int before = settled_thread_count();
  DataLoader failing(dataset, {.num_workers = 3, .worker_init_fn = [](const WorkerInfo& info) {
                                 if (info.id == 1) throw UsersError("no database");
                               }});
  int64_t good = 0;
  EXPECT_THAT(message_of<Error>([&] {
                for ([[maybe_unused]] auto& batch : failing) ++good;
              }),
              AllOf(HasSubstr("worker 1"), HasSubstr("worker_init_fn: no database")));
  EXPECT_EQ(good, 1);  // batch 0 is worker 0's
  expect_threads(before);
  auto it = failing.begin();
  ++it;
  EXPECT_THROW(*it, Error);
  ++it;
  EXPECT_TRUE(it == failing.end());
}

TEST(DataLoader, B_008_T_25_AStalledWorkerIsNamed) {
  std::atomic<bool> release = false;
  const TestDataset dataset(20, [&](int64_t i) {
    while (i == 9 && !release) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return Sample{{"x", tensor<int64_t>({i})}};
  });
  DataLoader loader(dataset, {.batch_size = 2, .num_workers = 3, .timeout = 1});
  const auto start = Clock::now();
  int64_t good = 0;
  {
    auto it = loader.begin();
    for (; good < 4; ++it, ++good) *it;
    EXPECT_THAT(message_of<Error>([&] { *it; }),
                AllOf(HasSubstr("batch 4"), HasSubstr("worker 1 of 3"), HasSubstr("sample 9"),
                      HasSubstr("after 1 seconds")));
    EXPECT_LT(seconds_since(start), 10);
    EXPECT_EQ(loader.state_dict().batches, 4);  // to go on from
    ++it;
    EXPECT_TRUE(it == loader.end());
    EXPECT_THROW(*it, Error);
    release = true;
  }
  DataLoader again(dataset, {.batch_size = 2, .num_workers = 3});
  EXPECT_EQ(flat(epoch_of(again)), range(20));
}

// One that never leaves get() is left behind, and the program ends by itself.
TEST(DataLoaderDeathTest, B_008_AProgramWithAStalledWorkerEnds) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto run = [] {
    static const TestDataset dataset(4, [](int64_t) -> Sample {
      std::this_thread::sleep_for(std::chrono::hours(1));
      return {};
    });
    try {
      DataLoader loader(dataset, {.num_workers = 2, .timeout = 0.1});
      for ([[maybe_unused]] auto& batch : loader) std::exit(9);
    } catch (const Error& error) {
      std::fprintf(stderr, "%s\n", error.what());
      std::exit(3);
    }
  };
  EXPECT_EXIT(run(), testing::ExitedWithCode(3), "sample 1 and is left behind(.|\n)*timed out");
}

// ---- leaving early

TEST(DataLoader, B_009_WorkersEndWithTheLoop) {
  const int before = settled_thread_count();
  const TestDataset dataset(100);
  DataLoader loader(dataset, {.batch_size = 2, .num_workers = 4});
  int64_t taken = 0;
  for ([[maybe_unused]] auto& batch : loader)
    if (++taken == 11) break;
  expect_threads(before);
  EXPECT_THROW(for ([[maybe_unused]] auto& batch
                    : loader) throw UsersError("in the loop"),
               UsersError);
  expect_threads(before);
  const TestDataset huge(int64_t(1) << 22);
  DataLoader many(huge, {.batch_size = 1 << 20, .shuffle = true, .num_workers = 2});
  const auto start = Clock::now();
  {
    const auto it = many.begin();
    expect_threads(before + 2);
  }
  expect_threads(before);
  EXPECT_LT(seconds_since(start), 10);
}

TEST(DataLoader, LeavingWaitsForOneSampleAtMost) {
  const TestDataset dataset(1000, [](int64_t i) {
    if (i > 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    return Sample{{"x", tensor<int64_t>({i})}};
  });
  BatchSampler batches(std::vector<Indices>{{0}, range(999)});  // the second takes 20 s
  DataLoader loader(dataset, {.batch_sampler = &batches, .num_workers = 2});
  const auto start = Clock::now();
  for ([[maybe_unused]] auto& batch : loader) break;
  EXPECT_LT(seconds_since(start), 10);
}

TEST(DataLoader, MakesNoMoreAheadThanAsked) {
  std::mutex mutex;
  int64_t most = 0;
  const TestDataset dataset(60, [&](int64_t i) {
    std::lock_guard lock(mutex);
    most = std::max(most, i);
    return Sample{{"x", tensor<int64_t>({i})}};
  });
  DataLoader loader(dataset, {.batch_size = 3, .num_workers = 2, .prefetch_factor = 2});
  int64_t taken = 0;
  for ([[maybe_unused]] auto& batch : loader) {
    ++taken;
    if (taken % 5 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    std::lock_guard lock(mutex);
    EXPECT_LT(most, (taken + 4) * 3);
  }
  EXPECT_EQ(taken, 20);
}

TEST(DataLoader, OneLoopAtATime) {
  const TestDataset dataset(10);
  for (int64_t workers : {0, 2}) {
    DataLoader loader(dataset, {.num_workers = workers});
    EXPECT_THAT(message_of<Error>([&] {
                  for ([[maybe_unused]] auto& outer : loader)
                    for ([[maybe_unused]] auto& inner : loader) continue;
                }),
                HasSubstr("newer one"));
  }
}

TEST(DataLoader, SkippedBatchesAreTaken) {
  const TestDataset dataset(10);
  for (int64_t workers : {0, 2}) {
    DataLoader loader(dataset, {.batch_size = 2, .num_workers = workers});
    auto it = loader.begin();
    ++it;
    it++;
    EXPECT_EQ(values(it->at("x")), (Indices{4, 5}));
    EXPECT_EQ(loader.state_dict().batches, 3);
  }
}

// ---- options

TEST(DataLoader, WithoutBatches) {
  const TestDataset dataset(5);
  for (int64_t workers : {0, 2}) {
    DataLoader loader(dataset, {.batch_size = std::nullopt, .num_workers = workers});
    EXPECT_EQ(loader.size(), 5);
    int64_t i = 0;
    for (auto& sample : loader) {
      EXPECT_EQ(sample.at("x").sizes(), Dims({1}));
      EXPECT_EQ(sample.at("x").item<int64_t>(), i++);
    }
    EXPECT_EQ(i, 5);
  }
}

TEST(DataLoader, CustomCollation) {
  const TestDataset dataset(5);
  DataLoader loader(
      dataset, {.batch_size = 2,
                .num_workers = 2,
                .collate_fn =
                    [](const std::vector<Sample>& samples, const std::vector<int64_t>& indices) {
                      return Batch{{"x", tensor<int64_t>({int64_t(samples.size()), indices[0]})}};
                    },
                .pin_memory = true});
  EXPECT_THAT(epoch_of(loader), ElementsAre(Indices{2, 0}, Indices{2, 2}, Indices{1, 4}));
}

TEST(DataLoader, OwnsASharedDataset) {
  auto dataset = std::make_shared<TestDataset>(5);
  const std::weak_ptr<TestDataset> watch = dataset;
  {
    DataLoader loader(std::shared_ptr<const Dataset>(std::move(dataset)), {.num_workers = 2});
    EXPECT_EQ(flat(epoch_of(loader)), range(5));
  }
  EXPECT_TRUE(watch.expired());
}

TEST(DataLoader, B_006_RefusesOptionsThatExcludeEachOther) {
  const TestDataset dataset(10);
  SequentialSampler sampler(10);
  BatchSampler batches(sampler, 2);
  const auto refused = [&](const LoaderOptions& options) {
    return message_of<Error>([&] { DataLoader(dataset, options); });
  };
  EXPECT_THAT(refused({.shuffle = true, .sampler = &sampler}), HasSubstr("excludes shuffle"));
  for (const LoaderOptions& options : {LoaderOptions{.batch_size = 2, .batch_sampler = &batches},
                                       {.batch_size = std::nullopt, .batch_sampler = &batches},
                                       {.shuffle = true, .batch_sampler = &batches},
                                       {.batch_sampler = &batches, .drop_last = true},
                                       {.sampler = &sampler, .batch_sampler = &batches}})
    EXPECT_THAT(refused(options), HasSubstr("batch_sampler excludes"));
  EXPECT_THAT(refused({.batch_size = std::nullopt, .drop_last = true}), HasSubstr("drop_last"));
  EXPECT_THAT(refused({.batch_size = std::nullopt, .collate_fn = stack_samples}),
              HasSubstr("collate_fn"));
  EXPECT_THAT(refused({.batch_size = 0}), HasSubstr("batch_size"));
  EXPECT_THAT(refused({.num_workers = -1}), HasSubstr("num_workers"));
  EXPECT_THAT(refused({.num_workers = INT64_MAX}), HasSubstr("num_workers must be 0 to 4096"));
  EXPECT_THAT(refused({.prefetch_factor = 0}), HasSubstr("prefetch_factor"));
  EXPECT_THAT(refused({.num_workers = 2, .prefetch_factor = INT64_MAX}),
              HasSubstr("prefetch_factor must be 1 to 10000"));
  for (double timeout : {-1.0, std::numeric_limits<double>::quiet_NaN(), 1e300})
    EXPECT_THAT(refused({.timeout = timeout}), HasSubstr("timeout"));
  EXPECT_THAT(message_of<Error>([] { DataLoader(std::shared_ptr<const Dataset>()); }),
              HasSubstr("null"));
}

}  // namespace
}  // namespace sherd::data
