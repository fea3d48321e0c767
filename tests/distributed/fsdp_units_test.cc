// Units chosen and set one by one: policies, options by unit, gathering by hand, fully_shard. Rows
// F-004, I-010, I-013, P-006, P-010, W-001 to W-007 of the scenarios.
#include "autograd/grad_mode.h"
#include "core/generator.h"
#include "tests/distributed/towers.h"

namespace sherd::scenario {
namespace {

// ---- gradient sync by unit
TEST(FsdpUnits, A_004_SyncOffForSomeUnits) {
  for (bool root_only : {true, false}) {
    Scenario s = towers(32);
    s.steps = 5;
    s.step = [=](Trainee& t, int step) {
      t.optimizers[0]->zero_grad(step % 2 == 0);
      if (t.fsdp) t.fsdp->reset_stats();
      for (int micro = 0; micro < 3; ++micro) {
        const bool on = micro == 2;
        if (t.fsdp && root_only) t.fsdp->set_requires_gradient_sync(on, /*recurse=*/false);
        if (t.fsdp && !root_only)
          for (int i : {0, 2})
            FsdpModule::of(*(*model_of(t).mlps)[i]).set_requires_gradient_sync(on);
        const auto off = on || t.fsdp ? nullptr : t.no_sync();
        t.backward(3 * step + micro);
      }
      if (t.fsdp) {
        EXPECT_EQ(t.fsdp->stats().reductions, root_only ? 10 : 8);
      }
      t.optimizers[0]->step();
    };
    // Some gradients are summed before the exchange, some after: equal, not the same bits.
    expect_close(train(s, fsdp_way(mlp_units()), 4), train(s, one_process(), 4), 1e-4, 1e-4);
  }
}

TEST(FsdpUnits, A_008_DivideFactor) {
  for (int shard : {0, 2, 1})
    for (bool low : {false, true})
      for (int times : {1, 2}) {
        FsdpOptions o = mlp_units();
        if (low) o.mixed_precision = {.param_dtype = kBFloat16, .reduce_dtype = kFloat32};
        const Way way = shard ? hybrid_way(o, shard) : fsdp_way(o);
        Scenario s = towers();
        s.steps = 1;
        const Result plain = train(s, way, 4);
        s.step = [=](Trainee& t, int step) {
          FsdpModule unit = FsdpModule::of(*(*model_of(t).mlps)[1]);
          unit.set_gradient_divide_factor(4 * times);
          expect_error([&] { unit.set_gradient_divide_factor(0); }, {"above 0"});
          expect_error([&] { unit.set_gradient_divide_factor(-2); }, {"above 0"});
          t.backward(step);
        };
        const Result set = train(s, way, 4);
        for (auto& [name, g] : plain.gradients)
          for (size_t i = 0; i < g.size(); ++i)
            EXPECT_EQ(set.gradients.at(name)[i], g[i] / (name.starts_with("mlps.1.") ? times : 1));
      }
}

// ---- gathering by hand
TEST(FsdpUnits, P_006_ReshardByHandBetweenForwardAndBackward) {
  for (bool by_hand : {false, true}) {
    Scenario s = towers();
    s.step = [=](Trainee& t, int step) {
      t.optimizers[0]->zero_grad();
      Tensor loss = nn::call(model_of(t), random_input({2, 8}, t.rank, step)).sum();
      t.losses[t.rank].push_back(loss.item());
      if (t.fsdp) {
        if (by_hand) t.fsdp->reshard();
        t.fsdp->reset_stats();
      }
      loss.backward();
      if (t.fsdp) {
        EXPECT_EQ(t.fsdp->stats().gathers, by_hand ? 4 : 0);
      }
      t.optimizers[0]->step();
    };
    expect_same_bits(train(s, fsdp_way(mlp_units(ShardingStrategy::kShardGradOp)), 2),
                     train(s, ddp_way(), 2));
  }
}

class OnlyRelu : public nn::Module {
 public:
  OnlyRelu() : layer(add<nn::Linear>("layer", 3, 5)), act(add<nn::ReLU>("act")) {}
  Tensor forward(const Tensor& x) { return act(layer(x)); }
  nn::Child<nn::Linear> layer;
  nn::Child<nn::ReLU> act;
};

TEST(FsdpUnits, P_010_EarlyGather_I_006) {
  run_ranks(2, [](int rank) {
    manual_seed(7);
    OnlyRelu plain, m;
    plain.materialize();
    fully_shard(*m.layer);
    fully_shard(*m.act);  // no parameters: a pass-through
    FsdpModule fsdp = fully_shard(m);
    FsdpModule::of(*m.act).unshard_async().wait();
    auto handle = FsdpModule::of(*m.layer).unshard_async();
    handle.wait();
    EXPECT_EQ(m.layer->weight->sizes(), (Dims{5, 3}));
    for (int64_t i = 0; i < 15; ++i)
      EXPECT_EQ(m.layer->weight->data<float>()[i], plain.layer->weight->data<float>()[i]);
    fsdp.reset_stats();
    nn::call(m, random_input({2, 3}, rank, 0)).sum().backward();
    // Gathered by hand, so only backward gathers again.
    EXPECT_EQ(fsdp.stats().gathers, 1);
  });
}

// ---- fully_shard
TEST(FsdpUnits, I_010_FullyShardNamesAndOrder) {
  run_ranks(2, [](int) {
    nn::Sequential m(Mlp(4), Mlp(4));
    auto& first = dynamic_cast<Mlp&>(m[0]);
    fully_shard(*first.up);
    fully_shard(*first.down);
    FsdpModule fsdp = fully_shard(m);
    const std::vector<std::vector<std::string>> expected = {
        {"0.up.weight", "0.up.bias"},
        {"0.down.weight", "0.down.bias"},
        {"1.up.weight", "1.up.bias", "1.down.weight", "1.down.bias"}};
    ASSERT_EQ(fsdp.units().size(), 3u);
    for (size_t u = 0; u < 3; ++u) {
      std::vector<std::string> names;
      for (auto place : fsdp.units()[u]->order())
        names.push_back(fsdp.units()[u]->entry(place).name);
      EXPECT_EQ(names, expected[u]);
    }
  });
}

TEST(FsdpUnits, F_003_FullyShardEqualsDdp) {
  const auto way = [](std::optional<bool> reshard, int shard) {
    return [=](Trainee& t) {
      FullyShardOptions o{.reshard_after_forward = reshard};
      if (shard) o.mesh = hybrid_mesh(shard);
      for (auto& mlp : *model_of(t).mlps) fully_shard(*mlp, o);
      t.fsdp = std::make_unique<FsdpModule>(fully_shard(t.module(), o));
    };
  };
  const Scenario s = towers();
  const Result ddp = train(s, ddp_way(), 4);
  for (int shard : {0, 2})
    for (auto reshard : {std::optional<bool>(), {true}, {false}}) {
      Way w;
      w.wrap = way(reshard, shard);
      expect_same_bits(train(s, w, 4), ddp);
    }
}

TEST(FsdpUnits, I_013_CommonOptionsMustAgree) {
  run_ranks(2, [](int) {
    Towers m(4);
    FsdpModule inner(*(*m.mlps)[0], {.max_gathered_bytes = 1000});
    expect_error([&] { FsdpModule(m, {.max_gathered_bytes = 2000}); },
                 {"max_gathered_bytes", "1000", "2000", "mlps.0"});
    FsdpModule(m, {.max_gathered_bytes = 1000});
  });
}

TEST(FsdpUnits, I_009_Refusals) {
  run_ranks(2, [](int) {
    Towers m(4);
    FsdpModule inner(*(*m.mlps)[0], {});
    expect_error([&] { fully_shard(*(*m.mlps)[0]); }, {"wrapped already"});
    expect_error([&] { fully_shard(*m.mlps); }, {"without a forward"});
  });
}

// Every rank hears of it at once, and all can go on.
TEST(FsdpUnits, WhatOneRankAloneRefusesAllRefuse) {
  run_ranks(2, [](int rank) {
    const auto fails_on_1 = [rank] {
      if (rank == 1) throw std::runtime_error("this rank has no such block");
    };
    Towers m(4);
    expect_error(
        [&] {
          FsdpModule fsdp(m, {.auto_wrap_policy = [&](nn::Module&) -> std::vector<nn::Module*> {
                            fails_on_1();
                            return {};
                          }});
        },
        {"rank 1: this rank has no such block"});
    expect_error(
        [&] {
          FsdpModule fsdp(m, {.unit_options = [&](nn::Module&, FsdpOptions&) { fails_on_1(); }});
        },
        {"rank 1: this rank has no such block"});
    FsdpModule fsdp(m, mlp_units());
    EXPECT_EQ(fsdp.units().size(), 4u);
  });
}

// ---- options by unit
TEST(FsdpUnits, W_006_StrategyAndPrecisionByUnit) {
  const Scenario s = towers();
  FsdpOptions o = mlp_units();
  o.unit_options = [](nn::Module& unit, FsdpOptions& options) {
    if (unit.full_name() == "mlps.1") options.sharding_strategy = ShardingStrategy::kNoShard;
    if (unit.full_name() == "mlps.2") options.sharding_strategy = ShardingStrategy::kShardGradOp;
  };
  expect_same_bits(
      train(s, fsdp_way(o), 2,
            [](Trainee& t) {
              EXPECT_EQ(t.fsdp->units()[1]->options().shard, nullptr);
              EXPECT_EQ(t.fsdp->units()[1]->options().replicate, dist::default_group());
              const std::string text = t.fsdp->summary();
              for (const char* part :
                   {"mlps.1", "no_shard", "1 x 2", "shard_grad_op", "kept for backward",
                    "forward and backward", "root", "never"})
                EXPECT_NE(text.find(part), std::string::npos) << part << " in\n" << text;
            }),
      train(s, ddp_way(), 2));
  o.unit_options = [](nn::Module& unit, FsdpOptions& options) {
    if (unit.full_name() == "mlps.1") options.mixed_precision = {.param_dtype = kBFloat16};
  };
  train(s, fsdp_way(o), 2, [](Trainee& t) {
    EXPECT_EQ(t.fsdp->units()[1]->groups()[0].compute, kBFloat16);
    EXPECT_EQ(t.fsdp->units()[0]->groups()[0].compute, kFloat32);
  });
}

nn::Linear linear(int64_t in, int64_t out) { return nn::Linear(in, out); }

TEST(FsdpUnits, W_001_SizePolicy) {
  run_ranks(1, [](int) {
    nn::Sequential m(linear(5, 5), linear(5, 5), nn::Sequential(linear(5, 5), linear(5, 5)));
    const auto chosen = size_based_auto_wrap_policy(40)(m);
    ASSERT_EQ(chosen.size(), 1u);
    EXPECT_EQ(chosen[0]->full_name(), "2");
    FsdpModule fsdp(m, {.auto_wrap_policy = size_based_auto_wrap_policy(40)});
    EXPECT_EQ(fsdp.units().size(), 2u);
  });
}

class WithList : public nn::Module {
 public:
  WithList(int n, int64_t dim) : list(add<nn::ModuleList<nn::Linear>>("list")) {
    for (int i = 0; i < n; ++i) list->append(dim, dim);
  }
  Tensor forward(const Tensor& x) {
    Tensor h = x;
    for (auto& l : *list) h = l(h);
    return h;
  }
  nn::Child<nn::ModuleList<nn::Linear>> list;
};

TEST(FsdpUnits, W_002_ListsAreNeverUnits) {
  run_ranks(1, [](int) {
    WithList small(2, 5), large(1, 10);
    EXPECT_TRUE(size_based_auto_wrap_policy(40)(small).empty());
    const auto chosen = size_based_auto_wrap_policy(40)(large);
    ASSERT_EQ(chosen.size(), 1u);
    EXPECT_EQ(chosen[0]->full_name(), "list.0");
  });
}

class WithAttention : public nn::Module {
 public:
  WithAttention()
      : first(add<nn::Linear>("first", 10, 100)),
        attention(add<nn::MultiheadAttention>("attention", 100, 4)) {}
  Tensor forward(const Tensor& x) {
    const Tensor h = first(x);
    return attention(h, h, h).output;
  }
  nn::Child<nn::Linear> first;
  nn::Child<nn::MultiheadAttention> attention;
};

TEST(FsdpUnits, W_003_ForcedLeaves) {
  run_ranks(1, [](int) {
    WithAttention m;
    for (nn::Module* chosen : size_based_auto_wrap_policy(40)(m))
      EXPECT_TRUE(chosen->full_name() == "first" || chosen->full_name() == "attention");
    Towers t(8);
    const auto leaves = [](nn::Module& m) { return dynamic_cast<Mlp*>(&m) != nullptr; };
    for (nn::Module* chosen : size_based_auto_wrap_policy(10, {.force_leaf = leaves})(t))
      EXPECT_TRUE(chosen->full_name() == "in" || dynamic_cast<Mlp*>(chosen));
  });
}

TEST(FsdpUnits, W_004_ByTypeAndByPredicateAlike) {
  run_ranks(2, [](int) {
    Gpt a, b;
    FsdpOptions o{.auto_wrap_policy = module_wrap_policy<GptBlock, nn::Embedding>(),
                  .mixed_precision = {.param_dtype = kBFloat16}};
    FsdpModule by_type(a, o);
    o.auto_wrap_policy = lambda_auto_wrap_policy([](nn::Module& m) {
      return dynamic_cast<GptBlock*>(&m) || dynamic_cast<nn::Embedding*>(&m);
    });
    FsdpModule by_predicate(b, o);
    ASSERT_EQ(by_type.units().size(), 6u);
    for (size_t i = 0; i < 6; ++i) {
      EXPECT_EQ(by_type.units()[i]->name(), by_predicate.units()[i]->name());
      for (auto& g : by_type.units()[i]->groups()) EXPECT_EQ(g.compute, kBFloat16);
    }
  });
}

TEST(FsdpUnits, W_005_AlwaysButTheIgnored) {
  run_ranks(2, [](int) {
    Towers m(4);
    FsdpOptions o{.auto_wrap_policy = lambda_auto_wrap_policy([](nn::Module&) { return true; })};
    o.ignored_modules = {(*m.mlps)[0].get(), m.in.get()};
    FsdpModule fsdp(m, o);
    std::vector<std::string> names;
    for (auto& u : fsdp.units()) names.push_back(u->name());
    EXPECT_EQ(names, (std::vector<std::string>{"mlps.1.up", "mlps.1.down", "mlps.1", "mlps.2.up",
                                               "mlps.2.down", "mlps.2", "root"}));
  });
}

TEST(FsdpUnits, W_007_WrappedAgainForInference) {
  run_ranks(2, [](int rank) {
    Towers m(4);
    const Tensor x = random_input({2, 4}, rank, 0);
    FsdpModule(*(*m.mlps)[1], {});
    std::vector<float> before, after;
    const auto output = [&] {
      NoGrad off;
      const Tensor y = contiguous_raw(nn::call(m, x));
      return std::vector<float>(y.data<float>(), y.data<float>() + y.numel());
    };
    m.materialize();
    before = output();
    FsdpModule fsdp(m, mlp_units());
    after = output();
    EXPECT_EQ(before, after);
    EXPECT_EQ(fsdp.units().size(), 4u);
  });
}

// ---- offload
TEST(FsdpUnits, F_004_CpuOffloadOnTheCpu_A_002) {
  const Scenario s = towers();
  for (auto k : kStrategies) {
    FsdpOptions o = mlp_units(k);
    const Result plain = train(s, fsdp_way(o), 2);
    for (bool pin : {false, true}) {
      o.cpu_offload = {.offload_params = true, .pin_memory = pin};
      expect_same_bits(train(s, fsdp_way(o), 2,
                             [](Trainee& t) {
                               for (const Tensor& p : t.stepped()) {
                                 EXPECT_TRUE(p.device().is_cpu());
                                 if (p.grad().defined()) {
                                   EXPECT_TRUE(p.grad().device().is_cpu());
                                 }
                               }
                               for (auto& [name, m] : t.optimizers[0]->state_dict())
                                 EXPECT_TRUE(m.device().is_cpu());
                             }),
                       plain);
    }
  }
}

}  // namespace
}  // namespace sherd::scenario
