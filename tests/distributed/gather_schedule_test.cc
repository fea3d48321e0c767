// Orders and counts of gathers: prefetching, accumulation, and what is kept within the bound.
#include "tests/distributed/gather_schedule_training.h"

namespace sherd::dist {
namespace {

TEST(GatherSchedule, TheWorkedExample) {
  Training run(blocks(3));
  run.forward(model(3));
  run.backward(model(3));
  run.log.clear();
  EXPECT_EQ(run.forward(model(3)), (Lines{
                                       "<r gather r, show r, gather 0",
                                       "<0 show 0, gather 1",
                                       "0> release 0",
                                       "<1 show 1, gather 2",
                                       "1> release 1",
                                       "<2 show 2",
                                       "2> release 2",
                                       "r>",
                                   }));
  EXPECT_EQ(run.backward(model(3)), (Lines{
                                        "<r gather 2",
                                        "<2 show 2, gather 1",
                                        "last leaf of 2 reduce 2",
                                        "2> release 2",
                                        "<1 show 1, gather 0",
                                        "last leaf of 1 reduce 1, retire 2",
                                        "1> release 1",
                                        "<0 show 0",
                                        "last leaf of 0 reduce 0, retire 1",
                                        "0> release 0",
                                        "last leaf of r reduce r, retire 0",
                                        "r> release r",
                                        "end retire r",
                                    }));
  EXPECT_EQ(run.count(Kind::kGather), 4 + 3);
  EXPECT_EQ(run.count(Kind::kReduce), 4);
  run.expect_all(State::kSharded);
  // Under no_grad: the forward line, with r released.
  EXPECT_EQ(run.forward(model(3), false), (Lines{
                                              "<r gather r, show r",
                                              "<0 gather 0, show 0",
                                              "0> release 0",
                                              "<1 gather 1, show 1",
                                              "1> release 1",
                                              "<2 gather 2, show 2",
                                              "2> release 2",
                                              "r> release r",
                                          }));
  EXPECT_EQ(run.forward(model(3), false)[0], "<r gather r, show r, gather 0");
  EXPECT_EQ(run.schedule.counts().mispredicted, 0);
  EXPECT_EQ(run.schedule.counts().repaired, 0);
}

TEST(GatherSchedule, P001OrderOverThreeSteps) {
  for (bool checkpointed : {false, true})
    for (bool root_reshards : {false, true}) {
      Training run(blocks(3, true, root_reshards));
      for (int step = 0; step < 3; ++step) {
        run.forward(model(3, checkpointed));
        EXPECT_EQ(run.take({Kind::kGather}),
                  (Lines{"gather r", "gather 0", "gather 1", "gather 2"}));
        run.backward(model(3, checkpointed));
        Lines want = {"gather 2", "gather 1", "post 2", "gather 0", "post 1", "post 0", "post r"};
        if (root_reshards) want.insert(want.begin(), "gather r");
        EXPECT_EQ(run.take({Kind::kGather, Kind::kPost}), want) << checkpointed;
        run.expect_all(State::kSharded);
      }
    }
}

TEST(GatherSchedule, P002PostAndNone) {
  for (auto mode : {BackwardPrefetch::kPost, BackwardPrefetch::kNone}) {
    Training run(blocks(3), {.backward_prefetch = mode});
    run.forward(model(3));
    const Lines lines = run.backward(model(3));
    const bool post = mode == BackwardPrefetch::kPost;
    EXPECT_EQ(lines, (Lines{
                         "<r",
                         "<2 gather 2, show 2",
                         "last leaf of 2 reduce 2",
                         post ? "2> release 2, gather 1" : "2> release 2",
                         post ? "<1 show 1" : "<1 gather 1, show 1",
                         "last leaf of 1 reduce 1, retire 2",
                         post ? "1> release 1, gather 0" : "1> release 1",
                         post ? "<0 show 0" : "<0 gather 0, show 0",
                         "last leaf of 0 reduce 0, retire 1",
                         "0> release 0",
                         "last leaf of r reduce r, retire 0",
                         "r> release r",
                         "end retire r",
                     }));
  }
}

TEST(GatherSchedule, P003TwoForwardsOneBackward) {
  const std::vector<Call> two = {model(3), model(3)};
  Training full(blocks(3));
  full.forward(two);
  full.log.clear();
  full.backward(two);
  const Lines round = {"gather 2", "gather 1", "post 2", "gather 0", "post 1", "post 0"};
  Lines want = round;
  want.insert(want.end(), round.begin(), round.end());
  want.push_back("post r");
  EXPECT_EQ(full.take({Kind::kGather, Kind::kPost}), want);

  Training kept(blocks(3, false));
  kept.forward(two);
  EXPECT_EQ(kept.take({Kind::kGather}), (Lines{"gather r", "gather 0", "gather 1", "gather 2"}));
  kept.backward(two);
  want = {"post 2", "post 1", "post 0"};  // the first round gathers nothing
  want.insert(want.end(), round.begin(), round.end());
  want.push_back("post r");
  const std::vector<Step> log = kept.log;
  EXPECT_EQ(kept.take({Kind::kGather, Kind::kPost}), want);
  EXPECT_EQ(std::ranges::count_if(log, [](Step s) { return s.kind == Kind::kReduce; }), 4);
  kept.expect_all(State::kSharded);
}

TEST(GatherSchedule, P004Counts) {
  for (int n : {1, 3, 6})
    for (bool root_reshards : {false, true}) {
      Training full(blocks(n, true, root_reshards));
      full.forward(model(n));
      EXPECT_EQ(full.count(Kind::kGather), n + 1);
      full.log.clear();
      full.backward(model(n));
      EXPECT_EQ(full.count(Kind::kGather), n + root_reshards);
      EXPECT_EQ(full.count(Kind::kReduce), n + 1);
      EXPECT_EQ(full.count(Kind::kRetire), n + 1);
    }
  Training kept(blocks(5, false));
  kept.forward(model(5));
  kept.log.clear();
  kept.backward(model(5));
  EXPECT_EQ(kept.count(Kind::kGather), 0);
  EXPECT_EQ(kept.count(Kind::kReduce), 6);
}

TEST(GatherSchedule, P005FlippedAfterConstruction) {
  const int n = 3;
  struct Case {
    bool blocks, root;
    int gathers;
  };
  for (auto [b, r, gathers] :
       {Case{true, true, n + 1}, {false, false, 0}, {false, true, 1}, {true, false, n}}) {
    Training run(blocks(n, !b, !r));
    for (int u = 0; u < n; ++u) run.schedule.set_reshard_after_forward(u, b);
    run.schedule.set_reshard_after_forward(n, r);
    run.forward(model(n));
    run.log.clear();
    run.backward(model(n));
    EXPECT_EQ(run.count(Kind::kGather), gathers);
  }
}

TEST(GatherSchedule, P006ReshardByHandBetweenForwardAndBackward) {
  Training run(blocks(3, false));
  run.forward(model(3));
  for (int u = 0; u < 4; ++u) run.apply("", run.schedule.reshard(u));
  run.expect_all(State::kSharded);
  run.log.clear();
  run.backward(model(3));
  EXPECT_EQ(run.count(Kind::kGather), 4);
  run.expect_all(State::kSharded);
}

TEST(GatherSchedule, P007ForwardPrefetch) {
  Lines backward;
  for (int ahead : {0, 1, 2}) {
    Training run(blocks(4), {.forward_prefetch = ahead});
    run.forward(model(4));
    run.backward(model(4));
    run.log.clear();
    run.forward(model(4));
    Lines got = run.take({Kind::kGather, Kind::kRelease});
    ASSERT_EQ(got[0], "gather r");
    got.erase(got.begin());
    if (ahead == 0) {
      EXPECT_EQ(got, (Lines{"gather 0", "release 0", "gather 1", "release 1", "gather 2",
                            "release 2", "gather 3", "release 3"}));
    } else if (ahead == 1) {
      EXPECT_EQ(got, (Lines{"gather 0", "gather 1", "release 0", "gather 2", "release 1",
                            "gather 3", "release 2", "release 3"}));
    } else {
      EXPECT_EQ(got, (Lines{"gather 0", "gather 1", "gather 2", "release 0", "gather 3",
                            "release 1", "release 2", "release 3"}));
    }
    run.backward(model(4));
    const Lines order = run.take({Kind::kGather, Kind::kPost, Kind::kReduce});
    if (backward.empty()) backward = order;
    EXPECT_EQ(order, backward) << "backward's order is untouched";
    EXPECT_EQ(run.schedule.counts().mispredicted, 0);
  }
}

TEST(GatherSchedule, P010GatherByHand) {
  Training run(blocks(3));
  for (int u = 3; u >= 0; --u) run.apply("", run.schedule.unshard(u));
  EXPECT_EQ(run.take({Kind::kGather}), (Lines{"gather r", "gather 2", "gather 1", "gather 0"}));
  run.apply("", run.schedule.unshard(0));
  EXPECT_TRUE(run.log.empty()) << "it is under way";
  run.forward(model(3));
  EXPECT_EQ(run.count(Kind::kGather), 0);
  run.apply("", run.schedule.reshard(3));
  run.expect_all(State::kSharded);
}

TEST(GatherSchedule, P012TrainingAndEvaluationKeepOrdersOfTheirOwn) {
  Call short_model{3, {{0}, {2}}};  // evaluation skips a block
  for (bool full_shard : {true, false}) {
    Training run(blocks(3, full_shard));
    for (int epoch = 0; epoch < 2; ++epoch) {
      for (int i = 0; i < 3; ++i) {
        run.forward(model(3));
        run.backward(model(3));
        run.expect_all(State::kSharded);
      }
      for (int i = 0; i < 3; ++i) {
        run.forward(short_model, false);
        run.expect_all(State::kSharded);
      }
    }
    EXPECT_EQ(run.schedule.counts().mispredicted, 0);
  }
}

TEST(GatherSchedule, A003Accumulation) {
  struct Case {
    bool after_forward, root_after_forward, after_backward;
    int gathers;
  };
  for (auto [forward, root, backward, gathers] : {Case{true, true, true, 24},
                                                  {true, false, true, 21},
                                                  {false, false, true, 12},
                                                  {false, false, false, 4}}) {
    Training run(blocks(3, forward, root));
    for (int iteration = 0; iteration < 5; ++iteration) {
      run.log.clear();
      for (int micro = 0; micro < 3; ++micro) {
        for (int u = 0; u < 4; ++u) {
          run.schedule.set_sync(u, micro == 2);
          run.schedule.set_reshard_after_backward(u, backward || micro == 2);
        }
        run.forward(model(3));
        run.backward(model(3));
        EXPECT_EQ(run.schedule.is_pending(1), micro < 2);
      }
      EXPECT_EQ(run.count(Kind::kReduce), 4);
      EXPECT_EQ(run.count(Kind::kGather), gathers);
      run.expect_all(State::kSharded);
    }
  }
}

TEST(GatherSchedule, A004SyncOffForSomeUnits) {
  for (auto [off, reductions] :
       {std::pair{std::set<int>{3}, 10}, std::pair{std::set<int>{0, 1}, 8}}) {
    Training run(blocks(3));
    for (int micro = 0; micro < 3; ++micro) {
      for (int u : off) run.schedule.set_sync(u, micro == 2);
      run.forward(model(3));
      run.backward(model(3));
    }
    EXPECT_EQ(run.count(Kind::kReduce), reductions);
  }
}

TEST(GatherSchedule, PendingGradientsOfUnitsThatASyncedBackwardDoesNotReach) {
  Training run(blocks(3));
  for (int u = 0; u < 4; ++u) run.schedule.set_sync(u, false);
  run.forward(model(3));
  run.backward(model(3));
  EXPECT_EQ(run.count(Kind::kReduce), 0);
  for (int u = 0; u < 4; ++u) run.schedule.set_sync(u, true);
  run.schedule.clear_pending(0);
  const Call part{3, {{1}}};
  run.forward(part);
  run.log.clear();
  const Lines lines = run.backward(part);
  EXPECT_EQ(lines.back(), "end reduce 2, retire r, retire 2") << "1 and r were reduced on the way";
  EXPECT_EQ(run.take({Kind::kReduce}), (Lines{"reduce 1", "reduce r", "reduce 2"}));
  for (int u = 0; u < 4; ++u) EXPECT_FALSE(run.schedule.is_pending(u));
}

TEST(GatherSchedule, GradReducesNothing) {
  Training run(blocks(3));
  for (int u = 0; u < 4; ++u) run.schedule.set_sync(u, false);
  run.forward(model(3));
  run.backward(model(3));
  for (int u = 0; u < 4; ++u) run.schedule.set_sync(u, true);
  run.forward(model(3));
  run.log.clear();
  run.backward(std::vector{model(3)}, {}, /*reduces=*/false);
  EXPECT_EQ(run.count(Kind::kReduce), 0);
  EXPECT_TRUE(run.schedule.is_pending(0));
  run.expect_all(State::kSharded);
}

TEST(GatherSchedule, OutputsThatAreNotInTheLoss) {
  // F-009: unit 1 ran and its result was dropped.
  const Call forward = model(2), used{2, {{0}}};
  for (bool full_shard : {true, false}) {
    Training run(blocks(2, full_shard));
    for (int step = 0; step < 4; ++step) {
      run.forward(forward);
      run.log.clear();
      run.backward(used);
      EXPECT_EQ(run.take({Kind::kReduce}), (Lines{"reduce 0", "reduce r"}));
      run.expect_all(State::kSharded);
    }
    EXPECT_EQ(run.schedule.counts().repaired, 0);
  }
}

TEST(GatherSchedule, AWrongGuessStaysUntilUsedOrUntilTheEndOfForward) {
  Training run(blocks(4));
  const Call path_a{4, {{0}, {1}, {3}}}, path_b{4, {{0}, {2}, {1}, {3}}}, path_c{4, {{0}, {2}}};
  run.forward(path_a);
  run.backward(path_a);
  // 1 is gathered ahead, and is used after 2: no harm, but no more guesses.
  EXPECT_EQ(run.forward(path_b), (Lines{
                                     "<r gather r, show r, gather 0",
                                     "<0 show 0, gather 1",
                                     "0> release 0",
                                     "<2 gather 2, show 2",
                                     "2> release 2",
                                     "<1 show 1",
                                     "1> release 1",
                                     "<3 gather 3, show 3",
                                     "3> release 3",
                                     "r>",
                                 }));
  run.backward(path_b);
  EXPECT_EQ(run.schedule.counts().mispredicted, 0);
  // The new order replaces the old; now 1 is gathered ahead for nothing.
  const Lines lines = run.forward(path_c);
  EXPECT_EQ(lines[3], "<2 show 2, gather 1");
  EXPECT_EQ(lines.back(), "r> release 1");
  EXPECT_EQ(run.schedule.counts().mispredicted, 1);
  run.backward(path_c);
  run.expect_all(State::kSharded);
}

TEST(GatherSchedule, DefaultBound) {
  const auto bound = [](std::vector<int64_t> sizes, GatherSchedule::Options options = {}) {
    std::vector<ScheduledUnit> units;
    for (int64_t s : sizes) units.push_back({s, s / 2});
    return GatherSchedule(units, options).max_bytes();
  };
  EXPECT_EQ(bound({100, 100, 100, 9999}), 300) << "the root does not count";
  EXPECT_EQ(bound({100, 100, 100, 9999}, {.forward_prefetch = 2}), 400);
  EXPECT_EQ(bound({100, 100, 1000, 9999}), 2200);
  EXPECT_EQ(bound({9999}), 0);
  EXPECT_EQ(bound({100, 9999}, {.max_bytes = 7}), 7);
  EXPECT_EQ(bound({0, 0, 0, 100, 9999}), 300) << "units without parameters do not count";
}

TEST(GatherSchedule, EqualUnitsKeepThreeBuffersInBackward) {
  for (double chance : {0.0, 0.3, 0.7, 1.0}) {
    Training run(blocks(6), {}, chance);
    for (int step = 0; step < 3; ++step) {
      run.forward(model(6));
      run.backward(model(6));
      EXPECT_EQ(run.memory.now(), 0);
    }
    EXPECT_EQ(run.memory.peak(), 3 * kBlock) << chance;
    // Gathered after the reduction, two.
    Training post(blocks(6), {.forward_prefetch = 0, .backward_prefetch = BackwardPrefetch::kPost},
                  chance);
    post.forward(model(6));
    post.backward(model(6));
    EXPECT_EQ(post.memory.peak(), 2 * kBlock) << chance;
  }
}

TEST(GatherSchedule, ALargeUnitIsNotGatheredEarly) {
  std::vector<ScheduledUnit> units = blocks(4);
  units[1] = {5 * kBlock, 5 * kBlock};
  for (double chance : {0.0, 0.5, 1.0}) {
    Training run(units, {}, chance);
    run.forward(model(4));
    run.backward(model(4));
    run.forward(model(4));
    const Lines lines = run.backward(model(4));
    // 2 is current: its gradient and both of 1's would take 1 + 5 + 5 of the 11 that are allowed.
    EXPECT_NE(std::ranges::find(lines, "<2 show 2, gather 1"), lines.end());
    EXPECT_LE(run.memory.peak(), 11 * kBlock);

    Training tight(units, {.max_bytes = 10 * kBlock}, chance);
    tight.forward(model(4));
    const Lines t = tight.backward(model(4));
    EXPECT_NE(std::ranges::find(t, "<2 show 2"), t.end());
    EXPECT_NE(std::ranges::find(t, "2> release 2, gather 1"), t.end()) << "POST's place";
    EXPECT_NE(std::ranges::find(t, "<1 show 1"), t.end());
    EXPECT_NE(std::ranges::find(t, "1> release 1, gather 0"), t.end());
    EXPECT_LE(tight.memory.peak(), 10 * kBlock);

    Training tighter(units, {.max_bytes = 3 * kBlock}, chance);
    tighter.forward(model(4));
    const Lines u = tighter.backward(model(4));
    EXPECT_NE(std::ranges::find(u, "<1 gather 1, show 1"), u.end()) << "on demand, always";
    tighter.expect_all(State::kSharded);
  }
}

// Any models, options and programs: the checks in Training, and that all is sharded in the end,
// within the bound or what one unit needs for itself.
TEST(GatherSchedule, RandomPrograms) {
  std::mt19937 random(1);
  int bounded = 0;
  for (int round = 0; round < 1500; ++round) {
    const int n = 1 + random() % 7;
    std::vector<ScheduledUnit> units(n + 1);
    int64_t need = 0;
    const bool flat = random() % 2, full_shard = random() % 2;
    for (auto& u : units) {
      u = {int64_t(1 + random() % 300), int64_t(random() % 3 ? 1 + random() % 300 : 0)};
      u.reshard_after_forward = full_shard || random() % 2;
    }
    for (int u = 0; u < n; ++u) need = std::max(need, units[u].full_bytes + units[u].grad_bytes);
    GatherSchedule::Options options;
    options.forward_prefetch = random() % 4;
    options.backward_prefetch = BackwardPrefetch(random() % 3);
    if (random() % 2) options.max_bytes = 1 + random() % 900;
    const bool checkpointed = random() % 3 == 0, varied = random() % 2;

    Training run(units, options, (random() % 5) / 4.0);
    for (int step = 0; step < 4; ++step) {
      std::vector<Call> calls;
      for (int forwards = varied ? 1 + random() % 2 : 1; forwards > 0; --forwards) {
        Call root{n};
        for (int i = varied ? random() % (n + 2) : n; i > 0; --i) {
          const int unit = varied ? random() % n : i - 1;
          // Nested, a unit lies inside those with a higher number.
          Call* at = &root;
          while (!flat && !at->inner.empty() && at->inner.back().unit > unit && random() % 2)
            at = &at->inner.back();
          at->inner.push_back({unit, {}, checkpointed && at == &root});
        }
        // A checkpointed unit holds no others here: the harness recomputes it as one.
        if (checkpointed)
          for (Call& c : root.inner) c.inner.clear();
        calls.push_back(root);
      }
      run.forward(calls);
      run.backward(calls);
      run.expect_all(State::kSharded);
      EXPECT_EQ(run.memory.now(), 0);
      if (random() % 3 == 0) run.forward(calls.back(), false);
      run.expect_all(State::kSharded);
    }
    // Gradients that wait for a second use, and wrong guesses, are beyond the bound.
    if (!varied && flat && full_shard) {
      ++bounded;
      EXPECT_LE(run.memory.peak(), std::max(run.schedule.max_bytes(), need));
    }
    EXPECT_EQ(run.schedule.counts().repaired, 0);
    if (HasFailure()) FAIL() << "round " << round;
  }
  EXPECT_GT(bounded, 20);
}

TEST(GatherSchedule, RefusesCallsThatDoNotFit) {
  EXPECT_THROW(GatherSchedule({}, {}), Error);
  EXPECT_THROW(GatherSchedule(blocks(1), {.forward_prefetch = -1}), Error);
  GatherSchedule s(blocks(1), {});
  EXPECT_THROW(s.forward_pre(2, ForwardKind::kTraining), Error);
  EXPECT_THROW(s.forward_pre(-1, ForwardKind::kTraining), Error);
  EXPECT_THROW(s.forward_pre(0, ForwardKind::kRecomputation), Error);
  EXPECT_THROW(s.forward_post(0, ForwardKind::kTraining), Error);
  EXPECT_THROW(s.forward_unwind(0), Error);
  EXPECT_THROW(s.enter(0), Error);
  EXPECT_THROW(s.leave(0), Error);
  EXPECT_THROW(s.skip(0), Error);
  EXPECT_THROW(s.gradients_complete(0), Error);
  EXPECT_THROW(s.end_backward(), Error);
  s.forward_pre(0, ForwardKind::kTraining);
  EXPECT_THROW(s.reshard(0), Error);
  s.forward_post(0, ForwardKind::kTraining);
  s.begin_backward({{0}});
  EXPECT_THROW(s.begin_backward({{0}}), Error);
  EXPECT_THROW(s.forward_post(0, ForwardKind::kRecomputation), Error);
  s.end_backward();
  EXPECT_THROW(s.begin_backward({{5}}), Error);
  EXPECT_NO_THROW(s.begin_backward({{0}}));
}

}  // namespace
}  // namespace sherd::dist
