// When units are gathered, shown, reduced and released, what they leave behind, and what happens
// when ranks do different things: rows P-*, L-* of the scenarios, T-09, T-15, T-16 of the traps.
#include "autograd/grad_mode.h"
#include "core/generator.h"
#include "tests/distributed/scenario.h"

namespace sherd::scenario {
namespace {

using Trace = std::vector<std::string>;

FsdpOptions blocks(ShardingStrategy s = ShardingStrategy::kFullShard) {
  return {.auto_wrap_policy = module_wrap_policy<GptBlock>(),
          .sharding_strategy = s,
          .record_trace = true};
}

// Of a step's trace, the events of these kinds.
Trace only(const Trace& trace, const std::vector<std::string>& kinds) {
  Trace found;
  for (auto& t : trace)
    if (std::find(kinds.begin(), kinds.end(), t.substr(0, t.find(' '))) != kinds.end())
      found.push_back(t);
  return found;
}

struct Traced {
  Trace forward, backward;  // of the last step
  FsdpStats stats;          // of it
  Result result;
};
// T(layers), `forwards` forwards and one backward of their sum, three steps; all ranks agree.
Traced traced(const FsdpOptions& options, const GptOptions& gpt = {}, int forwards = 1,
              const std::function<void(Trainee&)>& before = nullptr) {
  Traced all;
  std::vector<Trace> of_rank(2);
  Scenario s{
      .make =
          [=] {
            return instance(std::make_shared<Gpt>(gpt), [=](Gpt& m, int rank, int step) {
              Tensor loss = Tensor(0.0);
              for (int i = 0; i < forwards; ++i)
                loss = loss +
                       nn::call(m, random_ids({2, 6}, gpt.vocab, rank, step * forwards + i)).mean();
              return loss;
            });
          },
      .steps = 3};
  s.step = [&](Trainee& t, int step) {
    if (step == 0 && before && t.fsdp) before(t);
    if (t.fsdp) t.fsdp->reset_stats();
    t.backward(step);
    t.optimizers[0]->step();
    t.optimizers[0]->zero_grad();
  };
  all.result = train(s, fsdp_way(options), 2);
  expect_same_bits(all.result, train(s, ddp_way(), 2));
  all.stats = all.result.stats[0];
  EXPECT_EQ(all.stats.trace, all.result.stats[1].trace);
  EXPECT_EQ(all.stats.repaired, 0);
  // Backward begins with the first gather, show or reduction after the root's last forward event.
  const Trace& trace = all.stats.trace;
  size_t cut = 0;
  for (size_t i = 0; i < trace.size(); ++i)
    if (trace[i].starts_with("reduce") || trace[i].starts_with("post")) {
      cut = i;
      break;
    }
  all.forward = {trace.begin(), trace.begin() + cut};
  all.backward = {trace.begin() + cut, trace.end()};
  return all;
}

TEST(FsdpOrder, P_001_GathersAndPosts) {
  for (bool checkpointed : {false, true}) {
    const Traced t = traced(blocks(), {.checkpointed = checkpointed});
    EXPECT_EQ(only(t.stats.trace, {"gather", "post"}),
              (Trace{"gather 3", "gather 0", "gather 1", "gather 2",  // forward
                     "gather 2", "gather 1", "post 2", "gather 0", "post 1", "post 0", "post 3"}));
    EXPECT_EQ(only(t.stats.trace, {"reduce", "retire"}),
              (Trace{"reduce 2", "reduce 1", "retire 2", "reduce 0", "retire 1", "reduce 3",
                     "retire 0", "retire 3"}));
  }
  FsdpOptions root_too = blocks();
  root_too.reshard_root_after_forward = true;
  EXPECT_EQ(only(traced(root_too).stats.trace, {"gather", "post"}),
            (Trace{"gather 3", "gather 0", "gather 1", "gather 2", "gather 3", "gather 2",
                   "gather 1", "post 2", "gather 0", "post 1", "post 0", "post 3"}));
}

TEST(FsdpOrder, P_002_BackwardPostAndNone) {
  FsdpOptions o = blocks();
  o.backward_prefetch = BackwardPrefetch::kPost;
  EXPECT_EQ(only(traced(o).stats.trace, {"gather", "reduce"}),
            (Trace{"gather 3", "gather 0", "gather 1", "gather 2", "gather 2", "reduce 2",
                   "gather 1", "reduce 1", "gather 0", "reduce 0", "reduce 3"}));
  o.backward_prefetch = BackwardPrefetch::kNone;
  const Traced none = traced(o);
  EXPECT_EQ(
      only(none.backward, {"gather", "post", "show"}),
      (Trace{"post 2", "gather 1", "show 1", "post 1", "gather 0", "show 0", "post 0", "post 3"}));
  EXPECT_EQ(none.stats.early_gathers > 0, true);  // forward's
}

TEST(FsdpOrder, P_003_TwoForwardsOneBackward) {
  const Traced full = traced(blocks(), {}, 2);
  EXPECT_EQ(only(full.stats.trace, {"post"}),
            (Trace{"post 2", "post 1", "post 0", "post 2", "post 1", "post 0", "post 3"}));
  EXPECT_EQ(only(full.stats.trace, {"reduce"}),
            (Trace{"reduce 2", "reduce 1", "reduce 0", "reduce 3"}));
  EXPECT_EQ(full.stats.gathers, 1 + 3 + 3 + 3 + 3);  // two forwards, two rounds of backward
  const Traced grad_op = traced(blocks(ShardingStrategy::kShardGradOp), {}, 2);
  EXPECT_EQ(only(grad_op.stats.trace, {"post"}), only(full.stats.trace, {"post"}));
  EXPECT_EQ(only(grad_op.stats.trace, {"gather"}).size(), 4u + 3u);  // the second round's
}

TEST(FsdpOrder, P_004_Counts) {
  for (int64_t n : {1, 3}) {
    const GptOptions gpt{.layers = n};
    FsdpOptions o = blocks();
    FsdpStats s = traced(o, gpt).stats;
    EXPECT_EQ(s.gathers, 2 * n + 1);  // the root keeps its own
    EXPECT_EQ(s.reductions, n + 1);
    o.reshard_root_after_forward = true;
    s = traced(o, gpt).stats;
    EXPECT_EQ(s.gathers, 2 * n + 2);
    EXPECT_EQ(s.reductions, n + 1);
    s = traced(blocks(ShardingStrategy::kShardGradOp), gpt).stats;
    EXPECT_EQ(s.gathers, n + 1);
    EXPECT_EQ(s.reductions, n + 1);
    s = traced(blocks(ShardingStrategy::kNoShard), gpt).stats;
    EXPECT_EQ(s.gathers, 0);
    EXPECT_EQ(s.reductions, n + 1);
  }
}

TEST(FsdpOrder, P_004_CountedTwice) {
  // What the runtime counts is what the group saw.
  run_ranks(2, [](int rank) {
    Gpt m;
    FullyShardedDataParallel fsdp(m, blocks());
    const auto before = dist::default_group()->counts();
    fsdp(random_ids({2, 6}, 8, rank, 0)).sum().backward();
    const auto after = dist::default_group()->counts();
    const FsdpStats s = fsdp.stats();
    EXPECT_EQ(after.all_gather.calls - before.all_gather.calls, s.gathers);
    EXPECT_EQ(after.all_gather.bytes - before.all_gather.bytes, s.gathered_bytes);
    EXPECT_EQ(after.reduce_scatter.calls - before.reduce_scatter.calls, s.reductions);
    EXPECT_GE(after.reduce_scatter.bytes - before.reduce_scatter.bytes, s.reduced_bytes);
  });
}

TEST(FsdpOrder, P_005_ReshardAfterForwardFlippedLater) {
  auto flip = [](std::vector<int> units, bool on) {
    return [=](Trainee& t) {
      for (int u : units) t.fsdp->runtime()->schedule().set_reshard_after_forward(u, on);
    };
  };
  const ShardingStrategy kFull = ShardingStrategy::kFullShard,
                         kGradOp = ShardingStrategy::kShardGradOp;
  EXPECT_EQ(traced(blocks(kFull), {}, 1, flip({0, 1, 2, 3}, true)).stats.gathers, 4 + 4);
  EXPECT_EQ(traced(blocks(kFull), {}, 1, flip({0, 1, 2, 3}, false)).stats.gathers, 4);
  EXPECT_EQ(traced(blocks(kGradOp), {}, 1, flip({3}, true)).stats.gathers, 4 + 1);
  EXPECT_EQ(traced(blocks(kGradOp), {}, 1, flip({0, 1, 2}, true)).stats.gathers, 4 + 3);
}

TEST(FsdpOrder, P_007_ForwardPrefetch) {
  FsdpOptions o = blocks();
  const GptOptions four{.layers = 4};
  auto forward = [&](int ahead) {
    o.forward_prefetch = ahead;
    const Traced t = traced(o, four);
    Trace f = only(t.stats.trace, {"gather", "release"});
    f.resize(9);  // the root's and four blocks' gathers, and four releases
    EXPECT_EQ(only(t.stats.trace, {"post"}),
              (Trace{"post 3", "post 2", "post 1", "post 0", "post 4"}));
    return f;
  };
  EXPECT_EQ(forward(0), (Trace{"gather 4", "gather 0", "release 0", "gather 1", "release 1",
                               "gather 2", "release 2", "gather 3", "release 3"}));
  EXPECT_EQ(forward(1), (Trace{"gather 4", "gather 0", "gather 1", "release 0", "gather 2",
                               "release 1", "gather 3", "release 2", "release 3"}));
  EXPECT_EQ(forward(2), (Trace{"gather 4", "gather 0", "gather 1", "gather 2", "release 0",
                               "gather 3", "release 1", "release 2", "release 3"}));
}

// Two ways through the model, of equal size: sizes alone would match.
class TwoPaths : public nn::Module {
 public:
  TwoPaths()
      : layer1(add<nn::Linear>("layer1", 6, 6, nn::LinearOptions{.bias = false})),
        layer2(add<nn::Sequential>("layer2", nn::Linear(6, 3, {.bias = false}),
                                   nn::Linear(3, 6, {.bias = false}))) {}
  Tensor forward(const Tensor& x, bool first) { return first ? layer1(x) : layer2(x); }
  nn::Child<nn::Linear> layer1;
  nn::Child<nn::Sequential> layer2;
};

TEST(FsdpOrder, P_011_RanksGoDifferentWays) {
  for (int alike : {0, 1, 3}) {
    std::mutex mutex;
    std::vector<std::string> errors(3);
    std::vector<int> failed_at(3, -1);
    EXPECT_THROW(run_ranks(3,
                           [&](int rank) {
                             TwoPaths m;
                             FullyShardedDataParallel fsdp(
                                 m, {.auto_wrap_policy = lambda_auto_wrap_policy([](nn::Module& c) {
                                       return c.full_name() == "layer1" ||
                                              c.full_name() == "layer2";
                                     })});
                             for (int step = 0; step < alike + 1; ++step) try {
                                 fsdp(random_input({2, 6}, rank, step), step < alike || rank == 0)
                                     .sum()
                                     .backward();
                               } catch (const Error& e) {
                                 std::lock_guard lock(mutex);
                                 errors[rank] = e.what();
                                 failed_at[rank] = step;
                                 throw;
                               }
                           }),
                 Error);
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(failed_at[rank], alike) << rank;
      for (const char* text : {"layer1", "layer2", "rank 0", "rank "})
        EXPECT_NE(errors[rank].find(text), std::string::npos) << errors[rank];
    }
  }
}

TEST(FsdpOrder, P_012_TrainAndEvalTakeTurns_T_09) {
  for (auto k : {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp})
    run_ranks(2, [=](int rank) {
      Gpt m;
      FullyShardedDataParallel fsdp(m, blocks(k));
      optim::SGD sgd(fsdp.parameters(), {.lr = 0.1});
      for (int epoch = 0; epoch < 2; ++epoch) {
        m.train();
        for (int step = 0; step < 3; ++step) {
          fsdp(random_ids({2, 6}, 8, rank, step)).mean().backward();
          sgd.step();
          sgd.zero_grad();
        }
        m.eval();
        NoGrad off;
        for (int step = 0; step < 3; ++step) {
          fsdp(random_ids({2, 6}, 8, rank, step));
          for (auto& u : fsdp.units())
            for (auto& g : u->groups()) EXPECT_FALSE(g.full.storage()->has_bytes());
        }
      }
      EXPECT_EQ(fsdp.stats().mispredicted, 0);
      EXPECT_EQ(fsdp.stats().repaired, 0);
    });
}

// ---- lifetime
class TwoMlps : public nn::Module {
 public:
  TwoMlps() : a(add<Mlp>("a", 3)), b(add<Mlp>("b", 3)) {}
  Tensor forward(const Tensor& x) { return b(a(x)); }
  nn::Child<Mlp> a, b;
};

// Of each parameter that the module shows: 1-D pieces, or whole with the original values.
void expect_shown(nn::Module& m, const nn::StateDict& original, const std::string& prefix,
                  bool whole) {
  for (auto& [name, p] : m.named_parameters()) {
    if (!name.starts_with(prefix)) continue;
    if (!whole) {
      EXPECT_EQ(p.dim(), 1) << name;
      continue;
    }
    const Tensor& o = original.at(name);
    ASSERT_EQ(p.sizes(), o.sizes()) << name;
    for (int64_t i = 0; i < o.numel(); ++i)
      EXPECT_EQ(p.data<float>()[i], o.data<float>()[i]) << name;
  }
}

TEST(FsdpLifetime, L_001_WhatParametersShow) {
  for (auto k : {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp})
    run_ranks(4, [=](int rank) {
      manual_seed(1);
      TwoMlps m;
      m.materialize();
      nn::StateDict original;
      for (auto& [name, t] : m.state_dict()) original.set(name, t.clone());
      FullyShardedDataParallel fsdp(
          m, {.auto_wrap_policy = module_wrap_policy<Mlp>(), .sharding_strategy = k});
      expect_shown(m, original, "", false);
      const Tensor y = fsdp(random_input({2, 3}, rank, 0));
      const bool kept = k == ShardingStrategy::kShardGradOp;
      expect_shown(m, original, "a.", kept);
      expect_shown(m, original, "b.", kept);
      fsdp.reshard();
      expect_shown(m, original, "", false);
      fsdp.unshard();
      expect_shown(m, original, "", true);
      fsdp.reshard();
      y.sum().backward();
      expect_shown(m, original, "", false);
    });
}

// Also when a part of the output was not in the loss, nothing gathered is left.
TEST(FsdpLifetime, L_003_NothingIsLeftAfterBackward) {
  for (auto k : {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp})
    run_ranks(2, [=](int rank) {
      TwoMlps m;
      FullyShardedDataParallel fsdp(
          m, {.auto_wrap_policy = module_wrap_policy<Mlp>(), .sharding_strategy = k});
      const int64_t pieces = memory_stats()[MemoryCategory::kParameters];
      auto expect_nothing = [&] {
        EXPECT_EQ(memory_stats()[MemoryCategory::kParameters], pieces);
        for (auto& u : fsdp.units())
          for (auto& g : u->groups()) {
            EXPECT_FALSE(g.full.storage()->has_bytes());
            for (auto& e : g.entries)
              for (auto* slot : e.slots)
                EXPECT_EQ(slot->tensor.storage().get(), g.piece.storage().get());
          }
      };
      fsdp(random_input({2, 3}, rank, 0)).narrow(1, 0, 1).sum().backward();
      expect_nothing();
      // The root's output alone, then the inner one's, which leaves a unit out of backward.
      const Tensor x = random_input({2, 3}, rank, 1);
      const Tensor inner = nn::call(*m.a, x);
      (inner.sum() + fsdp(x).sum()).backward();
      expect_nothing();
      { const Tensor dropped = fsdp(x); }
      fsdp(x).sum().backward();
      expect_nothing();
    });
}

// After an error in forward or backward all is sharded again, and training goes on.
TEST(FsdpLifetime, L_006_TrainsOnAfterAnError) {
  struct Throwing : nn::Module {
    Throwing() : mlp(add<Mlp>("mlp", 3)), head(add<nn::Linear>("head", 3, 2)) {}
    Tensor forward(const Tensor& x) {
      const Tensor h = mlp(x);
      if (throws) fail("told to");
      return head(h);
    }
    nn::Child<Mlp> mlp;
    nn::Child<nn::Linear> head;
    bool throws = false;
  };
  run_ranks(2, [](int rank) {
    Throwing m;
    FullyShardedDataParallel fsdp(m, {.auto_wrap_policy = module_wrap_policy<Mlp>()});
    optim::SGD sgd(fsdp.parameters(), {.lr = 0.1});
    const Tensor x = random_input({2, 3}, rank, 0);
    for (int step = 0; step < 4; ++step) {
      m.throws = step % 2 == 1;
      if (m.throws) {
        expect_error([&] { fsdp(x); }, {"told to"});
        // In backward, by a hook.
        m.throws = false;
        Tensor y = fsdp(x);
        autograd::register_hook(y, [](const Tensor&) -> Tensor { fail("in the hook"); });
        expect_error([&] { y.sum().backward(); }, {"in the hook"});
        for (auto& u : fsdp.units())
          for (auto& g : u->groups()) EXPECT_FALSE(g.full.storage()->has_bytes());
        continue;
      }
      fsdp(x).sum().backward();
      sgd.step();
      sgd.zero_grad();
    }
  });
}

TEST(FsdpLifetime, L_010_PartsJoinToTheWhole) {
  struct Two : nn::Module {
    Two()
        : a(add<nn::Linear>("a", 5, 5, nn::LinearOptions{.bias = false})),
          b(add<nn::Linear>("b", 5, 7)) {}
    Tensor forward(const Tensor& x) { return b(a(x)); }
    nn::Child<nn::Linear> a, b;
  };
  std::mutex mutex;
  std::map<std::string, std::map<int64_t, float>> joined;
  nn::StateDict original;
  run_ranks(2, [&](int rank) {
    manual_seed(11);
    Two m;
    m.materialize();
    if (rank == 0)
      for (auto& [name, t] : m.state_dict()) original.set(name, t.clone());
    FullyShardedDataParallel fsdp(m, {.auto_wrap_policy = module_wrap_policy<nn::Linear>()});
    optim::AdamW adam(fsdp.parameters(), {.lr = 1e-2});
    {
      std::lock_guard lock(mutex);
      for (auto& p : fsdp.parts()) {
        ASSERT_EQ(p.parameter.numel(), p.end - p.begin);
        for (int64_t i = 0; i < p.parameter.numel(); ++i)
          EXPECT_TRUE(joined[p.name].emplace(p.begin + i, p.parameter.data<float>()[i]).second);
      }
    }
    fsdp(random_input({2, 5}, rank, 0)).sum().backward();
    bool none = false;
    for (auto& p : fsdp.parts()) {
      EXPECT_EQ(p.parameter.grad().defined(), p.parameter.numel() > 0) << p.name;
      none = none || p.parameter.numel() == 0;
    }
    EXPECT_EQ(none, rank == 0);  // rank 1 holds the whole bias of b
    adam.step();
  });
  for (auto& [name, t] : original) {
    ASSERT_EQ(int64_t(joined[name].size()), t.numel()) << name;
    for (int64_t i = 0; i < t.numel(); ++i) EXPECT_EQ(joined[name][i], t.data<float>()[i]);
  }
}

TEST(FsdpLifetime, L_011_AnAssignedTensorIsTaken) {
  for (auto k : kStrategies)
    run_ranks(2, [=](int) {
      nn::Linear m(2, 3, {.bias = false});
      FullyShardedDataParallel fsdp(m, {.sharding_strategy = k});
      auto shown = [&] { return fsdp(ones({1, 2})).sum().item(); };
      m.weight.slot().tensor = full({3, 2}, 5);
      EXPECT_EQ(shown(), 30);
      fsdp.parameters()[0].set_data(full({3, 2}, 7));
      EXPECT_EQ(shown(), 42);
      m.weight.slot().tensor = full({2, 2}, 1);
      expect_error(shown, {"weight", "[2, 2]", "[3, 2]"});
    });
}

// Also as the first change, of a unit that is idle with what it gathered before.
TEST(FsdpLifetime, L_011_NewDataIsTakenByAUnitThatWasGathered) {
  for (auto k : kStrategies)
    run_ranks(2, [=](int) {
      nn::Linear m(2, 3, {.bias = false});
      FullyShardedDataParallel fsdp(m, {.sharding_strategy = k});
      auto shown = [&] { return fsdp(ones({1, 2})).sum().item(); };
      for (int i = 1; i <= 3; ++i) {
        shown();
        fsdp.parameters()[0].set_data(full({3, 2}, i));
        EXPECT_EQ(shown(), 6 * i);
      }
    });
}

// ---- ranks that are not alike
TEST(FsdpRanks, T_15_ParameterUsedOnSomeRanks) {
  // Of a unit that all reach: zeros are contributed.
  struct Two : nn::Module {
    Two() : a(add<nn::Linear>("a", 4, 4)), b(add<nn::Linear>("b", 4, 4)) {}
    Tensor forward(const Tensor& x, bool both) { return both ? a(x) + b(x) : a(x); }
    nn::Child<nn::Linear> a, b;
  };
  auto gradient = [](int world, auto used) {
    std::vector<float> g;
    run_ranks(world, [&](int rank) {
      manual_seed(3);
      Two m;
      FullyShardedDataParallel fsdp(m, {});
      fsdp(random_input({2, 4}, rank, 0), used(rank)).sum().backward();
      fsdp.for_each_full([](const std::string&, const Tensor& p) { return gradient_of(p); },
                         [&](const std::string&, const Tensor& t) {
                           g.insert(g.end(), t.data<float>(), t.data<float>() + t.numel());
                         });
    });
    return g;
  };
  const auto some = gradient(2, [](int rank) { return rank == 0; });
  const auto all = gradient(2, [](int) { return true; });
  ASSERT_EQ(some.size(), 40u);
  for (int i = 0; i < 20; ++i) EXPECT_EQ(some[i], all[i]);  // a: both ranks
  for (int i = 36; i < 40; ++i) EXPECT_EQ(some[i], 1);      // b.bias: rank 0's 2 rows, 2 ranks
}

TEST(FsdpRanks, T_16_ModelsThatDiffer) {
  auto make = [](int rank, int kind) {
    auto m = std::make_shared<nn::Sequential>(nn::Linear(4, kind == 1 && rank == 1 ? 5 : 4));
    if (kind == 2 && rank == 1) m->append(nn::Linear(3, 3));
    return m;
  };
  for (const bool ddp : {false, true})
    for (int kind : {1, 2}) {
      std::mutex mutex;
      int failed = 0;
      EXPECT_THROW(
          run_ranks(
              3,
              [&](int rank) {
                auto m = make(rank, kind);
                try {
                  if (ddp)
                    dist::DdpReducer(*m, {});
                  else
                    FsdpModule(*m, {});
                } catch (const Error& e) {
                  std::lock_guard lock(mutex);
                  ++failed;
                  const std::string text = e.what();
                  for (const char* part : {kind == 1 ? "0.weight" : "1.weight", "rank 1", "rank 0"})
                    EXPECT_NE(text.find(part), std::string::npos) << text;
                  throw;
                }
              }),
          Error);
      EXPECT_EQ(failed, 3);
    }
}

TEST(FsdpRanks, OptionsThatDiffer) {
  EXPECT_THROW(run_ranks(2,
                         [&](int rank) {
                           Mlp m(4);
                           FsdpModule(m, {.forward_prefetch = rank});
                         }),
               Error);
}

TEST(FsdpRanks, T_04_RanksOfDifferentSeeds) {
  // Declared or filled before: all hold rank 0's.
  for (bool filled : {false, true})
    for (auto k : kStrategies) {
      std::vector<std::vector<float>> of_rank(3);
      run_ranks(3, [&](int rank) {
        manual_seed(100 + rank);
        Mlp m(4);
        if (filled) m.materialize();
        FullyShardedDataParallel fsdp(m, {.sharding_strategy = k});
        fsdp.unshard();
        for (auto& p : m.parameters())
          of_rank[rank].insert(of_rank[rank].end(), p.data<float>(), p.data<float>() + p.numel());
        fsdp.reshard();
      });
      std::vector<float> zero;
      run_ranks(1, [&](int) {
        manual_seed(100);
        Mlp m(4);
        m.materialize();
        for (auto& p : m.parameters())
          zero.insert(zero.end(), p.data<float>(), p.data<float>() + p.numel());
      });
      for (auto& values : of_rank) EXPECT_EQ(values, zero);
    }
}

}  // namespace
}  // namespace sherd::scenario
