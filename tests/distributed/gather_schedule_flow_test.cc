// Programs that do not call unit after unit: modules used twice, recursion, nesting, skipped or
// stale units, exceptions, checkpointed regions.
#include "tests/distributed/gather_schedule_training.h"

namespace sherd::dist {
namespace {

TEST(GatherSchedule, AModuleUsedTwice) {
  // F-005: r(0(x) + 0(x)).
  const Call twice{1, {{0}, {0}}};
  Training run(blocks(1));
  run.forward(twice);
  EXPECT_EQ(run.count(Kind::kGather), 3) << "without an order, 0 is released in between";
  run.backward(twice);
  run.log.clear();
  EXPECT_EQ(run.forward(twice), (Lines{"<r gather r, show r, gather 0", "<0 show 0", "0>", "<0",
                                       "0> release 0", "r>"}));
  EXPECT_EQ(
      run.backward(twice),
      (Lines{"<r gather 0", "<0 show 0", "0>", "<0", "last leaf of 0 reduce 0", "0> release 0",
             "last leaf of r reduce r, retire 0", "r> release r", "end retire r"}));
  EXPECT_EQ(run.count(Kind::kReduce), 2);
}

TEST(GatherSchedule, RecursionCountsPins) {
  const Call nested{1, {{0, {{0, {{0}}}}}}};
  Training run(blocks(1));
  run.forward(nested);
  EXPECT_EQ(run.take({Kind::kGather, Kind::kRelease}),
            (Lines{"gather r", "gather 0", "release 0"}));
  run.backward(nested);
  EXPECT_EQ(
      run.take({Kind::kGather, Kind::kRelease, Kind::kPost, Kind::kReduce}),
      (Lines{"gather 0", "reduce 0", "post 0", "release 0", "reduce r", "post r", "release r"}));
}

TEST(GatherSchedule, NestedUnits) {
  // Blocks 2 and 5 with attention and FFN units of their own (F-007).
  const Call nested{6, {{2, {{0}, {1}}}, {5, {{3}, {4}}}}};
  Training run(blocks(6), {.max_bytes = 10 * kBlock});
  for (int step = 0; step < 3; ++step) {
    run.forward(nested);
    EXPECT_EQ(run.take({Kind::kGather}), (Lines{"gather r", "gather 2", "gather 0", "gather 1",
                                                "gather 5", "gather 3", "gather 4"}));
    run.backward(nested);
    EXPECT_EQ(run.take({Kind::kGather, Kind::kPost}),
              (Lines{"gather 5", "gather 4", "gather 3", "post 4", "gather 2", "post 3", "post 5",
                     "gather 1", "gather 0", "post 1", "post 0", "post 2", "post r"}));
    run.expect_all(State::kSharded);
  }
}

TEST(GatherSchedule, UnitsThatBackwardDoesNotRead) {
  // An embedding as unit 0: only reduced.
  Training run(blocks(3));
  run.forward(model(3));
  run.log.clear();
  const Lines lines = run.backward(model(3), {0});
  EXPECT_EQ(run.take({Kind::kGather}), (Lines{"gather 2", "gather 1"}));
  EXPECT_NE(std::ranges::find(lines, "last leaf of 0 reduce 0, retire 1"), lines.end());
  // In front of others: passed over by the prefetch.
  run.forward(model(3));
  run.backward(model(3), {2});
  run.forward(model(3));
  EXPECT_EQ(run.backward(model(3), {2})[0], "<r gather 1");
  run.expect_all(State::kSharded);
}

TEST(GatherSchedule, GatheredAheadForALaterScopeOfTheUnitThatIsLeft) {
  std::vector<ScheduledUnit> units = blocks(2);
  units[1].gathers = false;
  Training run(units);
  run.schedule.begin_backward({{2}, {0, false}, {1}, {0}});
  run.apply("", run.schedule.enter(2));
  run.apply("", run.schedule.enter(0));
  EXPECT_EQ(run.schedule.state(0), State::kGathering);
  run.apply("", run.schedule.leave(0));
  EXPECT_EQ(run.schedule.state(0), State::kGathering);
  EXPECT_EQ(run.take({Kind::kGather, Kind::kRelease}), (Lines{"gather r", "gather 0"}));
}

TEST(GatherSchedule, SkippedScopes) {
  Training run(blocks(3, false));
  run.forward(model(3));
  run.apply("", run.schedule.reshard(1));
  run.log.clear();
  run.schedule.begin_backward({{3}, {2}, {1}, {0}});
  run.apply("", run.schedule.enter(3));
  run.apply("", run.schedule.skip(2));  // idle: released
  EXPECT_EQ(run.take({Kind::kRelease, Kind::kPost}), (Lines{"post 2", "release 2"}));
  run.apply("", run.schedule.skip(1));  // sharded: nothing
  EXPECT_EQ(run.take({Kind::kRelease, Kind::kPost}), Lines{});
  run.apply("", run.schedule.enter(0));
  run.apply("", run.schedule.leave(0));
  run.apply("", run.schedule.leave(3));
  run.apply("", run.schedule.end_backward());
  EXPECT_EQ(run.schedule.counts().gathers, 4);

  // Gathered ahead: stays to the end.
  Training ahead(blocks(3));
  ahead.forward(model(3));
  ahead.schedule.begin_backward({{3}, {2}, {1}, {0}});
  ahead.apply("", ahead.schedule.enter(3));
  ahead.log.clear();
  ahead.apply("", ahead.schedule.skip(2));
  EXPECT_TRUE(ahead.log.empty());
  ahead.apply("", ahead.schedule.leave(3));
  ahead.apply("", ahead.schedule.end_backward());
  ahead.expect_all(State::kSharded);
  EXPECT_EQ(ahead.schedule.counts().mispredicted, 2) << "2, and 1 after the root was left";
}

TEST(GatherSchedule, OneRankGathersNothing) {
  std::vector<ScheduledUnit> units = blocks(3);
  for (auto& u : units) u.gathers = false;
  Training run(units);
  for (int step = 0; step < 2; ++step) {
    run.forward(model(3));
    EXPECT_TRUE(run.log.empty());
    run.backward(model(3));
    EXPECT_EQ(run.take({Kind::kGather, Kind::kShow, Kind::kRelease, Kind::kReduce, Kind::kRetire}),
              (Lines{"reduce 2", "reduce 1", "retire 2", "reduce 0", "retire 1", "reduce r",
                     "retire 0", "retire r"}));
  }
}

TEST(GatherSchedule, AUnitWithoutParametersIsPassedOver) {
  std::vector<ScheduledUnit> units = blocks(3);
  units[1] = {0, 0, /*gathers=*/false};
  Training run(units);
  run.forward(model(3));
  run.backward(model(3));
  EXPECT_EQ(run.forward(model(3))[1], "<0 show 0, gather 2");
  EXPECT_EQ(run.backward(model(3))[1], "<2 show 2, gather 0");
}

TEST(GatherSchedule, StaleParametersAreGatheredAgain) {
  Training run(blocks(1, false));
  run.forward(model(1));
  run.apply("<r", run.schedule.forward_pre(1, ForwardKind::kTraining, /*stale=*/true));
  run.apply("<0", run.schedule.forward_pre(0, ForwardKind::kTraining));
  EXPECT_EQ(run.take({Kind::kRelease}), (Lines{"release r"}));
  EXPECT_EQ(run.schedule.counts().gathers, 3);
  run.apply("<0", run.schedule.forward_pre(0, ForwardKind::kTraining, /*stale=*/true));
  EXPECT_TRUE(run.log.empty()) << "in use: the runtime refuses the change";
}

TEST(GatherSchedule, UnitsThatRecordedNothingAreReleased) {
  Training run(blocks(1, false));
  run.apply("", run.schedule.forward_pre(1, ForwardKind::kTraining));
  run.apply("", run.schedule.forward_pre(0, ForwardKind::kTraining));
  run.apply("", run.schedule.forward_post(0, ForwardKind::kTraining, /*has_graph=*/false));
  EXPECT_EQ(run.schedule.state(0), State::kSharded);
  run.apply("", run.schedule.forward_post(1, ForwardKind::kTraining));
  EXPECT_EQ(run.schedule.state(1), State::kIdle);
}

TEST(GatherSchedule, AfterAnExceptionItTrainsOn) {
  Training run(blocks(3));
  run.forward(model(3));
  run.backward(model(3));
  // In forward, inside block 1, with 2 gathered ahead.
  for (int u : {3, 0}) run.apply("", run.schedule.forward_pre(u, ForwardKind::kTraining));
  run.apply("", run.schedule.forward_post(0, ForwardKind::kTraining));
  run.apply("", run.schedule.forward_pre(1, ForwardKind::kTraining));
  EXPECT_EQ(run.schedule.state(2), State::kGathering);
  run.apply("", run.schedule.forward_unwind(1));
  run.apply("", run.schedule.forward_unwind(3));
  run.expect_all(State::kSharded);
  // In backward, with a reduction in flight.
  run.forward(model(3));
  run.schedule.begin_backward({{3}, {2}, {1}, {0}});
  run.apply("", run.schedule.enter(3));
  run.apply("", run.schedule.enter(2));
  run.apply("", run.schedule.gradients_complete(2));
  run.log.clear();
  run.apply("", run.schedule.abort());
  EXPECT_EQ(run.take({Kind::kRelease, Kind::kDrop}),
            (Lines{"release 1", "release 2", "release r", "drop 2"}));
  run.expect_all(State::kSharded);
  run.forward(model(3));
  run.backward(model(3));
  run.expect_all(State::kSharded);
  EXPECT_EQ(run.schedule.counts().repaired, 0);
}

TEST(GatherSchedule, AModuleMayCatchWhatAnInnerOneThrows) {
  Training run(blocks(2));
  run.apply("", run.schedule.forward_pre(2, ForwardKind::kTraining));
  run.apply("", run.schedule.forward_pre(0, ForwardKind::kTraining));
  run.apply("", run.schedule.forward_unwind(0));
  EXPECT_EQ(run.schedule.state(0), State::kSharded);
  EXPECT_EQ(run.schedule.state(2), State::kInUse);
  run.apply("", run.schedule.forward_pre(1, ForwardKind::kTraining));
  run.apply("", run.schedule.forward_post(1, ForwardKind::kTraining));
  run.apply("", run.schedule.forward_post(2, ForwardKind::kTraining));
  EXPECT_EQ(run.schedule.state(2), State::kIdle);
}

TEST(GatherSchedule, BackwardInsideAForwardLeavesItsUnitsAlone) {
  Training run(blocks(2));
  run.apply("", run.schedule.forward_pre(2, ForwardKind::kTraining));
  run.apply("", run.schedule.forward_pre(0, ForwardKind::kTraining));
  run.apply("", run.schedule.forward_post(0, ForwardKind::kTraining));
  run.backward(Call{0});
  EXPECT_EQ(run.schedule.state(2), State::kInUse);
  EXPECT_EQ(run.schedule.state(0), State::kSharded);
  EXPECT_EQ(run.schedule.counts().repaired, 0);
  run.apply("", run.schedule.forward_post(2, ForwardKind::kTraining));
}

TEST(GatherSchedule, ACheckpointedRegionOfSeveralUnits) {
  // Units 0 and 1 inside one region: recomputed in the order of forward, then run back.
  Training run(blocks(3));
  run.forward(model(3));
  run.log.clear();
  run.schedule.begin_backward({{3}, {2}, {0}, {1}});
  run.apply("", run.schedule.enter(3));
  run.apply("", run.schedule.enter(2));
  run.apply("", run.schedule.gradients_complete(2));
  run.apply("", run.schedule.leave(2));
  for (int u : {0, 1}) {
    run.apply("", run.schedule.forward_pre(u, ForwardKind::kRecomputation));
    run.apply("", run.schedule.forward_post(u, ForwardKind::kRecomputation));
  }
  EXPECT_EQ(run.schedule.state(0), State::kInUse) << "its pin waits for its scope";
  run.apply("", run.schedule.enter(1));
  run.apply("", run.schedule.gradients_complete(1));
  run.apply("", run.schedule.leave(1));
  EXPECT_EQ(run.schedule.state(1), State::kSharded);
  run.apply("", run.schedule.skip(0));  // recomputed, but not reached
  EXPECT_EQ(run.schedule.state(0), State::kSharded);
  run.apply("", run.schedule.leave(3));
  run.apply("", run.schedule.end_backward());
  EXPECT_EQ(run.take({Kind::kGather, Kind::kPost}),
            (Lines{"gather 2", "gather 0", "post 2", "gather 1", "post 1", "post 0", "post r"}));
  EXPECT_EQ(run.schedule.counts().repaired, 0);
}

TEST(GatherSchedule, AScopeLeftOpenIsRepairedAndCounted) {
  Training run(blocks(2));
  run.forward(model(2));
  run.schedule.begin_backward({{2}, {1}, {0}});
  run.apply("", run.schedule.enter(2));
  run.apply("", run.schedule.enter(1));
  run.apply("", run.schedule.end_backward());
  run.expect_all(State::kSharded);
  EXPECT_EQ(run.schedule.counts().repaired, 2);
}
}  // namespace
}  // namespace sherd::dist
