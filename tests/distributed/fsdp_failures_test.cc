// One rank, or one step of many, goes wrong: the others hear of it, and what was there before stays
// usable.
#include <chrono>

#include "autograd/grad_mode.h"
#include "core/generator.h"
#include "tests/distributed/scenario.h"

namespace sherd::scenario {
namespace {

class Two : public nn::Module {
 public:
  explicit Two(int64_t wide = 4)
      : a(add<nn::Linear>("a", 4, wide)), b(add<nn::Linear>("b", wide, 4)) {}
  Tensor forward(const Tensor& x) {
    Tensor y = b(a(x));
    if (after) after();
    return y;
  }
  nn::Child<nn::Linear> a, b;
  std::function<void()> after;
};
FsdpOptions by_linear(ShardingStrategy s = ShardingStrategy::kFullShard) {
  return {.auto_wrap_policy = module_wrap_policy<nn::Linear>(), .sharding_strategy = s};
}

// What only one rank does wrong is an error on all, long before the deadline.
void expect_errors_everywhere(const std::function<void()>& f,
                              const std::vector<std::string>& texts) {
  const auto start = std::chrono::steady_clock::now();
  expect_error(f, texts);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

// As `if rank == 0: torch.save(...)` is in PyTorch.
TEST(FsdpFailures, ACallThatOneRankAloneMakesIsNamed) {
  run_ranks(2, [](int rank) {
    Two m;
    FullyShardedDataParallel fsdp(m, by_linear());
    const Tensor x = random_input({2, 4}, rank, 0);
    expect_errors_everywhere(
        [&] {
          if (rank == 0) fsdp.full_state_dict();
          fsdp(x);
        },
        {"'full_state_dict, which all ranks must call'"});
  });
}

TEST(FsdpFailures, EvaluationOnOneRankAloneIsExplained) {
  run_ranks(2, [](int rank) {
    Two m;
    FullyShardedDataParallel fsdp(m, by_linear());
    const Tensor x = random_input({2, 4}, rank, 0);
    expect_errors_everywhere([&] { rank == 0 ? void(fsdp(x)) : void(dist::barrier()); },
                             {"'gather unit ", "All ranks must call a sharded model, also to"});
  });
}

TEST(FsdpFailures, AStateThatIsWrongOnOneRankIsLoadedByNone) {
  run_ranks(2, [](int rank) {
    Two m;
    FullyShardedDataParallel fsdp(m, by_linear());
    nn::StateDict state;
    for (const char* layer : {"a", "b"}) {
      state.set(concat(layer, ".weight"), ones({4, 4}));
      state.set(concat(layer, ".bias"), ones({4}));
    }
    std::vector<std::vector<float>> before;
    for (auto& p : fsdp.parameters()) before.push_back(floats(p));
    nn::StateDict wrong = state;
    if (rank == 1) wrong.set("b.weight", ones({4, 5}));
    expect_errors_everywhere([&] { fsdp.load_full_state_dict(wrong); },
                             {"rank 1", "b.weight", "[4, 5]"});
    for (size_t i = 0; i < before.size(); ++i) EXPECT_EQ(floats(fsdp.parameters()[i]), before[i]);
    fsdp.load_full_state_dict(state);
    for (auto& p : fsdp.parameters())
      for (float v : floats(p)) EXPECT_EQ(v, 1);
  });
}

TEST(FsdpFailures, AllStepsAreDoneThoughOneThrows) {
  run_ranks(2, [](int rank) {
    Two m;
    FullyShardedDataParallel fsdp(m, by_linear(ShardingStrategy::kShardGradOp));
    const auto gathered = [&] {
      int n = 0;
      for (auto& u : fsdp.units())
        for (auto& g : u->groups()) n += g.full.storage()->has_bytes();
      return n;
    };
    const Tensor x = random_input({2, 4}, rank, 0);
    int before = 0;
    m.after = [&] {
      before = gathered();
      NoGrad off;
      Tensor(m.a->weight.get()).mul_(2);  // which the unit says when it is released
      fail("by the user");
    };
    expect_error([&] { fsdp(x); }, {"by the user"});
    EXPECT_EQ(before, 2);
    EXPECT_EQ(gathered(), 0) << "released in spite of the other unit's error";
    m.after = nullptr;
    fsdp(x).sum().backward();
  });
}

TEST(FsdpFailures, AWrapThatFailsIsSaidAndLeavesInnerOnes) {
  run_ranks(2, [](int rank) {
    Two m(rank == 0 ? 4 : 5);
    expect_errors_everywhere([&] { FsdpModule(m, by_linear()); }, {"ranks hold different models"});
    // Cut already: no crash, no silent second cut.
    expect_error([&] { nn::call(m, random_input({2, 4}, rank, 0)); }, {"a.weight"});
    expect_error([&] { FsdpModule(m, by_linear()); }, {"was cut by a wrapping that failed"});

    // A unit that was wrapped before goes on by itself.
    class Outer : public nn::Module {
     public:
      explicit Outer(int64_t wide)
          : inner(add<nn::Linear>("inner", 4, 4)), other(add<nn::Linear>("other", 4, wide)) {}
      Tensor forward(const Tensor& x) { return other(inner(x)); }
      nn::Child<nn::Linear> inner, other;
    } outer(4 + rank);
    FsdpModule inner(*outer.inner, {});
    expect_errors_everywhere([&] { FsdpModule(outer, {}); }, {"ranks hold different models"});
    ASSERT_EQ(inner.units().size(), 1u);
    outer.inner(random_input({2, 4}, rank, 0)).sum().backward();
    for (const Tensor& p : inner.parameters()) EXPECT_EQ(p.grad().defined(), p.numel() > 0);
  });
}

TEST(FsdpFailures, SummonedShapesOfOneRankAreRefusedOnAll) {
  run_ranks(2, [](int rank) {
    Two m;
    FullyShardedDataParallel fsdp(m, by_linear());
    const auto values = [&] {
      std::vector<float> all;
      for (const Tensor& p : fsdp.parameters())
        all.insert(all.end(), p.data<float>(), p.data<float>() + p.numel());
      return all;
    };
    const auto before = values();
    expect_errors_everywhere(
        [&] {
          const auto summoned = fsdp.summon_full_params();
          NoGrad off;
          Tensor(m.a->weight.get()).zero_();
          if (rank == 1) m.b->weight.slot().tensor = full({3, 3}, 3.0);
        },
        {"rank 1", "b.weight", "[3, 3]"});
    EXPECT_EQ(values(), before) << "nothing is written where something does not fit";
    expect_errors_everywhere(
        [&] {
          const auto summoned = fsdp.summon_full_params({.with_grads = true});
          if (rank == 0) autograd::make_meta(m.a->bias).grad = full({3}, 3.0);
        },
        {"rank 0", "gradient of a.bias", "[3]"});
    // The beginning, too.
    Tensor kept = m.a->weight.slot().tensor;
    if (rank == 1) m.a->weight.slot().tensor = full({7}, 3.0);
    expect_errors_everywhere([&] { (void)fsdp.summon_full_params(); },
                             {"rank 1", "a.weight", "[7]"});
    m.a->weight.slot().tensor = kept;
    EXPECT_TRUE(fsdp.runtime()->is_idle());
    fsdp(random_input({2, 4}, rank, 0)).sum().backward();
  });
}

// b's gradient is pending on rank 0 alone.
class Branch : public Two {
 public:
  Tensor forward(const Tensor& x) {
    Tensor y = a(x), z = b(y);
    return detached ? y + z.detach() : y + z;
  }
  bool detached = false;
};

TEST(FsdpFailures, SummonedGradientsPendingOnSomeRanks) {
  std::vector<std::map<std::string, std::vector<float>>> results;
  for (bool summons : {false, true})
    run_ranks(2, [&](int rank) {
      manual_seed(3);
      Branch m;
      FullyShardedDataParallel fsdp(m, by_linear(ShardingStrategy::kShardGradOp));
      const auto backward = [&](int step) {
        fsdp(random_input({2, 4}, rank, step)).sum().backward();
      };
      backward(0);  // reduced gradients that the pending ones stand before
      {
        const auto off = fsdp.no_sync();
        m.detached = rank == 1;
        backward(1);
        m.detached = false;
      }
      const Tensor pending = fsdp.module().b->weight->grad();
      if (summons) {
        for (bool writeback : {false, true}) {
          const auto summoned =
              fsdp.summon_full_params({.writeback = writeback, .with_grads = true});
          const Tensor shown = m.b->weight->grad();
          EXPECT_EQ(shown.defined(), rank == 0);
          if (rank == 0) {
            EXPECT_TRUE(shown.is_same(pending));
          }
          EXPECT_EQ(m.a->weight->grad().sizes(), (Dims{4, 4}));
        }
        if (rank == 0) {
          EXPECT_TRUE(m.b->weight->grad().is_same(pending));
        }
      }
      backward(2);
      std::map<std::string, std::vector<float>> all;
      {
        const auto summoned = fsdp.summon_full_params({.writeback = false, .with_grads = true});
        for (auto& [name, p] : m.named_parameters()) {
          const Tensor g = contiguous_raw(p.grad());
          all[name] = {g.data<float>(), g.data<float>() + g.numel()};
        }
      }
      if (rank == 0) results.push_back(all);
    });
  ASSERT_EQ(results.size(), 2u);
  EXPECT_EQ(results[0], results[1]);
}

TEST(FsdpFailures, WhatTheCallerThrowsIsThrownOnAllRanks) {
  run_ranks(2, [](int rank) {
    Two m;
    FullyShardedDataParallel fsdp(m, by_linear());
    int calls = 0;
    expect_errors_everywhere(
        [&] {
          fsdp.for_each_full_parameter([&](const std::string&, const Tensor&) {
            ++calls;
            fail("the disk is full");
          });
        },
        {"rank 0: the disk is full"});
    EXPECT_EQ(calls, rank == 0);
    expect_errors_everywhere(
        [&] {
          fsdp.for_each_full(
              [&](const std::string& name, const Tensor& p) -> Tensor {
                if (rank == 1 && name == "b.weight") fail("no moment of ", name);
                return p.detach();
              },
              [](const std::string&, const Tensor&) {});
        },
        {"rank 1: no moment of b.weight"});
    fsdp(random_input({2, 4}, rank, 0)).sum().backward();
  });
}

// Hooks that wait for each other run on ranks without elements too.
TEST(FsdpFailures, PostAccumulateHooksRunOnAllRanks) {
  run_ranks(3, [](int rank) {
    Two m;  // a.bias: 4 elements over 3 ranks
    FullyShardedDataParallel fsdp(m);
    int calls = 0;
    int64_t elements = 0;
    for (const Tensor& p : fsdp.parameters())
      autograd::register_post_accumulate_grad_hook(p, [&, n = p.numel()](const Tensor& g) {
        ++calls;
        elements += g.numel();
        EXPECT_EQ(g.numel(), n);
        Tensor sum = full({1}, double(g.numel()));
        dist::all_reduce(sum);
      });
    fsdp(random_input({2, 4}, rank, 0)).sum().backward();
    EXPECT_EQ(calls, 4);
    Tensor sum = full({1}, double(elements));
    dist::all_reduce(sum);
    EXPECT_EQ(sum.item<float>(), 40);
  });
}

// The gradients are there all the same, and the next backward finds nothing of this one.
TEST(FsdpFailures, APostAccumulateHookThatThrows) {
  for (int ranks : {1, 2})
    for (auto k : kStrategies)
      run_ranks(ranks, [=](int rank) {
        Two m;
        FullyShardedDataParallel fsdp(m, by_linear(k));
        const Tensor x = random_input({2, 4}, rank, 0);
        const auto gradients = [&] {
          std::vector<float> all;
          for (const Tensor& p : fsdp.parameters()) {
            const Tensor g = p.grad();
            if (p.numel()) all.insert(all.end(), g.data<float>(), g.data<float>() + g.numel());
          }
          return all;
        };
        fsdp(x).sum().backward();
        const auto expected = gradients();
        bool throws = true;
        for (const Tensor& p : fsdp.parameters())
          autograd::register_post_accumulate_grad_hook(p, [&](const Tensor&) {
            if (throws) fail("not this gradient");
          });
        for (int i = 0; i < 2; ++i) {
          m.zero_grad();
          expect_error([&] { fsdp(x).sum().backward(); }, {"not this gradient"});
        }
        throws = false;
        m.zero_grad();
        fsdp(x).sum().backward();
        EXPECT_EQ(gradients(), expected);
      });
}

TEST(FsdpFailures, APostAccumulateHookMayAddAnother) {
  run_ranks(2, [](int rank) {
    Two m;
    FullyShardedDataParallel fsdp(m);
    int first = 0, second = 0;
    for (const Tensor& p : fsdp.parameters())
      autograd::register_post_accumulate_grad_hook(
          p, [&, meta = autograd::meta_of(p)](const Tensor&) {
            ++first;
            for (int i = 0; i < 8; ++i)
              meta->post_hooks.push_back([&](const Tensor&) { ++second; });
            ++first;
          });
    fsdp(random_input({2, 4}, rank, 0)).sum().backward();
    EXPECT_EQ(first, 8);
    EXPECT_EQ(second, 0) << "from the next backward on";
    fsdp(random_input({2, 4}, rank, 0)).sum().backward();
    EXPECT_EQ(second, 32);
  });
}

}  // namespace
}  // namespace sherd::scenario
