// Clipping and loss scaling under FSDP: rows N-001 to N-007 of the scenarios, T-01 and T-17 of the
// traps.
#include <cmath>
#include <set>

#include "autograd/grad_mode.h"
#include "core/exact_sum.h"
#include "core/generator.h"
#include "distributed/sharded_grad_scaler.h"
#include "tests/distributed/scenario.h"

namespace sherd::scenario {
namespace {

using optim::kInfinityNorm;

Scenario gpt(bool frozen = false) {
  const GptOptions o{.layers = 2};
  Scenario s{.make = [=] {
    auto m = std::make_shared<Gpt>(o);
    if (frozen)
      for (auto& [name, p] : m->named_parameters())
        if (name.find("norm") != std::string::npos) Tensor(p).set_requires_grad(false);
    return instance(m, [=](Gpt& m, int rank, int step) {
      const Tensor ids = random_ids({2, 9}, o.vocab, rank, step);
      const Tensor logits = nn::call(m, ids.narrow(1, 0, 8)).to(kFloat32);
      return F::cross_entropy(logits.view({-1, o.vocab}), ids.narrow(1, 1, 8).reshape({-1}));
    });
  }};
  return s;
}
FsdpOptions blocks(ShardingStrategy s = ShardingStrategy::kFullShard) {
  return {.auto_wrap_policy = module_wrap_policy<GptBlock>(), .sharding_strategy = s};
}

double norm_of(const Tensor& t, double type) {
  ExactSum sum(type);
  if (t.numel()) sum.add(t);
  return sum.norm();
}

TEST(FsdpScaling, N_001_ClippingEqualsDdp_T_01) {
  for (double type : {2.0, 1.0, kInfinityNorm})
    for (double max : {1.0, 2.5}) {
      Scenario s = gpt();
      s.steps = 3;
      std::vector<std::set<float>> norms(s.steps);
      std::mutex mutex;
      s.step = [&, type, max](Trainee& t, int step) {
        t.optimizers[0]->zero_grad();
        t.backward(step);
        NoGrad off;
        for (const Tensor& p : t.stepped())
          if (p.grad().defined()) p.grad().mul_(100);
        const Tensor norm = t.fsdp ? t.fsdp->clip_grad_norm_(max, type)
                                   : optim::clip_grad_norm_(t.stepped(), max, type);
        EXPECT_GT(norm.item(), max);
        for (const Tensor& p : t.stepped())
          if (p.grad().defined()) {
            EXPECT_LE(norm_of(p.grad(), type), max * 1.001);
          }
        t.optimizers[0]->step();
        std::lock_guard lock(mutex);
        norms[step].insert(norm.item<float>());
      };
      const Result ddp = train(s, ddp_way(), 4);
      for (auto k : kStrategies)
        for (bool offload : {false, true}) {
          FsdpOptions o = blocks(k);
          o.cpu_offload.offload_params = offload;
          expect_same_bits(train(s, fsdp_way(o), 4), ddp);
        }
      expect_same_bits(train(s, hybrid_way(blocks(), 2), 4), ddp);
      for (auto& n : norms) EXPECT_EQ(n.size(), 1u);
    }
}

TEST(FsdpScaling, N_002_OneAllReduceAGroup) {
  run_ranks(4, [](int rank) {
    const auto mesh = hybrid_mesh(2);
    for (bool hybrid : {false, true}) {
      Gpt m;
      FsdpOptions o =
          blocks(hybrid ? ShardingStrategy::kHybridShard : ShardingStrategy::kFullShard);
      if (hybrid) o.device_mesh = mesh;
      FullyShardedDataParallel fsdp(m, o);
      fsdp(random_ids({2, 8}, 8, rank, 0)).sum().backward();
      const std::array groups = {dist::default_group(), mesh.get_group("shard"),
                                 mesh.get_group("replicate")};
      std::array<uint64_t, 3> before;
      for (int g = 0; g < 3; ++g) before[g] = groups[g]->sequence_number();
      fsdp.clip_grad_norm_(1.0);
      const std::array<uint64_t, 3> expected = {hybrid ? 0u : 1u, hybrid ? 1u : 0u, 0u};
      for (int g = 0; g < 3; ++g) EXPECT_EQ(groups[g]->sequence_number() - before[g], expected[g]);
    }
  });
}

TEST(FsdpScaling, N_003_OnTheRootAlone) {
  run_ranks(2, [](int rank) {
    Gpt m;
    FullyShardedDataParallel fsdp(m, blocks());
    fsdp(random_ids({2, 8}, 8, rank, 0)).sum().backward();
    FsdpModule inner = FsdpModule::of(*(*m.layers)[1]);
    expect_error([&] { inner.clip_grad_norm_(1.0); }, {"layers.1", "root"});
    fsdp.clip_grad_norm_(1.0);
  });
}

TEST(FsdpScaling, N_004_LowPrecisionGradients) {
  for (double type : {1.0, 2.0, kInfinityNorm})
    for (double max : {1.0, 2.5})
      for (auto k : {ShardingStrategy::kFullShard, ShardingStrategy::kNoShard})
        for (bool mixed : {false, true})
          run_ranks(2, [=](int rank) {
            Gpt m;
            FsdpOptions o = blocks(k);
            o.mixed_precision = {.param_dtype = kFloat16, .keep_low_precision_grads = true};
            if (mixed)
              o.unit_options = [](nn::Module& unit, FsdpOptions& options) {
                if (unit.full_name() == "layers.0")
                  options.mixed_precision = {.param_dtype = kFloat16, .reduce_dtype = kFloat32};
              };
            FullyShardedDataParallel fsdp(m, o);
            (fsdp(random_ids({2, 8}, 8, rank, 0)).to(kFloat32) * 20.0).sum().backward();
            const Tensor norm = fsdp.clip_grad_norm_(max, type);
            EXPECT_EQ(norm.dtype(), mixed ? kFloat32 : kFloat16);
            EXPECT_GT(norm.item(), max);
            for (const Tensor& p : fsdp.parameters())
              if (p.grad().defined()) {
                EXPECT_LE(norm_of(p.grad(), type), max * 1.01);
              }
          });
}

TEST(FsdpScaling, N_005_ScalesTensorsInLists) {
  run_ranks(1, [](int) {
    optim::GradScaler scaler({.init_scale = 2});
    const Tensor four = full({}, 4.0), eight = full({}, 8.0);
    EXPECT_EQ(scaler.scale(four).item(), 8);
    const auto [a, list] = scaler.scale(std::tuple(four, std::vector{four, eight}));
    EXPECT_EQ(a.item(), 8);
    ASSERT_EQ(list.size(), 2u);
    EXPECT_EQ(list[0].item(), 8);
    EXPECT_EQ(list[1].item(), 16);
    EXPECT_EQ(four.item(), 4);
  });
}

class TwoLinears : public nn::Module {
 public:
  TwoLinears() : a(add<nn::Linear>("a", 4, 4)), b(add<nn::Linear>("b", 4, 4)) {}
  Tensor forward(const Tensor& x) { return b(a(x)); }
  nn::Child<nn::Linear> a, b;
};

TEST(FsdpScaling, N_006_AllRanksStepOrNone_T_17) {
  run_ranks(4, [](int rank) {
    for (bool hybrid : {false, true})
      for (int bad : {-1, 2}) {
        TwoLinears m;
        FsdpOptions o{.auto_wrap_policy = module_wrap_policy<nn::Linear>()};
        if (hybrid) {
          o.sharding_strategy = ShardingStrategy::kHybridShard;
          o.device_mesh = hybrid_mesh(2);
        }
        FullyShardedDataParallel fsdp(m, o);
        optim::Adam adam(fsdp.named_parameters(), {.lr = 0.1});
        ShardedGradScaler scaler({.init_scale = 3});
        const Tensor loss = fsdp(random_input({2, 4}, rank, 0)).sum();
        scaler.scale(loss).backward();
        std::vector<Tensor> expected;
        for (const Tensor& p : fsdp.parameters()) {
          const Tensor g = p.grad();
          if (!g.defined()) continue;
          if (rank == bad && expected.empty()) g.detach().data<float>()[0] = INFINITY;
          expected.push_back(g.detach().clone());
        }
        scaler.unscale_(adam);
        size_t i = 0;
        for (const Tensor& p : fsdp.parameters())
          if (p.grad().defined()) {
            for (int64_t k = 0; k < p.numel(); ++k)
              EXPECT_EQ(p.grad().data<float>()[k], expected[i].data<float>()[k] / 3);
            ++i;
          }
        expect_error([&] { scaler.unscale_(adam); }, {"unscale_", "already"});
        const Tensor p = fsdp.parameters()[0];
        const float before = p.numel() ? p.data<float>()[0] : 0;
        EXPECT_EQ(scaler.step(adam), bad < 0);
        expect_error([&] { scaler.step(adam); }, {"step", "already"});
        bool has_state = false;
        for (auto& [name, t] : adam.state_dict())
          has_state = has_state || name.find("exp_avg") != std::string::npos;
        EXPECT_EQ(has_state, bad < 0);
        if (p.numel()) {
          EXPECT_EQ(p.data<float>()[0] == before, bad >= 0);
        }
        scaler.update();
        EXPECT_EQ(scaler.get_scale(), bad < 0 ? 3 : 1.5);
        expect_error([&] { scaler.update(); }, {"update", "without"});
      }
  });
}

TEST(FsdpScaling, N_006_ScaleGrowsAndIsKept) {
  run_ranks(1, [](int) {
    TwoLinears m;
    m.materialize();
    optim::SGD sgd(m.parameters(), {.lr = 0.1});
    optim::GradScaler scaler({.init_scale = 4, .growth_interval = 2});
    const auto step = [&](optim::GradScaler& s) {
      sgd.zero_grad();
      s.scale(m.forward(full({1, 4}, 1.0)).sum()).backward();
      s.step(sgd);
      s.update();
    };
    step(scaler);
    EXPECT_EQ(scaler.get_scale(), 4);
    optim::GradScaler other;
    other.load_state_dict(scaler.state_dict());
    for (auto* s : {&scaler, &other}) {
      step(*s);
      EXPECT_EQ(s->get_scale(), 8);
      EXPECT_EQ(s->growth_tracker(), 0);
    }
    expect_error([] { optim::GradScaler({.init_scale = 0}); }, {"init_scale", "above 0"});
    expect_error([] { optim::GradScaler({.growth_interval = 0}); }, {"growth_interval"});
    optim::GradScaler off({.enabled = false});
    EXPECT_EQ(off.scale(full({}, 4.0)).item(), 4);
    EXPECT_EQ(off.get_scale(), 1);
  });
}

TEST(FsdpScaling, N_007_Fp16WithScalerAndFrozenParameters) {
  Scenario s = gpt(/*frozen=*/true);
  s.steps = 4;
  std::vector<std::unique_ptr<optim::GradScaler>> scalers(4);
  s.step = [&](Trainee& t, int step) {
    auto& scaler = scalers[t.rank];
    if (step == 0)
      scaler = std::make_unique<ShardedGradScaler>(optim::GradScalerOptions{.init_scale = 2048});
    t.optimizers[0]->zero_grad();
    const Tensor loss = t.loss(t.rank, step);
    t.losses[t.rank].push_back(loss.item());
    scaler->scale(loss).backward();
    EXPECT_TRUE(scaler->step(*t.optimizers[0]));
    scaler->update();
  };
  FsdpOptions reference = blocks(ShardingStrategy::kNoShard);
  reference.mixed_precision = {.param_dtype = kFloat16};
  const Result plain = train(s, fsdp_way(reference), 2);
  EXPECT_LT(plain.losses[0].back(), 10);
  for (auto k : kStrategies)
    for (bool offload : {false, true}) {
      FsdpOptions o = blocks(k);
      o.mixed_precision = {.param_dtype = kFloat16};
      o.cpu_offload.offload_params = offload;
      expect_same_bits(train(s, fsdp_way(o), 2), plain);
    }
  // And near the float32 run.
  const Result single = train(gpt(true), fsdp_way(blocks()), 2);
  for (size_t i = 0; i < plain.losses[0].size(); ++i)
    EXPECT_NEAR(plain.losses[0][i], single.losses[0][i], 0.02);
}

// Four ranks' gradients of 30,000 add up to more than float16 holds.
TEST(FsdpScaling, N_007_Float16SumsDoNotOverflow) {
  for (int shard : {0, 2})
    run_ranks(4, [=](int) {
      TwoLinears m;
      FsdpOptions o{.mixed_precision = {.param_dtype = kFloat16}};
      if (shard) {
        o.sharding_strategy = ShardingStrategy::kHybridShard;
        o.device_mesh = hybrid_mesh(shard);
      }
      FullyShardedDataParallel fsdp(m, o);
      (fsdp(full({1, 4}, 1.0)).to(kFloat32) * 30000.0).sum().backward();
      for (auto& [name, p] : fsdp.named_parameters())
        if (name == "b.bias" && p.grad().defined()) {
          EXPECT_EQ(p.grad().data<float>()[0], 30000);
        }
    });
}

}  // namespace
}  // namespace sherd::scenario
