// Hybrid sharding: rows H-001 to H-006 and H-008 of the scenarios, T-03 and T-04 of the traps.
#include <cmath>
#include <set>

#include "autograd/grad_mode.h"
#include "core/generator.h"
#include "distributed/nodes.h"
#include "tests/distributed/scenario.h"

namespace sherd::scenario {
namespace {

// LayerNorm and Mlps of odd and even widths, so that pieces are uneven.
class Widths : public nn::Module {
 public:
  Widths()
      : norm(add<nn::LayerNorm>("norm", 3)),
        first(add<Mlp>("first", 3)),
        widen(add<nn::Linear>("widen", 3, 17)),
        second(add<Mlp>("second", 17)),
        narrow(add<nn::Linear>("narrow", 17, 16)),
        third(add<Mlp>("third", 16)) {}
  Tensor forward(const Tensor& x) {
    Tensor h = first(norm(x));
    h = second(widen(h));
    return third(narrow(h));
  }
  nn::Child<nn::LayerNorm> norm;
  nn::Child<Mlp> first;
  nn::Child<nn::Linear> widen;
  nn::Child<Mlp> second;
  nn::Child<nn::Linear> narrow;
  nn::Child<Mlp> third;
};
Scenario widths(int micro_batches = 1) {
  Scenario s{.make = [] {
    return instance(std::make_shared<Widths>(), [](Widths& m, int rank, int step) {
      return nn::call(m, random_input({2, 3}, rank, step)).sum();
    });
  }};
  s.steps = 5;
  s.step = [micro_batches](Trainee& t, int step) {
    t.optimizers[0]->zero_grad(step % 2 == 0);
    for (int i = 0; i < micro_batches; ++i) t.backward(step * micro_batches + i);
    t.optimizers[0]->step();
  };
  return s;
}
FsdpOptions mlp_units() { return {.auto_wrap_policy = module_wrap_policy<Mlp>()}; }

Scenario gpt_scenario(const GptOptions& o) {
  Scenario s{.make = [=] {
    return instance(std::make_shared<Gpt>(o), [=](Gpt& m, int rank, int step) {
      const Tensor ids = random_ids({2, 9}, o.vocab, rank, step);
      const Tensor logits = nn::call(m, ids.narrow(1, 0, 8));
      return F::cross_entropy(logits.view({-1, o.vocab}), ids.narrow(1, 1, 8).reshape({-1}));
    });
  }};
  s.steps = 3;
  return s;
}

TEST(FsdpHybrid, H_001_MicroBatchesEqualDdp) {
  const Scenario s = widths(3);
  const Result ddp = train(s, ddp_way(), 4);
  for (auto k : kHybridStrategies)
    expect_same_bits(train(s, hybrid_way(mlp_units(), 2, k), 4), ddp);
  expect_close(ddp, train(s, one_process(), 4), 1e-4, 1e-4);
}

TEST(FsdpHybrid, H_001_NoSyncThenSync) {
  Scenario s = widths();
  s.step = [](Trainee& t, int step) {
    t.optimizers[0]->zero_grad(step % 2 == 0);
    {
      const auto off = t.no_sync();
      t.backward(2 * step);
    }
    t.backward(2 * step + 1);
    t.optimizers[0]->step();
  };
  const Result ddp = train(s, ddp_way(), 4);
  for (auto k : kHybridStrategies)
    expect_same_bits(train(s, hybrid_way(mlp_units(), 2, k), 4), ddp);
}

TEST(FsdpHybrid, H_002_TransformerEqualsFullShard) {
  for (bool checkpointed : {false, true}) {
    const Scenario s = gpt_scenario({.tied = true, .checkpointed = checkpointed});
    const FsdpOptions o{.auto_wrap_policy = module_wrap_policy<GptBlock>()};
    for (int world : {4, 8}) {
      const Result full = train(s, fsdp_way(o), world);
      for (auto k : kHybridStrategies) {
        expect_same_bits(train(s, hybrid_way(o, 2, k), world), full);
        if (world == 8) expect_same_bits(train(s, hybrid_way(o, 4, k), world), full);
      }
    }
  }
}

// Three ranks that shard: another tree of sums than that of six in a row, so only near.
TEST(FsdpHybrid, H_002_ShardGroupOfThree) {
  const Scenario s = widths();
  expect_close(train(s, hybrid_way(mlp_units(), 3), 6), train(s, ddp_way(), 6), 1e-4, 1e-4);
}

TEST(FsdpHybrid, H_002_LowPrecisionEqualsFullShard) {
  FsdpOptions o = mlp_units();
  o.mixed_precision = {.param_dtype = kBFloat16, .reduce_dtype = kFloat32};
  const Scenario s = widths();
  const Result full = train(s, fsdp_way(o), 4);
  for (auto k : kHybridStrategies) expect_same_bits(train(s, hybrid_way(o, 2, k), 4), full);
}

TEST(FsdpHybrid, T_03_GroupsOfOne) {
  const Scenario s = widths();
  const Result full = train(s, fsdp_way(mlp_units()), 4);
  for (auto k : kHybridStrategies)
    for (int shard : {1, 4}) expect_same_bits(train(s, hybrid_way(mlp_units(), shard, k), 4), full);
}

TEST(FsdpHybrid, H_003_OneOfEachAUnit) {
  run_ranks(4, [](int rank) {
    for (bool all : {true, false}) {
      Gpt m;
      const auto mesh = hybrid_mesh(2);
      FsdpOptions o{.auto_wrap_policy = module_wrap_policy<GptBlock>(),
                    .sharding_strategy = ShardingStrategy::kHybridShard,
                    .device_mesh = mesh};
      if (!all)
        o.unit_options = [](nn::Module& unit, FsdpOptions& options) {
          if (!dynamic_cast<GptBlock*>(&unit))
            options.sharding_strategy = ShardingStrategy::kFullShard;
        };
      FullyShardedDataParallel fsdp(m, o);
      ASSERT_EQ(fsdp.units().size(), 4u);
      const dist::Group world = dist::default_group(), shard = mesh.get_group("shard"),
                        replicate = mesh.get_group("replicate");
      for (int u = 0; u < 4; ++u) {
        const bool hybrid = all || u < 3;
        EXPECT_EQ(fsdp.units()[u]->options().shard, hybrid ? shard : world);
        EXPECT_EQ(fsdp.units()[u]->options().replicate, hybrid ? replicate : nullptr);
      }
      const auto before = std::array{world->counts(), shard->counts(), replicate->counts()};
      fsdp(random_ids({2, 8}, 8, rank, 0)).sum().backward();
      const auto after = std::array{world->counts(), shard->counts(), replicate->counts()};
      auto calls = [&](int g, auto kind) {
        return (after[g].*kind).calls - (before[g].*kind).calls;
      };
      using Counts = dist::CollectiveCounts;
      EXPECT_EQ(calls(1, &Counts::reduce_scatter), all ? 4 : 3);
      EXPECT_EQ(calls(0, &Counts::reduce_scatter), all ? 0 : 1);
      EXPECT_EQ(calls(2, &Counts::all_reduce), all ? 4 : 3);
      EXPECT_EQ(calls(0, &Counts::all_reduce), 0);
      EXPECT_EQ(calls(1, &Counts::all_reduce), 0);
      EXPECT_EQ(calls(2, &Counts::all_gather), 0);
    }
  });
}

TEST(FsdpHybrid, H_003_MixedStrategiesEqualDdp) {
  const Scenario s = gpt_scenario({});
  FsdpOptions o{.auto_wrap_policy = module_wrap_policy<GptBlock>()};
  o.unit_options = [](nn::Module& unit, FsdpOptions& options) {
    if (!dynamic_cast<GptBlock*>(&unit)) options.sharding_strategy = ShardingStrategy::kFullShard;
    if (unit.full_name() == "layers.1") options.sharding_strategy = ShardingStrategy::kNoShard;
  };
  expect_same_bits(train(s, hybrid_way(o, 2), 4), train(s, ddp_way(), 4));
}

class Weights : public nn::Module {
 public:
  explicit Weights(double value)
      : inner(add<nn::Linear>("inner", 3, 3)), running(buffer("running", full({5}, value))) {
    materialize();
    NoGrad off;
    for (Tensor p : parameters()) p.fill_(value);
  }
  Tensor forward(const Tensor& x) { return inner(x); }
  nn::Child<nn::Linear> inner;
  nn::Buffer running;
};

TEST(FsdpHybrid, H_004_SyncModuleStatesReachesAll_T_04) {
  run_ranks(4, [](int rank) {
    Weights m(rank);
    const auto shard = rank < 2 ? std::vector{0, 1} : std::vector{2, 3};
    dist::Group shard_group, replicate_group;
    for (auto ranks : {std::vector{0, 1}, {2, 3}, {0, 2}, {1, 3}}) {
      const dist::Group g = dist::new_group(ranks);
      if (g->rank() >= 0) (ranks == shard ? shard_group : replicate_group) = g;
    }
    FullyShardedDataParallel fsdp(m, {.auto_wrap_policy = module_wrap_policy<nn::Linear>(),
                                      .sharding_strategy = ShardingStrategy::kHybridShard,
                                      .shard_group = shard_group,
                                      .replicate_group = replicate_group});
    for (const Tensor& p : fsdp.parameters())
      for (int64_t i = 0; i < p.numel(); ++i) EXPECT_EQ(p.data<float>()[i], 0);
    EXPECT_EQ(m.running->data<float>()[0], 0);
  });
}

TEST(FsdpHybrid, H_005_ReplicasSetApartAreBroughtTogether) {
  run_ranks(4, [](int rank) {
    Mlp m(4);
    const auto mesh = hybrid_mesh(2);
    const dist::Group replicate = mesh.get_group("replicate");
    FullyShardedDataParallel fsdp(
        m, {.sharding_strategy = ShardingStrategy::kHybridShard, .device_mesh = mesh});
    const auto pieces = [&] {
      std::vector<float> all;
      for (const Tensor& p : fsdp.parameters())
        all.insert(all.end(), p.data<float>(), p.data<float>() + p.numel());
      return all;
    };
    const auto original = pieces();
    if (replicate->rank() == 1) {
      NoGrad off;
      for (Tensor p : fsdp.parameters()) p.fill_(1337);
    }
    for (const Tensor& p : fsdp.parameters())
      if (p.numel() > 0) dist::broadcast(p, 0, {.group = replicate});
    EXPECT_EQ(pieces(), original);
    Tensor sum = tensor<double>({std::accumulate(original.begin(), original.end(), 0.0)});
    Tensor other = sum.clone();
    dist::broadcast(other, 0, {.group = mesh.get_group("shard")});
    if (mesh.get_local_rank("shard") == 1) {
      EXPECT_NE(sum.item(), other.item());
    }
    fsdp(random_input({2, 4}, rank, 0)).sum().backward();
    optim::SGD(fsdp.parameters(), {.lr = 0.1}).step();
  });
}

TEST(FsdpHybrid, H_006_MeshFromGroupsAndByShape) {
  const Scenario s = widths();
  std::vector<Result> results;
  for (bool from_groups : {false, true}) {
    Scenario t = s;
    results.push_back({});
    run_ranks(4, [&](int rank) {
      dist::DeviceMesh mesh = hybrid_mesh(2);
      if (from_groups) {
        const auto names = mesh.mesh_dim_names();
        mesh = dist::DeviceMesh::from_groups({mesh.get_group(0), mesh.get_group(1)}, names);
      }
      EXPECT_EQ(mesh.shape(), (std::vector{2, 2}));
      EXPECT_EQ(mesh.get_group("shard")->ranks(),
                rank < 2 ? (std::vector{0, 1}) : (std::vector{2, 3}));
      EXPECT_EQ(mesh.get_group("replicate")->ranks(), (std::vector{rank % 2, rank % 2 + 2}));
      EXPECT_EQ(mesh.get_local_rank("replicate"), rank / 2);
      Way way = hybrid_way(mlp_units(), 0);
      way.fsdp->device_mesh = mesh;
      Trainee trainee(s, way, rank, 4);
      for (int step = 0; step < s.steps; ++step) s.step(trainee, step);
      const auto parameters = trainee.parameters(), gradients = trainee.gradients();
      if (rank == 0)
        results.back().losses = trainee.losses, results.back().parameters = parameters,
        results.back().gradients = gradients;
    });
  }
  expect_same_bits(results[0], results[1]);
}

TEST(FsdpHybrid, H_008_GroupsThatDoNotDo) {
  run_ranks(4, [](int) {
    Gpt m;
    const auto wrap = [&](const FsdpOptions& o) { FsdpModule(m, o); };
    constexpr auto kHybrid = ShardingStrategy::kHybridShard;
    const auto mesh = hybrid_mesh(2);
    expect_error([&] { wrap({.sharding_strategy = kHybrid}); },
                 {"hybrid_shard", "device_mesh", "replicate_group"});
    expect_error(
        [&] { wrap({.sharding_strategy = kHybrid, .shard_group = mesh.get_group("shard")}); },
        {"shard_group", "alone", "replicate_group"});
    expect_error(
        [&] { wrap({.sharding_strategy = kHybrid, .process_group = mesh.get_group("shard")}); },
        {"two groups"});
    expect_error([&] { wrap({.sharding_strategy = kHybrid, .device_mesh = mesh["shard"]}); },
                 {"two groups"});
    expect_error(
        [&] {
          wrap({.sharding_strategy = kHybrid, .device_mesh = dist::init_device_mesh({2, 2, 1})});
        },
        {"3 dimensions"});
    expect_error(
        [&] {
          wrap({.sharding_strategy = kHybrid, .device_mesh = dist::init_device_mesh({2, 2})});
        },
        {"without names"});
    expect_error([&] { dist::init_device_mesh({3, 2}); }, {"3 x 2", "6 places", "4 ranks"});
    expect_error([&] { dist::init_device_mesh({4}, {"a", "b"}); }, {"2 names", "1 dimensions"});
    expect_error([&] { mesh["columns"]; }, {"'columns'", "replicate, shard"});
    expect_error(
        [&] {
          dist::DeviceMesh::from_groups({dist::default_group(), mesh.get_group("shard")});
        },
        {"share rank"});
    // Nothing of this has changed the model.
    wrap({.sharding_strategy = kHybrid, .device_mesh = mesh});
  });
}

// The default, where a policy makes the units: the ranks of one node shard.
TEST(FsdpHybrid, H_008_NodesByDefault) {
  run_ranks(2, [](int rank) {
    Gpt m;
    FullyShardedDataParallel fsdp(m, {.auto_wrap_policy = module_wrap_policy<GptBlock>(),
                                      .sharding_strategy = ShardingStrategy::kHybridShard});
    EXPECT_EQ(fsdp.units()[0]->options().shard->size(), 2);
    EXPECT_EQ(fsdp.units()[0]->options().replicate, nullptr);
    fsdp(random_ids({2, 8}, 8, rank, 0)).sum().backward();
  });
}

// Ranks that say how many there are on their node.
void run_on_nodes(const std::vector<int>& local_world_sizes, const std::function<void(int)>& f) {
  const auto store = std::make_shared<dist::MemoryStore>();
  run_ranks(int(local_world_sizes.size()),
            [&](int rank) {
              dist::init_process_group({.rank = rank,
                                        .world_size = int(local_world_sizes.size()),
                                        .timeout = std::chrono::seconds(20),
                                        .store = store,
                                        .local_rank = 0,
                                        .local_world_size = local_world_sizes[size_t(rank)]});
              f(rank);
            },
            {.init = false});
}

TEST(FsdpHybrid, H_008_NodesAreAgreedOn) {
  const FsdpOptions o{.auto_wrap_policy = module_wrap_policy<GptBlock>(),
                      .sharding_strategy = ShardingStrategy::kHybridShard};
  run_on_nodes({2, 2, 2, 2}, [&](int rank) {
    Gpt m;
    FullyShardedDataParallel fsdp(m, o);
    const dist::UnitOptions& u = fsdp.units()[0]->options();
    EXPECT_EQ(u.shard->ranks(), rank < 2 ? (std::vector{0, 1}) : (std::vector{2, 3}));
    EXPECT_EQ(u.replicate->ranks(), (std::vector{rank % 2, rank % 2 + 2}));
    fsdp(random_ids({2, 8}, 8, rank, 0)).sum().backward();
  });
  // One rank was told otherwise: an error on all, not groups that do not fit together.
  run_on_nodes({2, 2, 1, 2}, [&](int) {
    Gpt m;
    expect_error([&] { FsdpModule(m, o); },
                 {"rank 0 is one of 2", "rank 2 one of 1", "LOCAL_WORLD_SIZE", "shard_group"});
  });
  run_on_nodes({3, 3, 3, 3}, [&](int) {
    Gpt m;
    expect_error([&] { FsdpModule(m, o); }, {"4 ranks", "whole nodes of 3", "shard_group"});
  });
}

TEST(FsdpHybrid, H_008_NodesByHostNames) {
  using dist::split_into_nodes;
  using Nodes = std::vector<std::vector<int>>;
  // LOCAL_WORLD_SIZE is missing, so that each rank takes the whole job for its node.
  EXPECT_EQ(split_into_nodes({"a", "a", "b", "b"}, {4, 4, 4, 4}), (Nodes{{0, 1}, {2, 3}}));
  // Ranks dealt out to hosts one by one.
  EXPECT_EQ(split_into_nodes({"a", "b", "a", "b"}, {2, 2, 2, 2}), (Nodes{{0, 2}, {1, 3}}));
  // Hosts of one name, or one that poses as two.
  EXPECT_EQ(split_into_nodes({"a", "a", "a", "a"}, {2, 2, 2, 2}), (Nodes{{0, 1}, {2, 3}}));
  EXPECT_EQ(split_into_nodes({"a", "b"}, {1, 1}), (Nodes{{0}, {1}}));
  expect_error(
      [] {
        split_into_nodes({"a", "a", "b"}, {3, 3, 3});
      },
      {"rank 0", "a, with 1 other", "rank 2", "b, with 0"});
}

TEST(FsdpHybrid, T_01_NormCountsEachParameterOnce) {
  for (double type : {2.0, 1.0, double(INFINITY)}) {
    Scenario s = widths();
    std::vector<std::set<float>> norms(s.steps);  // of all ranks and ways
    std::mutex mutex;
    s.step = [&, type](Trainee& t, int step) {
      t.optimizers[0]->zero_grad();
      t.backward(step);
      const Tensor norm = t.fsdp ? t.fsdp->clip_grad_norm_(0.5, type)
                                 : optim::clip_grad_norm_(t.stepped(), 0.5, type);
      t.optimizers[0]->step();
      std::lock_guard lock(mutex);
      norms[step].insert(norm.item<float>());
    };
    const Result ddp = train(s, ddp_way(), 4);
    for (auto k : kHybridStrategies)
      expect_same_bits(train(s, hybrid_way(mlp_units(), 2, k), 4), ddp);
    for (auto& n : norms) EXPECT_EQ(n.size(), 1u);
    EXPECT_GT(*norms[0].begin(), 0.5);
  }
}

}  // namespace
}  // namespace sherd::scenario
