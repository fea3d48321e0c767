// Checkpoints that are written while training goes on. Ids are rows of the list of scenarios.
#include <gtest/gtest.h>

#include "tests/distributed/checkpoint/checkpoint_scenario.h"

namespace sherd::dist {
namespace {

TEST_F(Checkpoints, C_003_AsynchronousSaveHasTheValuesOfItsMoment) {
  fs::create_directories(folder_);
  std::vector<std::string> then(4);
  run_ranks(2, [&](int rank) {
    Rank r({2, "", blocks()}, 1);
    Checkpointer c(folder(), default_group());
    for (int step = 0; step < 4; ++step) {
      r.train(step);
      const std::string all = r.everything(folder("a"));
      if (rank == 0) then[size_t(step)] = all;
      TrainingState s = r.state();
      s.step = step;
      c.async_save(s);
      // Training goes on, in the memory that is being saved.
    }
    for (int step = 4; step < 7; ++step) r.train(step);
    c.wait();
    EXPECT_FALSE(c.is_saving());
  });
  EXPECT_EQ(checkpoint_steps(folder()), (std::vector<int64_t>{0, 1, 2, 3}));
  for (int64_t step = 0; step < 4; ++step) {
    Rank r({1, "", {}}, 3);
    TrainingState s = r.state();
    Checkpointer(folder(), nullptr).load(folder() + "/" + checkpoint_name(step), s);
    EXPECT_TRUE(r.everything(folder("b")) == then[size_t(step)]) << step;
  }
}

// It returns before the data are on the disk; two are never in flight; an error comes back at the
// next save, or at the end, on every rank.
TEST_F(Checkpoints, C_003_C_017_AsynchronousErrorsComeBack) {
  run_ranks(2, [&](int rank) {
    Rank r({2, "", blocks()}, 1);
    std::atomic<bool> go = false, fails = false;
    std::atomic<int> running = 0;
    std::vector<std::string> reports;
    CheckpointerOptions options;
    options.report = [&](const std::string& line) { reports.push_back(line); };
    options.on_stage = [&](const std::string& stage) {
      if (stage != "write") return;
      EXPECT_EQ(++running, 1);
      while (!go) std::this_thread::yield();
      --running;
      if (fails && rank == 1) fail("no room on disk");
    };
    {
      Checkpointer c(folder(), default_group(), options);
      TrainingState s = r.state();
      s.step = 1;
      c.async_save(s);
      EXPECT_TRUE(c.is_saving());
      EXPECT_TRUE(checkpoint_steps(folder()).empty());
      barrier();
      go = true;
      s.step = 2;
      c.async_save(s);
      c.wait();
      EXPECT_EQ(checkpoint_steps(folder()), (std::vector<int64_t>{1, 2}));
      barrier();
      fails = true;
      s.step = 3;
      c.async_save(s);
      s.step = 4;
      EXPECT_EQ(error_of([&] { c.save(s); }), "rank 1: no room on disk");
      fails = false;
      barrier();
      c.save(s);  // and it goes on
      EXPECT_EQ(checkpoint_steps(folder()), (std::vector<int64_t>{1, 2, 4}));
      barrier();
      fails = true;
      s.step = 5;
      c.async_save(s);
    }
    ASSERT_EQ(reports.size(), rank == 0 ? 1u : 0u);
    if (rank == 0) expect_parts(reports[0], {"rank 1: no room on disk"});
    EXPECT_EQ(checkpoint_steps(folder()), (std::vector<int64_t>{1, 2, 4}));
  });
}

// Ranks outside the group know nothing of its saves, and what they make with the others later is
// theirs all the same.
TEST_F(Checkpoints, C_003_AsynchronousSavesOfSomeRanks) {
  run_ranks(3, [&](int rank) {
    const Group pair = new_group({0, 2});
    if (pair->rank() >= 0) {
      nn::Linear model(3, 4);
      for (const char* name : {"a", "b"}) {
        Checkpointer c(folder(name), pair);
        for (int64_t step : {1, 2}) c.async_save({.model = ModelState(model, pair), .step = step});
      }
    }
    const Group all = new_group({0, 1, 2});
    Tensor sum = full({1}, 1.0);
    all_reduce(sum, ReduceOp::kSum, {.group = all});
    EXPECT_EQ(sum.item<float>(), 3) << rank;
  });
  for (const char* name : {"a", "b"})
    EXPECT_EQ(checkpoint_steps(folder(name)), (std::vector<int64_t>{1, 2}));
}

}  // namespace
}  // namespace sherd::dist
