// Gradient accumulation under FSDP: rows of the scenarios, T-12 and T-13
// of the traps.
#include "autograd/grad_mode.h"
#include "core/generator.h"
#include "tests/distributed/towers.h"

namespace sherd::scenario {
namespace {

// Micro-batches, synced or not, in a pattern.
Scenario pattern(const std::vector<bool>& synced) {
  Scenario s = towers(6, 3);
  s.steps = 2;
  s.step = [synced](Trainee& t, int step) {
    t.optimizers[0]->zero_grad(step % 2 == 0);
    for (size_t i = 0; i < synced.size(); ++i) {
      const auto off = synced[i] ? nullptr : t.no_sync();
      t.backward(int(step * synced.size() + i));
    }
    t.optimizers[0]->step();
  };
  return s;
}

TEST(FsdpAccumulation, A_001_Patterns_T_13) {
  for (const auto& synced : std::vector<std::vector<bool>>{
           {false, false, false, true, true, true, false, false, false, true},
           {true, true, true, false, false, false, true, true, true, true},
           {false, true}}) {
    const Scenario s = pattern(synced);
    const Result ddp = train(s, ddp_way(), 2);
    expect_close(ddp, train(s, one_process(), 2), 1e-4, 1e-4);
    for (auto k : kStrategies)
      for (auto prefetch :
           {BackwardPrefetch::kNone, BackwardPrefetch::kPre, BackwardPrefetch::kPost}) {
        FsdpOptions o = mlp_units(k);
        o.backward_prefetch = prefetch;
        expect_same_bits(train(s, fsdp_way(o), 2), ddp);
      }
  }
}

// Gathers and reductions of 3 micro-batches of which the last syncs; 4 units.
FsdpStats counted(bool reshards_after_forward, bool root_too, bool after_backward) {
  Scenario s = towers(32, 2);
  s.steps = 5;
  s.step = [=](Trainee& t, int step) {
    t.optimizers[0]->zero_grad(step % 2 == 0);
    if (t.fsdp) t.fsdp->reset_stats();
    for (int micro = 0; micro < 3; ++micro) {
      if (t.fsdp)
        for (int u = 0; u < 4; ++u)
          t.fsdp->runtime()->schedule().set_reshard_after_backward(u, after_backward || micro == 2);
      const auto off = micro < 2 ? t.no_sync() : nullptr;
      t.backward(3 * step + micro);
    }
    t.optimizers[0]->step();
  };
  FsdpOptions o = mlp_units(reshards_after_forward ? ShardingStrategy::kFullShard
                                                   : ShardingStrategy::kShardGradOp);
  o.reshard_root_after_forward = root_too;
  const Result got = train(s, fsdp_way(o), 4);
  expect_same_bits(got, train(s, ddp_way(), 4));
  expect_close(got, train(s, one_process(), 4), 1e-4, 1e-4);
  for (auto& f : got.stats) {
    EXPECT_EQ(f.gathers, got.stats[0].gathers);
    EXPECT_EQ(f.reductions, got.stats[0].reductions);
    EXPECT_EQ(f.repaired, 0);
  }
  return got.stats[0];
}

TEST(FsdpAccumulation, A_003_Counts) {
  EXPECT_EQ(counted(true, true, true).gathers, 24);
  EXPECT_EQ(counted(true, false, true).gathers, 21);
  EXPECT_EQ(counted(false, false, true).gathers, 12);
  EXPECT_EQ(counted(false, false, false).gathers, 4);
  EXPECT_EQ(counted(true, true, true).reductions, 4);
}

TEST(FsdpAccumulation, A_005_PendingGradientIsFull_T_12) {
  run_ranks(2, [](int rank) {
    nn::Linear m(7, 1, {.bias = false});
    FullyShardedDataParallel fsdp(m, {});
    optim::SGD sgd(fsdp.parameters(), {.lr = 0.1});
    const Tensor x = random_input({3, 7}, rank, 0);
    fsdp(x).sum().backward();
    const Tensor p = fsdp.parameters()[0];
    const Tensor once = p.grad().clone();
    EXPECT_EQ(once.sizes(), p.sizes());
    sgd.zero_grad();
    {
      auto off = fsdp.no_sync();
      fsdp(x).sum().backward();
      EXPECT_EQ(p.grad().sizes(), Dims({1, 7}));
      // A step now would use this rank's gradient alone.
      expect_error([&] { sgd.step(); }, {"weight", "no_sync"});
    }
    fsdp(x).sum().backward();
    for (int64_t i = 0; i < p.numel(); ++i)
      EXPECT_FLOAT_EQ(p.grad().data<float>()[i], 2 * once.data<float>()[i]);
    sgd.step();
  });
}

// The switch is read when a backward begins: round it alone or round forward too is the same.
TEST(FsdpAccumulation, T_12_RoundBackwardAloneOrRoundBoth) {
  auto gradient = [](bool round_both) {
    std::vector<float> all;
    run_ranks(2, [&](int rank) {
      manual_seed(5);
      Towers m(6);
      FullyShardedDataParallel fsdp(m, mlp_units());
      for (int micro = 0; micro < 3; ++micro) {
        std::optional<FsdpModule::NoSync> off;
        auto reduced = fsdp.stats().reductions;
        if (round_both && micro < 2) off.emplace(fsdp.runtime());
        const Tensor loss = fsdp(random_input({3, 6}, rank, micro)).sum();
        if (!round_both && micro < 2) off.emplace(fsdp.runtime());
        loss.backward();
        EXPECT_EQ(fsdp.stats().reductions - reduced, micro < 2 ? 0 : 4);
      }
      fsdp.for_each_full([](const std::string&, const Tensor& p) { return gradient_of(p); },
                         [&](const std::string&, const Tensor& g) {
                           all.insert(all.end(), g.data<float>(), g.data<float>() + g.numel());
                         });
    });
    return all;
  };
  const auto a = gradient(true);
  EXPECT_GT(a.size(), 100u);
  EXPECT_EQ(a, gradient(false));
}

// The sums of micro-batches are kept in float32: a hand-made reference adds up as they do.
TEST(FsdpAccumulation, A_006_Bf16ParametersFloat32Sums) {
  constexpr int kMicro = 4, kWorld = 4, kSteps = 3;
  Scenario s = towers(16, 2);
  s.steps = kSteps;
  s.step = [](Trainee& t, int step) {
    t.optimizers[0]->zero_grad();
    for (int micro = 0; micro < kMicro; ++micro) {
      const auto off = micro + 1 < kMicro ? t.no_sync() : nullptr;
      t.backward(step * kMicro + micro);
    }
    t.optimizers[0]->step();
  };
  // By hand: a bf16 model for the gradients, float32 masters and Adam.
  Trainee::Values expected;
  run_ranks(1, [&](int) {
    manual_seed(7);
    Towers master(16), low(16);
    master.materialize();
    low.materialize();
    low.to(kBFloat16);
    optim::Adam adam(master.named_parameters(), {.lr = 1e-2});
    for (int step = 0; step < kSteps; ++step) {
      const auto masters = master.parameters(), lows = low.parameters();
      {
        NoGrad off;
        for (size_t i = 0; i < lows.size(); ++i) Tensor(lows[i]).copy_(masters[i]);
      }
      std::vector<std::vector<Tensor>> sums(kWorld);  // by rank, in float32
      for (int r = 0; r < kWorld; ++r)
        for (int micro = 0; micro < kMicro; ++micro) {
          low.zero_grad();
          nn::call(low, random_input({2, 16}, r, step * kMicro + micro).to(kBFloat16))
              .sum()
              .backward();
          NoGrad off;
          for (size_t i = 0; i < lows.size(); ++i) {
            const Tensor g = lows[i].grad().to(kFloat32);
            if (micro == 0)
              sums[r].push_back(g);
            else
              sums[r][i].add_(g);
          }
        }
      NoGrad off;
      for (size_t i = 0; i < masters.size(); ++i)
        masters[i].set_grad(((sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i])) *
                            (1.0 / kWorld));
      adam.step();
    }
    for (auto& [name, p] : master.named_parameters()) {
      const Tensor c = contiguous_raw(p.detach());
      expected[name] = {c.data<float>(), c.data<float>() + c.numel()};
    }
  });
  for (auto k :
       {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp, ShardingStrategy::kNoShard}) {
    FsdpOptions o = mlp_units(k);
    o.mixed_precision = {.param_dtype = kBFloat16, .reduce_dtype = kFloat32};
    const Result got = train(s, fsdp_way(o), kWorld);
    EXPECT_EQ(got.parameters, expected);
  }
}

}  // namespace
}  // namespace sherd::scenario
