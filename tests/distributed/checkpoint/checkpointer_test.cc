// Training that was saved by one world goes on in another. Ids are rows of the lists of scenarios
// and traps.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <fstream>

#include "core/threads.h"
#include "tests/distributed/checkpoint/checkpoint_scenario.h"

namespace sherd::dist {
namespace {

// Saved at 4 ranks, FULL_SHARD, AdamW.
TEST_F(Checkpoints, C_002_C_011_H_007_T_32_LoadsInAnyOtherWorld) {
  fs::create_directories(folder_);
  const Spread saver{4, "FULL_SHARD", blocks()};
  std::string saved;
  std::vector<double> expected;
  run_ranks(4, [&](int rank) {
    Rank r(saver, 1);
    for (int step = 0; step < 3; ++step) r.train(step);
    TrainingState s = r.state();
    s.step = 3;
    s.user = {{"note", "mine"}};
    Checkpointer(folder(), default_group()).save(s);
    const std::string all = r.everything(folder("a"));
    if (rank == 0) saved = all;
    for (int step = 3; step < 6; ++step) {
      const double l = r.train(step);
      if (rank == 0) expected.push_back(l);
    }
  });
  for (const Spread& spread : spreads())
    in_world(spread, [&](Group group, int rank) {
      SCOPED_TRACE(concat(spread.world, " ", spread.name));
      Rank r(spread, 99);
      TrainingState s = r.state();
      Checkpointer c(folder(), group);
      EXPECT_EQ(c.load_latest(s), folder() + "/step-000003");
      EXPECT_EQ(s.step, 3);
      EXPECT_EQ(s.user.at("note"), "mine");
      EXPECT_EQ(r.scheduler->last_epoch(), 3);
      const std::string all = r.everything(folder("b"));
      if (rank == 0) {
        EXPECT_TRUE(all == saved);
      }
      for (int step = 3; step < 6; ++step) {
        const double l = r.train(step);
        EXPECT_NEAR(l, expected[size_t(step - 3)], step == 3 ? 1e-6 : 1e-5) << step;
      }
    });
}

TEST_F(Checkpoints, RanksSaveOneStep) {
  fs::create_directories(folder_);
  run_ranks(3, [&](int rank) {
    Rank r({3, "FULL_SHARD", blocks()}, 1);
    TrainingState s = r.state();
    s.step = rank == 2 ? 4 : 3;
    Checkpointer c(folder(), default_group());
    const std::string why = "ranks save different steps: rank 0 step 3, rank 2 step 4";
    EXPECT_HAS(error_of([&] { c.save(s); }), why);
    EXPECT_HAS(error_of([&] { c.async_save(s); }), why);
    barrier();
    EXPECT_FALSE(fs::exists(folder()));
    s.step = 3;
    c.save(s);
  });
}

// The other way: what each of them saves, four ranks load, with the same bytes.
TEST_F(Checkpoints, H_007_T_32_AnyWorldSavesForAnyOther) {
  fs::create_directories(folder_);
  for (const Spread& spread : spreads()) {
    std::string saved;
    fs::remove_all(folder());
    in_world(spread, [&](Group group, int rank) {
      Rank r(spread, 1);
      r.train(0);
      TrainingState s = r.state();
      Checkpointer(folder(), group).save(s);
      const std::string all = r.everything(folder("a"));
      if (rank == 0) saved = all;
    });
    run_ranks(3, [&](int rank) {
      SCOPED_TRACE(concat(spread.world, " ", spread.name));
      Rank r({3, "", blocks()}, 5);
      TrainingState s = r.state();
      Checkpointer(folder(), default_group()).load(folder() + "/step-000000", s);
      const std::string all = r.everything(folder("b"));
      if (rank == 0) {
        EXPECT_TRUE(all == saved);
      }
    });
  }
}

TEST_F(Checkpoints, C_004_OnlyWhatIsWantedIsRead) {
  run_ranks(2, [&](int) {
    Rank r({2, "", blocks()}, 1);
    r.train(0);
    Checkpointer(folder(), default_group()).save(r.state());
  });
  const Checkpoint c = open_checkpoint(folder() + "/step-000000");
  run_ranks(4, [&](int) {
    Rank r({4, "", blocks()}, 2);
    TrainingState s = r.state();
    ShardReader weights(c);
    load_state(weights, s.model, nullptr);
    int64_t mine = 0, block = 0;
    for (auto& p : s.model.parts()) {
      mine += 4 * (p.end - p.begin);
      if (p.name.starts_with("layers.1.")) block += 4 * (p.end - p.begin);
    }
    EXPECT_EQ(weights.bytes_read(), mine);
    ShardReader some(c);
    const auto other = [](const std::string& name) { return name.starts_with("layers.1."); };
    load_state(some, s.model, nullptr, {.only = other});
    EXPECT_EQ(some.bytes_read(), block);
    // With the optimizer: two moments more, and its scalars.
    ShardReader all(c);
    load_state(all, s.model, r.optimizer.get());
    EXPECT_GE(all.bytes_read(), 3 * mine);
    EXPECT_LE(all.bytes_read(), 3 * mine + 16 * int64_t(s.model.parts().size()) + 200);
  });
}

TEST_F(Checkpoints, C_018_NarrowerDtypesOnRequest) {
  Rank r({1, "", {}}, 1);
  TrainingState s = r.state();
  Checkpointer(folder(), nullptr).save(s);
  const Checkpoint c = open_checkpoint(folder() + "/step-000000");
  ShardReader reader(c);
  Gpt half({.layers = 2});
  half.to(kBFloat16);
  ModelState narrow(half, nullptr);
  expect_parts(error_of([&] { load_state(reader, narrow, nullptr, {.allow_narrowing = false}); }),
               {"tokens.weight", "dtype mismatch", "float32", "bfloat16"});
  load_state(reader, narrow, nullptr);
  EXPECT_EQ(to_raw(half.norm->weight, kFloat32).data<float>()[0], 1);
}

TEST_F(Checkpoints, T_33_TheLastWholeOneIsTakenAndThatIsSaid) {
  run_ranks(2, [&](int) {
    Rank r({2, "", blocks()}, 1);
    Checkpointer c(folder(), default_group(), {.keep_last = 3});
    for (int step = 0; step < 5; ++step) {
      r.train(step);
      TrainingState s = r.state();
      s.step = step;
      c.save(s);
    }
  });
  EXPECT_EQ(checkpoint_steps(folder()), (std::vector<int64_t>{2, 3, 4}));
  // Of the newest a byte in the data of rank 1's file is changed, the next is cut short.
  const auto file = [&](const char* step) {
    return folder() + "/" + step + "/rank-00001-of-00002.safetensors";
  };
  const auto bytes = fs::file_size(file("step-000004"));
  {
    std::fstream f(file("step-000004"), std::ios::in | std::ios::out | std::ios::binary);
    f.seekp(int64_t(bytes) - 3);
    f.put('\x5a');
  }
  fs::resize_file(file("step-000003"), bytes - 1);
  for (int world : {2, 3})
    run_ranks(world, [&](int rank) {
      std::vector<std::string> lines;
      CheckpointerOptions options;
      options.report = [&](const std::string& line) { lines.push_back(line); };
      Rank r({world, "", blocks()}, 7);
      TrainingState s = r.state();
      Checkpointer c(folder(), default_group(), options);
      EXPECT_EQ(c.load_latest(s), folder() + "/step-000002");
      EXPECT_EQ(s.step, 2);
      ASSERT_EQ(lines.size(), rank == 0 ? 2u : 0u);
      if (rank > 0) return;
      expect_parts(lines[0], {"step-000004", file("step-000004"), "checksum"});
      expect_parts(lines[1], {"step-000003", file("step-000003")});
    });
  fs::remove(folder() + "/step-000002/index.json");
  run_ranks(2, [&](int) {
    Rank r({2, "", blocks()}, 7);
    TrainingState s = r.state();
    CheckpointerOptions quiet;
    quiet.report = [](const std::string&) {};
    Checkpointer c(folder(), default_group(), quiet);
    expect_parts(error_of([&] { c.load_latest(s); }), {"none of the 3 checkpoints", folder()});
    Checkpointer none(folder("other"), default_group());
    EXPECT_FALSE(none.load_latest(s));
  });
}

TEST_F(Checkpoints, T_33_ADamagedOneIsNotCountedAmongThoseThatStay) {
  Rank r({1, "", {}}, 1);
  const auto save = [&](Checkpointer& c, int64_t step) {
    TrainingState s = r.state();
    s.step = step;
    c.save(s);
  };
  CheckpointerOptions options{.keep_last = 2};
  options.report = [](const std::string&) {};
  {
    Checkpointer c(folder(), nullptr, options);
    save(c, 10), save(c, 20);
  }
  const std::string file = folder() + "/step-000020/rank-00000-of-00001.safetensors";
  std::fstream(file, std::ios::in | std::ios::out | std::ios::binary)
      .seekp(int64_t(fs::file_size(file)) - 3)
      .put('\x5a');
  Checkpointer c(folder(), nullptr, options);
  TrainingState s = r.state();
  EXPECT_EQ(c.load_latest(s), folder() + "/step-000010");
  save(c, 15);
  EXPECT_EQ(checkpoint_steps(folder()), (std::vector<int64_t>{10, 15, 20}));
  save(c, 20);  // in the damaged one's place
  EXPECT_EQ(checkpoint_steps(folder()), (std::vector<int64_t>{15, 20}));
  save(c, 25);
  EXPECT_EQ(checkpoint_steps(folder()), (std::vector<int64_t>{20, 25}));
}

TEST_F(Checkpoints, T_35_RandomStateIsARanksOwn) {
  std::vector<float> expected(3);
  run_ranks(3, [&](int rank) {
    Rank r({3, "", blocks()}, 1);
    default_generator().seed(11, uint64_t(rank));
    rand({5});
    Checkpointer(folder(), default_group()).save(r.state());
    expected[size_t(rank)] = rand({1}).item<float>();
  });
  EXPECT_NE(expected[0], expected[1]);
  run_ranks(3, [&](int rank) {
    Rank r({3, "", blocks()}, 1);
    TrainingState s = r.state();
    Checkpointer(folder(), default_group()).load_latest(s);
    EXPECT_EQ(rand({1}).item<float>(), expected[size_t(rank)]);
  });
}

// The full format holds the same, and loads alike.
TEST_F(Checkpoints, FullFormat) {
  fs::create_directories(folder_);
  std::string saved;
  run_ranks(2, [&](int rank) {
    Rank r({2, "", blocks()}, 1);
    r.train(0);
    TrainingState s = r.state();
    Checkpointer c(folder(), default_group(), {.format = CheckpointFormat::kFull});
    c.save(s);
    EXPECT_THROW(c.async_save(s), Error);
    const std::string all = r.everything(folder("a"));
    if (rank == 0) saved = all;
  });
  EXPECT_TRUE(fs::exists(folder() + "/step-000000/model.safetensors"));
  run_ranks(3, [&](int rank) {
    Rank r({3, "", blocks()}, 2);
    TrainingState s = r.state();
    Checkpointer c(folder(), default_group());
    ASSERT_TRUE(c.load_latest(s));
    EXPECT_EQ(r.scheduler->last_epoch(), 1);
    const std::string all = r.everything(folder("b"));
    if (rank == 0) {
      EXPECT_TRUE(all == saved);
    }
    Rank other({3, "", blocks()}, 3);
    TrainingState t = other.state();
    load_weights_from(folder() + "/step-000000", t.model);
    load_weights_from(folder() + "/step-000000/model.safetensors", t.model);
    EXPECT_EQ(other.loss(0, false), r.loss(0, false));
  });
  std::fstream f(folder() + "/step-000000/optimizer.safetensors",
                 std::ios::in | std::ios::out | std::ios::binary);
  f.seekp(-3, std::ios::end);
  f.put('\x5a');
  f.close();
  run_ranks(2, [&](int) {
    Rank r({2, "", blocks()}, 2);
    TrainingState s = r.state();
    CheckpointerOptions quiet;
    quiet.report = [](const std::string&) {};
    EXPECT_THROW(Checkpointer(folder(), default_group(), quiet).load_latest(s), Error);
  });
}

// Killed at any moment of a save, also of an asynchronous one: the last whole checkpoint is there.
TEST_F(Checkpoints, T_33_KilledWhileSaving) {
  fs::create_directories(folder_);
  const auto newest = [&] {
    const auto steps = checkpoint_steps(folder());
    return steps.empty() ? -1 : steps.back();
  };
  for (int run = 0; run < 8; ++run) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      set_num_threads(1);  // a pool of threads does not survive a fork
      Rank r({1, "", {}}, 1);
      CheckpointerOptions options{.keep_last = 2};
      options.report = [](const std::string&) {};
      Checkpointer c(folder(), nullptr, options);
      TrainingState s = r.state();
      c.load_latest(s);
      for (;;) {
        r.train(int(s.step));
        ++s.step;
        run % 2 ? c.async_save(s) : c.save(s);
      }
    }
    const int64_t before = newest();
    for (int i = 0; i < 4000 && newest() == before; ++i) usleep(5000);
    usleep(useconds_t(1000 * (run * 7 % 20)));
    kill(child, SIGKILL);
    int status;
    waitpid(child, &status, 0);
    EXPECT_EQ(WTERMSIG(status), SIGKILL);
  }
  const auto steps = checkpoint_steps(folder());
  ASSERT_FALSE(steps.empty());
  // Each of them is whole, and the newest is what an uninterrupted run has.
  for (int64_t step : steps) open_checkpoint(folder() + "/" + checkpoint_name(step));
  Rank resumed({1, "", {}}, 2), whole({1, "", {}}, 1);
  TrainingState s = resumed.state();
  Checkpointer c(folder(), nullptr, {.keep_last = 2});
  ASSERT_TRUE(c.load_latest(s));
  EXPECT_EQ(s.step, steps.back());
  for (int step = 0; step < s.step; ++step) whole.train(step);
  EXPECT_TRUE(resumed.everything(folder("a")) == whole.everything(folder("b"))) << s.step;
  c.save(s);  // what the dead left behind goes
  int entries = 0;
  for (auto& e : fs::directory_iterator(folder()))
    entries += e.path().filename().string().starts_with(".");
  EXPECT_EQ(entries, 0);
}

}  // namespace
}  // namespace sherd::dist
