// DDP's communication hooks.
#include <gtest/gtest.h>

#include <cmath>

#include "core/generator.h"
#include "distributed/comm_hooks.h"
#include "tests/distributed/scenario.h"

namespace sherd::scenario {
namespace {

using dist::CommBucket;
using dist::Future;

constexpr double kMiB = 1 << 20;
DdpOptions small_buckets() { return {.bucket_cap_mb = 256 / kMiB, .first_bucket_bytes = 64}; }

// Gradients after `steps` steps of accumulation without clearing, of this rank.
std::vector<float> gradients_after(int steps, int rank, dist::CommHook hook) {
  manual_seed(7);
  Mlp m(5);
  DistributedDataParallel ddp(m, small_buckets());
  if (hook) ddp.reducer()->register_comm_hook(hook);
  for (int step = 0; step < steps; ++step) ddp(random_input({3, 5}, rank, step)).sum().backward();
  std::vector<float> all;
  for (const Tensor& p : m.parameters())
    for (float v : floats(p.grad())) all.push_back(v);
  return all;
}

TEST(CommHook, D_010_ItsResultIsTheGradient) {
  run_ranks(2, [](int rank) {
    Mlp m(5);
    DistributedDataParallel ddp(m, small_buckets());
    std::vector<CommBucket> seen;
    ddp.register_comm_hook(&seen, [](std::vector<CommBucket>* state, CommBucket& bucket) {
      state->push_back(bucket);
      return Future(full({bucket.buffer.numel()}, 2));
    });
    for (int step = 0; step < 3; ++step) {
      m.zero_grad();
      const int n = ddp.num_buckets();  // others after the first step
      EXPECT_GT(n, 1);
      seen.clear();
      ddp(random_input({3, 5}, rank, step)).sum().backward();
      for (auto& [name, p] : m.named_parameters())
        EXPECT_EQ(floats(p.grad()), std::vector<float>(size_t(p.numel()), 2)) << name;
      ASSERT_EQ(int(seen.size()), n);
      for (int i = 0; i < n; ++i) {
        EXPECT_EQ(seen[size_t(i)].index, i);
        EXPECT_EQ(seen[size_t(i)].is_last, i == n - 1);
      }
    }
  });
}

TEST(CommHook, D_010_ABucketIsTheLocalGradients) {
  run_ranks(2, [](int rank) {
    manual_seed(7);
    Mlp m(5), local(5);
    local.materialize();
    const Tensor x = random_input({3, 5}, rank, 0);
    nn::call(local, x).sum().backward();
    const auto expected = local.named_parameters();
    DistributedDataParallel ddp(m, small_buckets());
    size_t seen = 0;
    ddp.register_comm_hook(nullptr, [&](std::nullptr_t, CommBucket& bucket) {
      EXPECT_EQ(bucket.gradients.size(), bucket.parameters.size());
      int64_t non_zero = 0, of_gradients = 0;
      for (float v : floats(bucket.buffer)) non_zero += v != 0;
      for (size_t i = 0; i < bucket.gradients.size(); ++i) {
        ++seen;
        for (float v : floats(bucket.gradients[i])) of_gradients += v != 0;
        EXPECT_EQ(bucket.gradients[i].sizes(), bucket.parameters[i].sizes());
        EXPECT_EQ(bucket.gradients[i].storage().get(), bucket.buffer.storage().get());
        size_t k = 0;
        while (!m.parameters()[k].is_same(bucket.parameters[i])) ++k;
        EXPECT_EQ(floats(bucket.gradients[i]), floats(expected[k].second.grad()));
      }
      EXPECT_EQ(non_zero, of_gradients);  // nothing but zeros between and behind parameters
      return Future(bucket.buffer);
    });
    ddp(x).sum().backward();
    EXPECT_EQ(seen, m.parameters().size());
  });
}

TEST(CommHook, D_010_RefusedHooks) {
  run_ranks(2, [](int rank) {
    const Tensor x = random_input({3, 5}, rank, 0);
    {
      Mlp m(5);
      DistributedDataParallel ddp(m);
      ddp.register_comm_hook(nullptr, dist::allreduce_hook);
      expect_error([&] { ddp.register_comm_hook(nullptr, dist::bf16_compress_hook); },
                   {"register_comm_hook", "there is a hook already"});
      expect_error([&] { ddp.reducer()->register_comm_hook(nullptr); }, {"empty"});
    }
    const auto refused = [&](auto hook, const std::vector<std::string>& texts) {
      Mlp m(5);
      DistributedDataParallel ddp(m, small_buckets());
      ddp.register_comm_hook(nullptr, [&](std::nullptr_t, CommBucket& b) { return hook(b); });
      for (int step = 0; step < 2; ++step)  // and it leaves no rest
        expect_error([&] { ddp(x).sum().backward(); }, texts);
      for (auto& [name, p] : m.named_parameters()) EXPECT_FALSE(p.grad().defined()) << name;
    };
    refused([](CommBucket& b) { return Future(zeros({b.buffer.numel() - 1})); },
            {"ddp bucket 0", "communication hook returned", "elements of float32", "expected"});
    refused([](CommBucket& b) { return Future(to_raw(b.buffer, kFloat64)); },
            {"ddp bucket 0", "elements of float64", "expected", "float32"});
    refused([](CommBucket&) { return Future(); }, {"ddp bucket 0", "nothing"});
    refused([](CommBucket&) -> Future { fail("[my_hook] no"); }, {"[my_hook] no"});
    refused(
        [](CommBucket& b) {
          return Future(b.buffer).then([](const Tensor&) -> Tensor { fail("[my_hook] later"); });
        },
        {"[my_hook] later"});
  });
}

// A bucket that backward does not reach is exchanged at its end; a hook that fails there leaves no
// rest either.
TEST(CommHook, D_010_RefusesBucketsThatBackwardDoesNotReach) {
  run_ranks(2, [](int rank) {
    struct Two : nn::Module {
      Two() : unused(add<nn::Linear>("unused", 3, 3)), used(add<nn::Linear>("used", 3, 3)) {}
      Tensor forward(const Tensor& x) { return used(x); }
      nn::Child<nn::Linear> unused, used;
    };
    Two m;
    DdpOptions options = small_buckets();
    options.find_unused_parameters = true;
    DistributedDataParallel ddp(m, options);
    bool fails = true;
    ddp.register_comm_hook(nullptr, [&](std::nullptr_t, CommBucket& b) {
      if (fails && b.is_last) fail("[my_hook] no");
      return dist::allreduce_hook(nullptr, b);
    });
    const Tensor x = full({2, 3}, rank + 1);
    expect_error([&] { ddp(x).sum().backward(); }, {"[my_hook] no"});
    fails = false;
    ddp(x).sum().backward();
    EXPECT_EQ(floats(m.used->weight->grad()), std::vector<float>(9, 3));  // (2 + 4) / 2
  });
}

TEST(CommHook, FuturesRunWhatIsChainedOnce) {
  int calls = 0;
  const Future f = Future(ones({2})).then([&](const Tensor& x) {
    ++calls;
    return x + x;
  });
  EXPECT_EQ(floats(f.wait()), floats(f.wait()));
  EXPECT_EQ(calls, 1);
  EXPECT_FALSE(Future().wait().defined());
}

TEST(CommHook, D_010_AllreduceHookChangesNoBit) {
  for (int world : {1, 2, 3})
    run_ranks(world, [](int rank) {
      const auto with = [](const dist::Group& group) {
        return [group](CommBucket& b) { return dist::allreduce_hook(group, b); };
      };
      const auto plain = gradients_after(3, rank, nullptr);
      EXPECT_EQ(gradients_after(3, rank, with(nullptr)), plain);
      EXPECT_EQ(gradients_after(3, rank, with(dist::default_group())), plain);
    });
}

TEST(CommHook, D_010_CompressedGradientsAreClose) {
  run_ranks(3, [](int rank) {
    const auto plain = gradients_after(1, rank, nullptr);
    const auto compare = [&](Future (*hook)(const dist::Group&, CommBucket&), double rtol) {
      const auto got = gradients_after(1, rank, [hook](CommBucket& b) { return hook(nullptr, b); });
      ASSERT_EQ(got.size(), plain.size());
      double largest = 0;
      for (float v : plain) largest = std::max(largest, std::abs(double(v)));
      bool rounded = false;
      for (size_t i = 0; i < got.size(); ++i) {
        // A sum of three rounded numbers, each at most as large as the largest gradient times W.
        EXPECT_NEAR(got[i], plain[i], rtol * 3 * largest) << i;
        rounded = rounded || got[i] != plain[i];
      }
      EXPECT_TRUE(rounded);
    };
    compare(dist::bf16_compress_hook, 1.0 / 256);
    compare(dist::fp16_compress_hook, 1.0 / 2048);
  });
}

// Half as many bytes are given to the collectives.
TEST(CommHook, CompressionHalvesWhatIsSent) {
  run_ranks(2, [](int rank) {
    const auto bytes = [&](dist::CommHook hook) {
      const auto sent = [] { return dist::default_group()->counts().all_reduce.bytes; };
      const auto before = sent();
      gradients_after(1, rank, std::move(hook));
      return sent() - before;
    };
    const auto full = bytes([](CommBucket&b) { return dist::allreduce_hook(nullptr, b); }),
               half = bytes([](CommBucket&b) { return dist::bf16_compress_hook(nullptr, b); });
    EXPECT_LT(half, full * 0.55);
    EXPECT_GT(half, full * 0.45);
  });
}

// A parameter that only one rank uses gets what the hook makes of its zeros elsewhere; one that
// nobody uses gets nothing.
TEST(CommHook, UnusedParametersStayAsTheyAre) {
  class Two : public nn::Module {
   public:
    Two() : used(add<nn::Linear>("used", 3, 3)), unused(add<nn::Linear>("unused", 3, 3)) {}
    Tensor forward(const Tensor& x, bool both) { return both ? unused(used(x)) : used(x); }
    nn::Child<nn::Linear> used, unused;
  };
  run_ranks(2, [](int rank) {
    for (const bool somewhere : {false, true}) {
      Two m;
      DistributedDataParallel ddp(m, {.find_unused_parameters = true});
      ddp.register_comm_hook(nullptr, dist::bf16_compress_hook);
      ddp(random_input({2, 3}, rank, 0), somewhere && rank == 1).sum().backward();
      EXPECT_TRUE(m.used->weight->grad().defined());
      EXPECT_EQ(m.unused->weight->grad().defined(), somewhere);
    }
  });
}

// ---- FSDP
Scenario small_gpt(int steps) {
  Scenario s{.make = [] {
    return instance(std::make_shared<Gpt>(GptOptions{.layers = 2}), [](Gpt& m, int rank, int step) {
      return nn::call(m, random_ids({2, 6}, 8, rank, step)).sum();
    });
  }};
  s.steps = steps;
  return s;
}
Way hooked(Way way, Future (*hook)(const dist::Group&, CommBucket&)) {
  way.wrap = [hook](Trainee& t) { t.fsdp->register_comm_hook(nullptr, hook); };
  return way;
}
std::vector<Way> sharded_ways() {
  FsdpOptions o;
  o.auto_wrap_policy = module_wrap_policy<GptBlock>();
  std::vector<Way> ways;
  for (auto strategy : kStrategies) {
    o.sharding_strategy = strategy;
    ways.push_back(fsdp_way(o));
  }
  ways.push_back(hybrid_way(o, 2));
  return ways;
}

TEST(CommHook, D_010_AllreduceHookChangesNoBitOfShardedModels) {
  const Result plain = train(small_gpt(3), sharded_ways()[0], 4);
  for (const Way& way : sharded_ways())
    expect_same_bits(train(small_gpt(3), hooked(way, dist::allreduce_hook), 4), plain);
}

TEST(CommHook, D_010_CompressedGradientsOfShardedModels) {
  const Result plain = train(small_gpt(1), sharded_ways()[0], 4);
  double largest = 0;
  for (auto& [name, values] : plain.gradients)
    for (float v : values) largest = std::max(largest, std::abs(double(v)));
  for (const Way& way : sharded_ways()) {
    const Result half = train(small_gpt(1), hooked(way, dist::bf16_compress_hook), 4);
    expect_close(half.gradients, plain.gradients, 0, 4 * largest / 256);
    EXPECT_NE(half.gradients, plain.gradients);
  }
}

TEST(CommHook, D_010_RefusedHooksOfShardedModels) {
  run_ranks(2, [](int rank) {
    const Tensor x = random_input({3, 5}, rank, 0);
    Mlp m(5);
    FullyShardedDataParallel fsdp(m, {.auto_wrap_policy = module_wrap_policy<nn::Linear>()});
    std::vector<int> units;
    fsdp.register_comm_hook(&units, [](std::vector<int>* seen, CommBucket& b) {
      seen->push_back(b.index);
      EXPECT_EQ(2 * b.output.numel(), b.buffer.numel());
      EXPECT_EQ(b.gradients.size(), 2u);
      EXPECT_EQ(b.parameters.size(), 2u);
      return Future(full({b.output.numel()}, 2));
    });
    expect_error([&] { FsdpModule::of(*m.up).register_comm_hook(nullptr, dist::allreduce_hook); },
                 {"register_comm_hook", "unit up has a hook already"});
    fsdp(x).sum().backward();
    EXPECT_EQ(units, (std::vector<int>{1, 0}));
    for (const Tensor& p : fsdp.parameters()) {
      if (p.numel()) {
        EXPECT_EQ(floats(p.grad()), std::vector<float>(size_t(p.numel()), 2));
      }
    }
    Mlp other(5);
    FullyShardedDataParallel whole(other);
    whole.register_comm_hook(nullptr, [](std::nullptr_t, CommBucket& b) {
      return Future(b.buffer);  // not this rank's part
    });
    expect_error([&] { whole(x).sum().backward(); },
                 {"communication hook returned", "expected", "output"});
    Mlp third(5);
    FullyShardedDataParallel given(third);
    given.register_comm_hook(dist::default_group(), dist::allreduce_hook);
    expect_error([&] { given(x).sum().backward(); }, {"comm_hook", "give null"});
  });
}

}  // namespace
}  // namespace sherd::scenario
