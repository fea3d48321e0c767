// How sharded parameters get their first values, and what FSDP says meanwhile: rows I-001, I-003 to
// I-005, I-008, I-011, I-012, I-014, I-015 of the scenarios, T-20 of the traps.
#include "autograd/grad_mode.h"
#include "core/generator.h"
#include "nn/init.h"
#include "tests/distributed/scenario.h"

namespace sherd::scenario {
namespace {

std::vector<float> values(const Tensor& t) {
  const Tensor c = contiguous_raw(to_raw(t.detach(), kFloat32));
  return {c.data<float>(), c.data<float>() + c.numel()};
}
using Values = std::map<std::string, std::vector<float>>;
// Whole, on rank 0.
Values values_of(FsdpModule& fsdp) {
  Values all;
  fsdp.for_each_full_parameter(
      [&](const std::string& name, const Tensor& t) { all[name] = values(t); });
  return all;
}
Values values_of(const nn::Module& m) {
  Values all;
  for (auto& [name, p] : m.named_parameters()) all[name] = values(p);
  return all;
}

class TwoMlps : public nn::Module {
 public:
  explicit TwoMlps(int64_t dim)
      : a(add<Mlp>("a", dim, /*bias=*/false)),
        b(add<Mlp>("b", dim, /*bias=*/false)),
        running(buffer("running", full({2}, 5.0))) {}
  Tensor forward(const Tensor& x) { return b(a(x)); }
  nn::Child<Mlp> a, b;
  nn::Buffer running;
};

TEST(FsdpInit, I_001_FromTheMetaDevice) {
  for (int64_t dim : {8, 3, 1})
    for (bool low : {false, true})
      run_ranks(4, [=](int rank) {
        TwoMlps m(dim);
        for (auto& p : m.parameters()) EXPECT_TRUE(p.device().is_meta());
        FsdpOptions o{.auto_wrap_policy = module_wrap_policy<Mlp>()};
        if (low) o.mixed_precision = {.param_dtype = kBFloat16};
        FullyShardedDataParallel fsdp(m, o);
        // Each parameter is drawn from a continuous distribution: a zero is a place not filled.
        for (const Tensor& p : fsdp.parameters()) {
          EXPECT_TRUE(p.device().is_cpu());
          for (float v : values(p)) EXPECT_NE(v, 0);
        }
        EXPECT_EQ(values(m.running), (std::vector<float>{5, 5}));
        optim::Adam adam(fsdp.named_parameters(), {.lr = 1e-2});
        fsdp(random_input({2, dim}, rank, 0)).sum().backward();
        adam.step();
      });
}

class Xavier : public nn::Module {
 public:
  Xavier()
      : square(parameter("square", {6, 4}, nn::init::xavier_uniform(4, 6))),
        inner(add<Mlp>("inner", 4)) {}
  Tensor forward(const Tensor& x) { return inner(F::linear(x, square).narrow(-1, 0, 4)); }
  nn::Parameter square;
  nn::Child<Mlp> inner;
};

TEST(FsdpInit, I_003_TheSameWeightsHoweverMade_T_20) {
  Values expected;
  for (int world : {1, 2, 4})
    for (int way : {0, 1, 2})
      run_ranks(world, [&](int rank) {
        manual_seed(11);
        Xavier m;
        if (way == 2) m.materialize();  // eager, then wrapped
        FsdpOptions o;
        if (way == 0) o.auto_wrap_policy = module_wrap_policy<Mlp>();
        FullyShardedDataParallel fsdp(m, o);
        const Values start = values_of(fsdp);
        optim::SGD sgd(fsdp.parameters(), {.lr = 1e-3});
        fsdp(random_input({2, 4}, 0, 0)).sum().backward();
        sgd.step();
        const Values after = values_of(fsdp);
        if (rank != 0) return;
        if (expected.empty()) {
          Xavier plain;
          plain.materialize(11);
          EXPECT_EQ(values_of(plain), start);
          expected = after;
        }
        // The same input on all ranks: the mean of equal gradients, to the bit.
        EXPECT_EQ(after, expected) << world << " " << way;
      });
}

TEST(FsdpInit, I_004_SyncModuleStates) {
  for (bool sync : {false, true})
    run_ranks(2, [=](int rank) {
      manual_seed(100 + rank);
      TwoMlps m(4);
      m.materialize();
      Tensor(m.running.get()).fill_(rank);
      FsdpModule fsdp(
          m, {.sharding_strategy = ShardingStrategy::kNoShard, .sync_module_states = sync});
      Tensor mine = fsdp.parameters()[0].detach().clone(), first = mine.clone();
      dist::broadcast(first, 0);
      EXPECT_EQ(values(mine) == values(first), sync || rank == 0);
      EXPECT_EQ(values(m.running)[0], sync ? 0 : rank);
    });
}

TEST(FsdpInit, I_005_WeightsOnRank0Alone) {
  Values expected;
  run_ranks(2, [&](int rank) {
    manual_seed(3);
    TwoMlps whole(5), m(5);
    whole.materialize();
    if (rank == 0) expected = values_of(whole);
    nn::StateDict state;
    if (rank == 0) state = whole.state_dict();
    FullyShardedDataParallel fsdp(m, {.auto_wrap_policy = module_wrap_policy<Mlp>(), .seed = 99});
    // Rank 0's are broadcast a parameter at a time; each rank keeps its part.
    NoGrad off;
    for (auto& p : fsdp.parts()) {
      Tensor t = rank == 0 ? state.find(p.name)->clone() : empty(p.full_shape);
      dist::broadcast(t, 0);
      Tensor to = p.parameter;
      to.copy_(t.view({-1}).narrow(0, p.begin, p.end - p.begin));
    }
    const Values now = values_of(fsdp);
    if (rank == 0) {
      EXPECT_EQ(now, expected);
    }
  });
}

class Transposed : public nn::Module {
 public:
  Transposed() : layer(add<nn::Linear>("layer", 3, 5)) {}
  Tensor forward(const Tensor& x) { return layer(x); }
  nn::Child<nn::Linear> layer;
};

TEST(FsdpInit, I_008_ATransposedParameter) {
  run_ranks(2, [](int rank) {
    Transposed m;
    m.materialize();
    const Tensor base = random_input({3, 5}, 0, 0);
    Tensor(m.layer->weight.get()).set_data(base.t());
    EXPECT_FALSE(m.layer->weight->is_contiguous());
    const Values expected = values_of(m);
    FsdpModule fsdp(m, {});
    const Values now = values_of(fsdp);
    if (rank == 0) {
      EXPECT_EQ(now, expected);
    }
    nn::call(m, random_input({2, 3}, rank, 0)).sum().backward();
  });
}

class OddSizes : public nn::Module {
 public:
  OddSizes() : list(add<nn::ModuleList<nn::Linear>>("list")) {
    for (int i = 0; i < 3; ++i) list->append(3, 9), list->append(9, 3);
  }
  Tensor forward(const Tensor& x) {
    Tensor h = x;
    for (auto& l : *list) h = relu(l(h));
    return h;
  }
  nn::Child<nn::ModuleList<nn::Linear>> list;
};

TEST(FsdpInit, I_011_PiecesJoinToTheOriginals) {
  run_ranks(2, [](int) {
    manual_seed(1);
    OddSizes m, plain;
    plain.materialize();
    FsdpModule fsdp(m, {});
    std::map<std::string, Tensor> whole;
    for (auto& p : fsdp.parts()) {
      Tensor sizes = tensor<int64_t>({p.end - p.begin}), all = empty({2}, kInt64);
      dist::all_gather_into_tensor(all, sizes);
      Tensor joined = empty({p.full_shape.numel()});
      const int64_t first = all.data<int64_t>()[0];
      dist::all_gather(
          {joined.narrow(0, 0, first), joined.narrow(0, first, joined.numel() - first)},
          p.parameter.detach());
      for (auto& [name, t] : plain.named_parameters())
        if (name == p.name) {
          EXPECT_EQ(t.sizes(), p.full_shape);
          EXPECT_EQ(values(joined), values(t)) << name;
        }
    }
  });
}

TEST(FsdpInit, I_012_OverASubgroup) {
  std::vector<Values> results;
  for (bool by_mesh : {false, true})
    run_ranks(4, [&](int rank) {
      const auto mesh = hybrid_mesh(2);
      manual_seed(5);
      Mlp m(4);
      FsdpOptions o;
      if (by_mesh)
        o.device_mesh = mesh["shard"];
      else
        o.process_group = mesh.get_group("shard");
      FullyShardedDataParallel fsdp(m, o);
      EXPECT_EQ(fsdp.units()[0]->options().shard->size(), 2);
      const uint64_t before = dist::default_group()->sequence_number();
      fsdp(random_input({2, 4}, rank % 2, 0)).sum().backward();
      Values v;
      fsdp.for_each_full(
          [](const std::string&, const Tensor& p) {
            return p.grad().defined() ? p.grad().detach() : zeros(p.sizes());
          },
          [&](const std::string& name, const Tensor& t) { v[name] = values(t); });
      EXPECT_EQ(dist::default_group()->sequence_number(), before);  // the others have no part in it
      static std::mutex mutex;
      std::lock_guard lock(mutex);
      if (rank % 2 == 0) results.push_back(v);
    });
  ASSERT_EQ(results.size(), 4u);
  for (auto& v : results) EXPECT_EQ(v, results[0]);
}

int count(const std::string& text, const std::string& part) {
  int n = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++n;
  return n;
}

TEST(FsdpSays, I_014_ThatOneRankNeedsNoShardingOnce) {
  for (auto strategy : kStrategies) {
    const auto results = dist::run_processes(1, [=](int rank) {
      for (int i = 0; i < 2; ++i) {
        TwoMlps m(4);
        FsdpModule inner(*m.a, {.sharding_strategy = strategy});
        FullyShardedDataParallel fsdp(m, {.sharding_strategy = strategy});
        fsdp(random_input({2, 4}, rank, 0)).sum().backward();
        EXPECT_EQ(fsdp.stats().gathers, 0);
      }
    });
    const std::string said = results[0].output;
    EXPECT_EQ(count(said, "there is one rank"), strategy != ShardingStrategy::kNoShard) << said;
    EXPECT_EQ(count(said, concat(name_of(strategy), " works as no_shard")),
              strategy != ShardingStrategy::kNoShard);
  }
}

TEST(FsdpSays, I_015_WhatUnitsDoIfAsked) {
  for (bool asked : {false, true}) {
    const auto results = dist::run_processes(2, [=](int rank) {
      if (asked) setenv("SHERD_DEBUG", "fsdp", 1);
      TwoMlps m(4);
      FullyShardedDataParallel fsdp(m, {.auto_wrap_policy = module_wrap_policy<Mlp>()});
      fsdp(random_input({2, 4}, rank, 0)).sum().backward();
    });
    for (int rank : {0, 1})
      for (const char* what : {"pre-forward", "post-forward", "pre-backward", "post-backward"})
        for (const char* unit : {"unit 0 (a)", "unit 1 (b)", "unit 2 (root)"})
          EXPECT_EQ(count(results[rank].output,
                          concat("[fsdp] rank ", rank, ": ", what, " of ", unit, "\n")),
                    asked)
              << what << " " << unit << " in: " << results[rank].output;
  }
}

}  // namespace
}  // namespace sherd::scenario
