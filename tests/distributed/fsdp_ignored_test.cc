// Parameters that units leave alone, freeze or share. Rows C-008, Z-001 to Z-009 of the scenarios.
#include "autograd/grad_mode.h"
#include "core/generator.h"
#include "tests/distributed/towers.h"

namespace sherd::scenario {
namespace {

// ---- ignored
TEST(FsdpIgnored, Z_004_IgnoredModulesAndParameters) {
  for (bool by_module : {true, false})
    for (bool units : {true, false})
      run_ranks(2, [=](int rank) {
        Gpt m;
        const int64_t all = m.num_parameters();
        FsdpOptions o;
        if (units) o.auto_wrap_policy = module_wrap_policy<GptBlock>();
        nn::Module& left_out = *(*m.layers)[1]->ffn;
        const int64_t ignored = left_out.num_parameters();
        if (by_module)
          o.ignored_modules = {&left_out};
        else
          o.ignored_parameters = left_out.parameters();
        FullyShardedDataParallel fsdp(m, o);
        int64_t managed = 0;
        for (auto& u : fsdp.units()) managed += u->num_parameters();
        EXPECT_EQ(managed, all - ignored);
        optim::SGD sgd(fsdp.named_parameters(), {.lr = 0.1});
        for (int step = 0; step < 3; ++step) {
          fsdp(random_ids({2, 8}, 8, rank, step)).sum().backward();
          EXPECT_EQ((*m.layers)[1]->ffn->up->weight->sizes(), (Dims{64, 16}));
          EXPECT_EQ((*m.layers)[1]->ffn->up->weight->grad().sizes(), (Dims{64, 16}));
          fsdp.clip_grad_norm_(1.0);
          sgd.step();
          sgd.zero_grad();
        }
        EXPECT_EQ(fsdp.named_parameters().size(), m.named_parameters().size());
      });
}

TEST(FsdpIgnored, Z_004_WrappedInsideIgnored) {
  run_ranks(2, [](int rank) {
    Towers m(4);
    FsdpModule inner(*(*m.mlps)[0]->up, {});
    FsdpOptions o;
    o.ignored_modules = {(*m.mlps)[0].get()};
    FullyShardedDataParallel fsdp(m, o);
    EXPECT_EQ(fsdp.units().size(), 2u);
    EXPECT_EQ((*m.mlps)[0]->down->weight->sizes(), (Dims{4, 16}));  // stays whole
    fsdp(random_input({2, 4}, rank, 0)).sum().backward();
    Towers again(4);
    FsdpModule wrapped(*(*again.mlps)[0], {});
    o.ignored_modules = {(*again.mlps)[0].get()};
    expect_error([&] { FsdpModule(again, o); }, {"mlps.0", "ignored_modules", "wrapped before"});
  });
}

TEST(FsdpIgnored, Z_004_IgnoredRoot) {
  run_ranks(2, [](int rank) {
    Towers m(4);
    FsdpOptions o;
    o.ignored_modules = {&m};
    FullyShardedDataParallel fsdp(m, o);
    for (auto& u : fsdp.units()) EXPECT_EQ(u->num_parameters(), 0);
    fsdp(random_input({2, 4}, rank, 0)).sum().backward();
  });
}

TEST(FsdpIgnored, Z_005_IgnoredWeightOfAUnit) {
  run_ranks(4, [](int) {
    for (bool bias : {true, false}) {
      Mlp m(5);
      FsdpOptions o;
      for (auto& [name, p] : m.named_parameters())
        if (name == "up.weight" || (bias && name == "up.bias")) o.ignored_parameters.push_back(p);
      const int64_t n = m.num_parameters() - (bias ? 120 : 100);
      FsdpModule fsdp(m, o);
      ASSERT_EQ(fsdp.units().size(), 1u);
      EXPECT_LE(fsdp.units()[0]->groups()[0].piece.numel(), (n + 3) / 4);
    }
  });
}

class HasBuffer : public nn::Module {
 public:
  HasBuffer() : layer(add<nn::Linear>("layer", 3, 3)), running(buffer("running", full({2}, 5.0))) {}
  Tensor forward(const Tensor& x) { return layer(x); }
  nn::Child<nn::Linear> layer;
  nn::Buffer running;
};
class IgnoresOne : public nn::Module {
 public:
  IgnoresOne() : kept(add<Mlp>("kept", 3)), ignored(add<HasBuffer>("ignored")) {}
  Tensor forward(const Tensor& x) { return ignored(kept(x).to(kFloat32)); }
  nn::Child<Mlp> kept;
  nn::Child<HasBuffer> ignored;
};

TEST(FsdpIgnored, C_008_IgnoredModuleInTheState) {
  run_ranks(2, [](int rank) {
    manual_seed(7);
    IgnoresOne m, plain;
    FsdpOptions o{.mixed_precision = {.param_dtype = kFloat16}};
    o.ignored_modules = {m.ignored.get()};
    FsdpModule fsdp(m, o);
    const nn::StateDict state = fsdp.full_state_dict();
    if (rank == 0) {
      for (auto& [name, t] : state) EXPECT_EQ(t.dtype(), kFloat32) << name;
      plain.load_state_dict(state);  // strictly
    }
  });
}

// ---- frozen
class Biases : public nn::Module {
 public:
  Biases() : mlps(add<nn::ModuleList<Mlp>>("mlps")) {
    for (int i = 0; i < 3; ++i) mlps->append(8);
  }
  Tensor forward(const Tensor& x) {
    Tensor h = x;
    for (auto& m : *mlps) h = h + m(h);
    return h;
  }
  void freeze() {
    for (auto& [name, p] : named_parameters())
      if (!name.ends_with("bias")) Tensor(p).set_requires_grad(false);
  }
  nn::Child<nn::ModuleList<Mlp>> mlps;
};

TEST(FsdpIgnored, Z_001_OnlyBiasesTrained_T_06) {
  const auto scenario = [](bool freeze) {
    Scenario s{.make = [=] {
      auto m = std::make_shared<Biases>();
      if (freeze) m->freeze();
      return instance(m, [](Biases& m, int rank, int step) {
        return nn::call(m, random_input({2, 8}, rank, step)).sum();
      });
    }};
    return s;
  };
  const Result ddp = train(scenario(true), ddp_way(), 4);
  for (auto k : kStrategies) {
    Scenario s = scenario(true);
    expect_same_bits(train(s, fsdp_way(mlp_units(k)), 4,
                           [](Trainee& t) {
                             t.fsdp->reset_stats();
                             t.backward(99);
                             int64_t biases = 0;
                             for (auto& u : t.fsdp->units())
                               for (auto& g : u->groups())
                                 if (g.layout->requires_grad()) biases += g.layout->padded();
                             EXPECT_EQ(t.fsdp->stats().reduced_bytes, 4 * biases);
                             t.losses[t.rank].pop_back();
                           }),
                     ddp);
    // Frozen after wrapping.
    Scenario later = scenario(false);
    later.step = [](Trainee& t, int step) {
      if (step == 0) static_cast<Biases&>(t.module()).freeze();
      t.optimizers[0]->zero_grad(step % 2 == 0);
      t.backward(step);
      t.optimizers[0]->step();
    };
    expect_same_bits(train(later, fsdp_way(mlp_units(k)), 4), ddp);
  }
}

class Stripes : public nn::Module {
 public:
  Stripes() : list(add<nn::ModuleList<nn::Linear>>("list")) {
    for (int i = 0; i < 6; ++i) list->append(8, 8);
  }
  Tensor forward(const Tensor& x) {
    Tensor h = x;
    for (auto& l : *list) h = relu(l(h));
    return h;
  }
  void freeze_every_other(bool on = true) {
    for (int i = 1; i < 6; i += 2) (*list)[i]->requires_grad_(!on);
  }
  nn::Child<nn::ModuleList<nn::Linear>> list;
};

TEST(FsdpIgnored, Z_002_UnfrozenAtTheLastStep_T_06) {
  for (bool unfreeze : {false, true}) {
    Scenario s{.make = [] {
      auto m = std::make_shared<Stripes>();
      m->freeze_every_other();
      return instance(m, [](Stripes& m, int rank, int step) {
        return nn::call(m, random_input({2, 8}, rank, step)).sum();
      });
    }};
    s.steps = 3;
    s.step = [=](Trainee& t, int step) {
      auto& m = static_cast<Stripes&>(t.module());
      if (step == 1) {
        NoGrad off;
        t.losses[t.rank].push_back(t.forward(step));
        return;
      }
      if (step == 2 && unfreeze) m.freeze_every_other(false);
      t.optimizers[0]->zero_grad();
      t.backward(step);
      t.optimizers[0]->step();
    };
    const auto linears = [](ShardingStrategy k) {
      return FsdpOptions{.auto_wrap_policy = module_wrap_policy<nn::Linear>(),
                         .sharding_strategy = k};
    };
    const Result one = train(s, fsdp_way(linears(ShardingStrategy::kNoShard)), 2);
    EXPECT_EQ(one.gradients.count("list.1.weight"), unfreeze);
    for (auto k : kStrategies) expect_same_bits(train(s, fsdp_way(linears(k)), 2), one);
    if (!unfreeze) {  // DDP takes only what is trained when it is made
      const Result ddp = train(s, ddp_way(), 2);
      EXPECT_EQ(ddp.losses, one.losses);
    }
  }
}

TEST(FsdpIgnored, Z_003_FrozenUnitsAreResharded) {
  for (auto k : kStrategies)
    for (bool input_grad : {false, true})
      run_ranks(2, [=](int rank) {
        Stripes m;
        m.freeze_every_other();
        FullyShardedDataParallel fsdp(
            m, {.auto_wrap_policy = module_wrap_policy<nn::Linear>(), .sharding_strategy = k});
        Tensor x = random_input({2, 8}, rank, 0);
        if (input_grad) x.set_requires_grad(true);
        fsdp(x).sum().backward();
        for (auto& u : fsdp.units())
          for (auto& g : u->groups()) EXPECT_TRUE(g.whole || !g.full.storage()->has_bytes());
      });
}

// ---- shared
class SharesOne : public nn::Module {
 public:
  explicit SharesOne(bool tie = true)
      : a(add<nn::Linear>("a", 6, 6)),
        b(add<nn::Linear>("b", 6, 6)),
        c(add<nn::Linear>("c", 6, 6)) {
    if (!tie) return;
    b->weight.tie(a->weight);
    c->weight.tie(a->weight);
  }
  Tensor forward(const Tensor& x) { return c(relu(b(relu(a(x))))); }
  nn::Child<nn::Linear> a, b, c;
};

TEST(FsdpIgnored, Z_007_SharedByUnitsWrappedApart_T_05) {
  run_ranks(2, [](int) {
    SharesOne m;
    FsdpModule one(*m.a, {});
    expect_error(
        [&] {
          FsdpModule two(*m.b, {});
          FsdpModule root(m, {});
        },
        {"weight"});
  });
}

TEST(FsdpIgnored, Z_008_TiedEmbedding) {
  for (bool checkpointed : {false, true}) {
    const GptOptions o{.tied = true, .checkpointed = checkpointed};
    Scenario s{.make = [=] {
      return instance(std::make_shared<Gpt>(o), [=](Gpt& m, int rank, int step) {
        const Tensor ids = random_ids({2, 9}, o.vocab, rank, step);
        const Tensor logits = nn::call(m, ids.narrow(1, 0, 8));
        return F::cross_entropy(logits.view({-1, o.vocab}), ids.narrow(1, 1, 8).reshape({-1}));
      });
    }};
    s.steps = 4;
    const Result ddp = train(s, ddp_way(), 4);
    for (auto k : kStrategies)
      expect_same_bits(train(s,
                             fsdp_way({.auto_wrap_policy = module_wrap_policy<GptBlock>(),
                                       .sharding_strategy = k}),
                             4),
                       ddp);
    expect_same_bits(
        train(s, hybrid_way({.auto_wrap_policy = module_wrap_policy<GptBlock>()}, 2), 4), ddp);
  }
}

TEST(FsdpIgnored, Z_009_OneWeightOfThreeModules) {
  Scenario s{.make = [] {
    return instance(std::make_shared<SharesOne>(), [](SharesOne& m, int rank, int step) {
      return nn::call(m, random_input({2, 6}, rank, step)).sum();
    });
  }};
  const Result ddp = train(s, ddp_way(), 2);
  for (auto k : kStrategies)
    expect_same_bits(train(s,
                           fsdp_way({.auto_wrap_policy = module_wrap_policy<nn::Linear>(),
                                     .sharding_strategy = k}),
                           2,
                           [](Trainee& t) {
                             int64_t n = 0;
                             for (auto& u : t.fsdp->units()) n += u->num_parameters();
                             EXPECT_EQ(n, 36 + 3 * 6);
                             EXPECT_EQ(t.stepped().size(), 4u);
                             auto& m = static_cast<SharesOne&>(t.module());
                             const auto summoned = t.fsdp->summon_full_params();
                             EXPECT_TRUE(m.a->weight->is_same(m.c->weight));
                           }),
                     ddp);
}

}  // namespace
}  // namespace sherd::scenario
