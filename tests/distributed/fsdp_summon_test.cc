// Whole parameters by hand: rows L-004 to L-009, L-012, M-011 of the scenarios.
#include "autograd/grad_mode.h"
#include "core/generator.h"
#include "tests/distributed/scenario.h"

namespace sherd::scenario {
namespace {

// An outer unit round an inner one; 5 * 5 and 5 * 3 elements, which two ranks pad to even.
class Nested : public nn::Module {
 public:
  Nested()
      : outer(add<nn::Linear>("outer", 5, 5, nn::LinearOptions{.bias = false})),
        inner(add<nn::Linear>("inner", 5, 3, nn::LinearOptions{.bias = false})) {}
  Tensor forward(const Tensor& x) { return inner(outer(x)); }
  nn::Child<nn::Linear> outer, inner;
};
WrapPolicy inner_unit() {
  return lambda_auto_wrap_policy([](nn::Module& m) { return m.full_name() == "inner"; });
}
FsdpOptions nested(ShardingStrategy s = ShardingStrategy::kFullShard) {
  return {.auto_wrap_policy = inner_unit(), .sharding_strategy = s};
}

std::vector<float> values(const Tensor& t) {
  const Tensor c = contiguous_raw(to_raw(t.detach(), kFloat32));
  return {c.data<float>(), c.data<float>() + c.numel()};
}
// Those of an unwrapped model of the same seed.
std::map<std::string, std::vector<float>> unwrapped() {
  manual_seed(7);
  Nested m;
  m.materialize();
  std::map<std::string, std::vector<float>> all;
  for (auto& [name, p] : m.named_parameters()) all[name] = values(p);
  return all;
}

TEST(FsdpSummon, L_003_OnlyWhatWasGatheredStaysSo) {
  run_ranks(2, [](int rank) {
    Nested m;
    FullyShardedDataParallel fsdp(m, nested());
    const auto states = [&] {
      std::vector<dist::GatherSchedule::State> s;
      for (int u : {0, 1}) s.push_back(fsdp.runtime()->schedule().state(u));
      return s;
    };
    const auto full_bytes = [&] {
      int64_t n = 0;
      for (auto& u : fsdp.units())
        for (auto& g : u->groups()) n += g.full.storage()->has_bytes();
      return n;
    };
    const Tensor loss = fsdp(random_input({2, 5}, rank, 0)).sum();
    const auto before = states();
    const Tensor shown = m.outer->weight.get(), hidden = m.inner->weight.get();
    {
      const auto summoned = fsdp.summon_full_params();
      EXPECT_EQ(m.inner->weight->sizes(), (Dims{3, 5}));
    }
    EXPECT_EQ(states(), before);
    EXPECT_TRUE(m.outer->weight->is_same(shown));
    EXPECT_TRUE(m.inner->weight->is_same(hidden));
    loss.backward();
    { const auto summoned = fsdp.summon_full_params({.writeback = false}); }
    EXPECT_EQ(full_bytes(), 0);
    for (auto& u : fsdp.units())
      for (auto& g : u->groups())
        for (auto& e : g.entries) EXPECT_EQ(e.slots[0]->tensor.storage(), g.piece.storage());
  });
}

TEST(FsdpSummon, L_004_WriteBack) {
  for (auto strategy : kStrategies)
    for (bool low : {false, true})
      for (bool writeback : {false, true})
        run_ranks(2, [=](int rank) {
          Nested m;
          FsdpOptions o = nested(strategy);
          if (low) o.mixed_precision = {.param_dtype = kFloat16};
          FullyShardedDataParallel fsdp(m, o);
          NoGrad off;
          for (Tensor p : fsdp.parameters()) p.fill_(rank + 2);
          {
            const auto summoned = fsdp.summon_full_params({.writeback = writeback});
            for (Tensor p : m.parameters()) p.zero_();
          }
          const bool cut = strategy != ShardingStrategy::kNoShard;
          const float expected = cut && !writeback ? float(rank + 2) : 0.f;
          for (const Tensor& p : fsdp.parameters())
            for (float v : values(p)) EXPECT_EQ(v, expected) << name_of(strategy) << low;
        });
}

// A tensor put into a slot counts as a change; one of another shape is refused.
TEST(FsdpSummon, L_004_AnAssignedTensorIsWrittenBack) {
  run_ranks(2, [](int) {
    Nested m;
    FullyShardedDataParallel fsdp(m, nested());
    {
      const auto summoned = fsdp.summon_full_params();
      m.inner->weight.slot().tensor = full({3, 5}, 3.0);
    }
    for (auto& [name, p] : fsdp.named_parameters())
      for (float v : values(p)) EXPECT_EQ(v == 3, name == "inner.weight");
    expect_error(
        [&] {
          const auto summoned = fsdp.summon_full_params();
          m.inner->weight.slot().tensor = full({5, 3}, 3.0);
        },
        {"inner.weight", "[5, 3]", "[3, 5]"});
    EXPECT_TRUE(fsdp.runtime()->is_idle());
  });
}

TEST(FsdpSummon, L_004_AnExceptionWritesNothing) {
  run_ranks(2, [](int) {
    Nested m;
    FullyShardedDataParallel fsdp(m, nested());
    const auto before = values(fsdp.parameters()[0]);
    EXPECT_THROW(
        {
          const auto summoned = fsdp.summon_full_params();
          NoGrad off;
          for (Tensor p : m.parameters()) p.zero_();
          throw std::runtime_error("by the user");
        },
        std::runtime_error);
    EXPECT_EQ(values(fsdp.parameters()[0]), before);
  });
}

TEST(FsdpSummon, L_005_Rank0OnlyAndRecurse) {
  const auto expected = unwrapped();
  for (auto strategy : {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp})
    run_ranks(2, [&](int rank) {
      manual_seed(7);
      Nested m;
      FullyShardedDataParallel fsdp(m, nested(strategy));
      const auto shapes = [&] {
        return std::pair{m.outer->weight->sizes(), m.inner->weight->sizes()};
      };
      const auto pieces = shapes();
      {
        const auto summoned = fsdp.summon_full_params(
            {.writeback = false, .rank0_only = true, .offload_to_cpu = true});
        if (rank == 0) {
          for (auto& [name, p] : m.named_parameters()) EXPECT_EQ(values(p), expected.at(name));
        } else
          EXPECT_EQ(shapes(), pieces);
      }
      {
        const auto summoned = fsdp.summon_full_params({.recurse = false});
        EXPECT_EQ(shapes(), (std::pair{Dims{5, 5}, pieces.second}));
      }
      {
        const auto summoned = FsdpModule::of(*m.inner).summon_full_params();
        EXPECT_EQ(shapes(), (std::pair{pieces.first, Dims{3, 5}}));
      }
      EXPECT_EQ(shapes(), pieces);
      expect_error([&] { (void)fsdp.summon_full_params({.rank0_only = true}); },
                   {"rank0_only", "writeback"});
      expect_error([&] { FsdpModule::of(m.outer.operator*()); }, {"outer", "is no unit"});
    });
}

class Summoner : public nn::Module {
 public:
  Summoner() : layer(add<nn::Linear>("layer", 4, 4)) {}
  Tensor forward(const Tensor& x) {
    if (in_forward) in_forward();
    return layer(x);
  }
  nn::Child<nn::Linear> layer;
  std::function<void()> in_forward;
};

TEST(FsdpSummon, L_006_NotDuringForwardOrBackward) {
  run_ranks(2, [](int rank) {
    Summoner m;
    FullyShardedDataParallel fsdp(m, {.auto_wrap_policy = module_wrap_policy<nn::Linear>()});
    optim::SGD sgd(fsdp.parameters(), {.lr = 0.1});
    const Tensor x = random_input({2, 4}, rank, 0);
    m.in_forward = [&] { (void)fsdp.summon_full_params(); };
    expect_error([&] { fsdp(x); },
                 {"summon_full_params", "not possible during forward or backward"});
    m.in_forward = nullptr;
    const Tensor y = fsdp(x);
    autograd::register_hook(y, [&](const Tensor&) -> Tensor {
      (void)fsdp.summon_full_params();
      return {};
    });
    expect_error([&] { y.sum().backward(); },
                 {"summon_full_params", "not possible during forward or backward"});
    fsdp(x).sum().backward();
    sgd.step();
    sgd.zero_grad();
    {
      const auto summoned = fsdp.summon_full_params();
      expect_error([&] { fsdp(x); }, {"forward", "inside summon_full_params"});
      expect_error([&] { (void)fsdp.summon_full_params(); }, {"inside summon_full_params"});
      expect_error([&] { fsdp.apply([](nn::Module&) {}); }, {"apply", "inside summon_full_params"});
      expect_error([&] { m.layer->weight->sum().backward(); }, {"inside summon_full_params"});
    }
    fsdp(x).sum().backward();
    sgd.step();
  });
}

TEST(FsdpSummon, L_007_Gradients) {
  // By DDP, of the same inputs.
  std::map<std::string, std::vector<float>> expected;
  run_ranks(2, [&](int rank) {
    manual_seed(7);
    Nested m;
    DistributedDataParallel ddp(m);
    ddp(random_input({2, 5}, rank, 0)).sum().backward();
    if (rank == 0)
      for (auto& [name, p] : m.named_parameters()) expected[name] = values(p.grad());
  });
  for (auto strategy : kStrategies)
    for (bool writeback : {false, true})
      for (bool between : {false, true})
        run_ranks(2, [&](int rank) {
          manual_seed(7);
          Nested m;
          FullyShardedDataParallel fsdp(m, nested(strategy));
          const auto gradients = [&] {
            std::vector<std::vector<float>> all;
            for (const Tensor& p : fsdp.parameters())
              all.push_back(p.grad().defined() ? values(p.grad()) : std::vector<float>());
            return all;
          };
          {
            const auto summoned = fsdp.summon_full_params({.with_grads = true});
            for (const Tensor& p : m.parameters()) EXPECT_FALSE(p.grad().defined());
          }
          fsdp(random_input({2, 5}, rank, 0)).sum().backward();
          Tensor next;
          if (between) next = fsdp(random_input({2, 5}, rank, 1)).sum();
          const auto before = gradients();
          {
            const auto summoned =
                fsdp.summon_full_params({.writeback = writeback, .with_grads = true});
            for (auto& [name, p] : m.named_parameters()) {
              EXPECT_EQ(values(p.grad()), expected.at(name)) << name;
              NoGrad off;
              p.grad().mul_(2);
            }
          }
          auto wanted = before;
          const bool cut = strategy != ShardingStrategy::kNoShard;
          for (auto& g : wanted)
            for (float& v : g) v *= writeback || !cut ? 2 : 1;
          EXPECT_EQ(gradients(), wanted) << name_of(strategy) << writeback;
          if (between) next.backward();
        });
}

TEST(FsdpSummon, L_007_GradientsOnRank0AndSetInside) {
  run_ranks(2, [](int rank) {
    Nested m;
    FullyShardedDataParallel fsdp(m, nested());
    fsdp(random_input({2, 5}, rank, 0)).sum().backward();
    {
      const auto summoned =
          fsdp.summon_full_params({.writeback = false, .rank0_only = true, .with_grads = true});
      if (rank == 0) {
        EXPECT_EQ(m.outer->weight->grad().sizes(), (Dims{5, 5}));
      }
    }
    for (const Tensor& p : fsdp.parameters()) p.set_grad({});
    {
      const auto summoned = fsdp.summon_full_params({.with_grads = true});
      Tensor(m.inner->weight.get()).set_grad(full({3, 5}, 4.0));
    }
    for (auto& [name, p] : fsdp.named_parameters()) {
      EXPECT_EQ(p.grad().defined(), name == "inner.weight" && p.numel() > 0);
      if (p.grad().defined()) {
        for (float v : values(p.grad())) EXPECT_EQ(v, 4);
      }
    }
  });
}

class One : public nn::Module {
 public:
  One() : layer(add<nn::Linear>("layer", 1, 1, nn::LinearOptions{.bias = false})) {}
  Tensor forward(const Tensor& x) { return layer(x); }
  nn::Child<nn::Linear> layer;
};

TEST(FsdpSummon, L_008_PaddingStaysWhereItIs) {
  run_ranks(2, [](int rank) {
    One m;
    FullyShardedDataParallel fsdp(m, {});
    const Tensor piece = fsdp.units()[0]->groups()[0].piece;
    if (rank == 1) {
      EXPECT_EQ(fsdp.parameters()[0].numel(), 0);
      piece.data<float>()[0] = 17;  // padding
    }
    {
      const auto summoned = fsdp.summon_full_params();
      EXPECT_EQ(m.layer->weight->numel(), 1);
      NoGrad off;
      if (rank == 0) Tensor(m.layer->weight.get()).zero_();
    }
    if (rank == 0) {
      EXPECT_EQ(piece.data<float>()[0], 0);
    }
    if (rank == 1) {
      EXPECT_EQ(piece.data<float>()[0], 17);
    }
    {
      const auto summoned = fsdp.summon_full_params({.writeback = false});
      EXPECT_EQ(values(m.layer->weight), std::vector<float>{0});
    }
  });
}

TEST(FsdpSummon, L_009_NamesAndValues) {
  run_ranks(2, [](int) {
    manual_seed(7);
    Gpt plain, m;
    plain.materialize();
    FullyShardedDataParallel fsdp(m, {.auto_wrap_policy = module_wrap_policy<GptBlock>()});
    const auto summoned = fsdp.summon_full_params();
    for (const char* prefix : {"", "test_prefix"})
      for (bool recurse : {false, true}) {
        const auto a = m.named_parameters(prefix, recurse);
        const auto b = plain.named_parameters(prefix, recurse);
        ASSERT_EQ(a.size(), b.size());
        for (size_t i = 0; i < a.size(); ++i) {
          EXPECT_EQ(a[i].first, b[i].first);
          EXPECT_EQ(values(a[i].second), values(b[i].second)) << a[i].first;
        }
        EXPECT_EQ(m.named_buffers(prefix, recurse).size(),
                  plain.named_buffers(prefix, recurse).size());
      }
  });
}

TEST(FsdpSummon, L_012_Apply) {
  run_ranks(2, [](int rank) {
    Gpt m({.tied = true});
    FullyShardedDataParallel fsdp(m, {.auto_wrap_policy = module_wrap_policy<GptBlock>()});
    fsdp.apply([](nn::Module& module) {
      NoGrad off;
      if (auto* l = dynamic_cast<nn::Linear*>(&module)) Tensor(l->weight.get()).fill_(1.0);
    });
    fsdp.for_each_full_parameter([&](const std::string& name, const Tensor& t) {
      const bool linear = name.ends_with("up.weight") || name.ends_with("down.weight") ||
                          name == "output.weight" || name == "tokens.weight";
      if (!linear) return;
      for (float v : values(t)) EXPECT_EQ(v, 1) << name << rank;
    });
  });
}

TEST(FsdpSummon, M_011_MasterDtype) {
  const auto expected = unwrapped();
  run_ranks(2, [&](int rank) {
    manual_seed(7);
    Nested m;
    FsdpOptions o = nested();
    o.mixed_precision = {.param_dtype = kFloat16};
    FullyShardedDataParallel fsdp(m, o);
    fsdp(random_input({2, 5}, rank, 0)).sum();
    const auto summoned = fsdp.summon_full_params();
    for (auto& [name, p] : m.named_parameters()) {
      EXPECT_EQ(p.dtype(), kFloat32);
      EXPECT_EQ(values(p), expected.at(name));
    }
  });
  run_ranks(2, [&](int rank) {
    Nested m;
    m.to(kFloat64);
    FsdpOptions o = nested();
    o.mixed_precision = {.param_dtype = kFloat16};
    FullyShardedDataParallel fsdp(m, o);
    optim::Adam adam(fsdp.named_parameters(), {.lr = 1e-3});
    fsdp(random_input({2, 5}, rank, 0)).sum().backward();
    adam.step();
    for (const Tensor& p : fsdp.parameters()) {
      EXPECT_EQ(p.dtype(), kFloat64);
      if (p.numel()) {
        EXPECT_EQ(p.grad().dtype(), kFloat64);
      }
    }
    for (auto& [name, t] : adam.state_dict())
      if (name.find("exp_avg") != std::string::npos) {
        EXPECT_EQ(t.dtype(), kFloat64);
      }
    const auto summoned = fsdp.summon_full_params();
    for (const Tensor& p : m.parameters()) EXPECT_EQ(p.dtype(), kFloat64);
  });
}

}  // namespace
}  // namespace sherd::scenario
