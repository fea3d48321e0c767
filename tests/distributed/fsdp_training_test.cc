// FSDP trains as DDP does, to the bit, and as one process does, to rounding. The rows of the
// scenario list are in the names: F-001, ..., and T-03, ... of the list of traps.
#include "autograd/checkpoint.h"
#include "autograd/grad_mode.h"
#include "core/generator.h"
#include "tests/distributed/scenario.h"

namespace sherd::scenario {
namespace {

FsdpOptions strategy(ShardingStrategy s) { return {.sharding_strategy = s}; }
template <class... M>
FsdpOptions units_of(ShardingStrategy s = ShardingStrategy::kFullShard) {
  return {.auto_wrap_policy = module_wrap_policy<M...>(), .sharding_strategy = s};
}

std::unique_ptr<nn::Sequential> two_layers(int64_t in, int64_t hidden, int64_t out) {
  return std::make_unique<nn::Sequential>(nn::Linear(in, hidden), nn::ReLU(),
                                          nn::Linear(hidden, out));
}
// Linear(in, hidden)-ReLU-Linear(hidden, out), B 4.
Scenario two_layer_scenario(int64_t in, int64_t hidden, int64_t out) {
  return {.make = [=] {
    return instance(std::shared_ptr<nn::Sequential>(two_layers(in, hidden, out)),
                    [=](nn::Sequential& m, int rank, int step) {
                      return nn::call(m, random_input({4, in}, rank, step)).sum();
                    });
  }};
}
Scenario gpt_scenario(const GptOptions& o, int64_t batch = 2, int64_t time = 8) {
  return {.make = [=] {
    return instance(std::make_shared<Gpt>(o), [=](Gpt& m, int rank, int step) {
      const Tensor ids = random_ids({batch, time + 1}, o.vocab, rank, step);
      const Tensor logits = nn::call(m, ids.narrow(1, 0, time));
      return F::cross_entropy(logits.view({-1, o.vocab}), ids.narrow(1, 1, time).reshape({-1}));
    });
  }};
}

TEST(FsdpTraining, F_001_OneUnit) {
  for (int world : {2, 4, 8}) {
    const Scenario s = two_layer_scenario(16, 15, 8);
    const Result ddp = train(s, ddp_way(), world);
    for (auto k : kStrategies) expect_same_bits(train(s, fsdp_way(strategy(k)), world), ddp);
    expect_close(ddp, train(s, one_process(), world), 1e-4, 1e-4);
  }
}

TEST(FsdpTraining, F_002_SizesThatNothingDivides) {
  for (auto [in, hidden, out] : {std::tuple{7, 15, 3}, {16, 17, 8}, {1, 1, 1}})
    for (int world : {2, 3, 4}) {
      const Scenario s = two_layer_scenario(in, hidden, out);
      const Result fsdp = train(s, fsdp_way({}), world);
      expect_same_bits(fsdp, train(s, ddp_way(), world));
      for (uint64_t n : fsdp.collectives) EXPECT_EQ(n, fsdp.collectives[0]);
    }
}

TEST(FsdpTraining, F_003_TransformerOfBlocks) {
  Scenario s = gpt_scenario({.vocab = 64, .positions = 16});
  s.steps = 5;
  for (int world : {2, 4}) {
    const Result ddp = train(s, ddp_way(), world);
    for (auto k : kStrategies)
      expect_same_bits(train(s, fsdp_way(units_of<GptBlock>(k)), world), ddp);
  }
}

// outer(inner(x) + inner(x))
class TwiceUsed : public nn::Module {
 public:
  TwiceUsed() : inner(add<nn::Linear>("inner", 4, 4)), outer(add<nn::Linear>("outer", 4, 5)) {}
  Tensor forward(const Tensor& x) { return outer(inner(x) + inner(x)); }
  nn::Child<nn::Linear> inner, outer;
};
WrapPolicy by_name(const std::string& name) {
  return lambda_auto_wrap_policy([name](nn::Module& m) { return m.full_name() == name; });
}

TEST(FsdpTraining, F_005_ModuleUsedTwice_T_10) {
  for (bool input_grad : {false, true}) {
    Scenario s{.make = [=] {
      return instance(std::make_shared<TwiceUsed>(), [=](TwiceUsed& m, int rank, int step) {
        Tensor x = random_input({input_grad ? 64 : 32, 4}, rank, step);
        if (input_grad) x.requires_grad_();
        return nn::call(m, x).sum();
      });
    }};
    if (input_grad) {
      s.steps = 3;
      s.optimizers = [](const auto& named) {
        Optimizers o;
        o.push_back(std::make_unique<optim::SGD>(named, optim::SgdOptions{.lr = 1e-3}));
        return o;
      };
    }
    const Result ddp = train(s, ddp_way(), 2);
    for (auto k : kStrategies) {
      FsdpOptions o = strategy(k);
      o.auto_wrap_policy = by_name("inner");
      expect_same_bits(train(s, fsdp_way(o), 2), ddp);
    }
    expect_close(ddp, train(s, one_process(), 2), 1e-4, 1e-4);
  }
}

// A loss of two forwards, by one backward.
Scenario two_forwards(const GptOptions& o, const std::function<Tensor(Tensor, Tensor)>& join) {
  return {
      .make =
          [=] {
            return instance(std::make_shared<Gpt>(o), [=](Gpt& m, int rank, int step) {
              const Tensor a = nn::call(m, random_ids({2, 6}, o.vocab, rank, 2 * step)).mean();
              const Tensor b = nn::call(m, random_ids({2, 5}, o.vocab, rank, 2 * step + 1)).mean();
              return join(a, b);
            });
          },
      .steps = 3};
}

TEST(FsdpTraining, F_006_TwoForwardsOneBackward) {
  const Scenario s = two_forwards({.layers = 2}, [](Tensor a, Tensor b) { return a + b; });
  const Result ddp = train(s, ddp_way(), 2);
  for (auto k : kStrategies) {
    expect_same_bits(train(s, fsdp_way(units_of<GptBlock, Mlp>(k)), 2), ddp);
  }
}

TEST(FsdpTraining, F_007_PreferenceLoss) {
  auto join = [](Tensor a, Tensor b) { return (a - b) * (a - b) * 10; };
  for (bool checkpointed : {false, true}) {
    const Scenario s = two_forwards({.checkpointed = checkpointed}, join);
    const Result one = train(two_forwards({}, join), one_process(), 2);
    EXPECT_EQ(one.gradients.size(), one.parameters.size());
    for (auto k : {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp}) {
      Result got = train(s, fsdp_way(units_of<GptBlock, Mlp, nn::MultiheadAttention>(k)), 2);
      expect_same_bits(got, train(s, ddp_way(), 2));
      EXPECT_EQ(got.gradients.size(), got.parameters.size());
      for (int r = 0; r < 2; ++r)
        EXPECT_NEAR(got.losses[r][0], one.losses[r][0], 1e-5 * one.losses[r][0]);
    }
  }
}

class TwoOutputs : public nn::Module {
 public:
  TwoOutputs() : a(add<nn::Linear>("a", 24, 24)), b(add<nn::Linear>("b", 24, 24)) {}
  std::pair<Tensor, Tensor> forward(const Tensor& x) { return {a(x), b(x)}; }
  nn::Child<nn::Linear> a, b;
};

TEST(FsdpTraining, F_008_OneOutputLeavesTheLoss_D_006) {
  const Scenario s{.make = [] {
    return instance(std::make_shared<TwoOutputs>(), [](TwoOutputs& m, int rank, int step) {
      auto [a, b] = nn::call(m, random_input({2, 24}, rank, step));
      return step < 3 ? (a * b).mean() : a.mean();
    });
  }};
  const Result one = train(s, one_process(), 4);
  for (auto k : kStrategies) {
    expect_close(train(s, fsdp_way(strategy(k)), 4), one, 1e-4, 1e-4);
    expect_close(train(s, fsdp_way(units_of<nn::Linear>(k)), 4), one, 1e-4, 1e-4);
  }
  expect_close(train(s, ddp_way({.find_unused_parameters = true}), 4), one, 1e-4, 1e-4);
}

// The second is called or not, and its result is dropped.
class Dropping : public nn::Module {
 public:
  explicit Dropping(bool calls)
      : lin1(add<nn::Linear>("lin1", 6, 6)), lin2(add<nn::Linear>("lin2", 6, 6)), calls(calls) {}
  Tensor forward(const Tensor& x) {
    const Tensor y = lin1(x);
    if (calls) lin2(y);
    return y;
  }
  nn::Child<nn::Linear> lin1, lin2;
  bool calls;
};

TEST(FsdpTraining, F_009_ResultDroppedOrNeverMade_T_10) {
  for (bool calls : {true, false}) {
    Scenario s{.make =
                   [=] {
                     return instance(std::make_shared<Dropping>(calls),
                                     [](Dropping& m, int rank, int step) {
                                       return nn::call(m, random_input({4, 6}, rank, step)).sum();
                                     });
                   },
               .steps = 4};
    s.optimizers = [](const auto& named) {  // decay would change what has a gradient of zero
      Optimizers o;
      o.push_back(std::make_unique<optim::AdamW>(named, optim::AdamWOptions{.weight_decay = 0.5}));
      return o;
    };
    s.step = [](Trainee& t, int step) {
      t.optimizers[0]->zero_grad();
      t.backward(step);
      t.optimizers[0]->step();
    };
    const Result one = train(s, one_process(), 2);
    ASSERT_EQ(one.gradients.size(), 2u);
    for (auto k : kStrategies) {
      const Result got = train(s, fsdp_way(units_of<nn::Linear>(k)), 2, [](Trainee& t) {
        for (auto& p : t.fsdp->parts()) {
          if (p.name.starts_with("lin2")) {
            EXPECT_FALSE(p.parameter.grad().defined()) << p.name;
          }
        }
        for (auto& u : t.fsdp->units())
          for (auto& g : u->groups()) EXPECT_TRUE(g.whole || !g.full.storage()->has_bytes());
      });
      expect_close(got, one, 1e-4, 1e-4);
      EXPECT_EQ(got.parameters.at("lin2.weight"), one.parameters.at("lin2.weight"));
      expect_close(train(s, fsdp_way(strategy(k)), 2), one, 1e-4, 1e-4);
    }
  }
}

class Square : public nn::Module {
 public:
  Square() : w(parameter("w", {4, 4}, nn::init::normal())) {}
  Tensor forward() { return w * w; }
  nn::Parameter w;
};

TEST(FsdpTraining, F_011_ForwardWithoutArguments) {
  run_ranks(2, [](int) {
    Square m;
    FullyShardedDataParallel fsdp(m, {});
    const Tensor y = fsdp();
    EXPECT_EQ(y.sizes(), Dims({4, 4}));
    y.sum().backward();
    const Tensor p = fsdp.parameters()[0];
    ASSERT_EQ(p.numel(), 8);
    for (int64_t i = 0; i < 8; ++i)
      EXPECT_FLOAT_EQ(p.grad().data<float>()[i], 2 * p.data<float>()[i]);
  });
}

// Another method than forward: registered it works, else it is refused by name.
class Features : public nn::Module {
 public:
  explicit Features(bool registered) : lin(add<nn::Linear>("lin", 6, 6)), registered(registered) {}
  Tensor forward(const Tensor& x) { return lin(x); }
  Tensor features(const Tensor& x) {
    if (!registered) return F::linear(x, lin->weight, lin->bias);
    return nn::as_forward(
        this, [this](const Tensor& t) { return lin(t); }, x);
  }
  nn::Child<nn::Linear> lin;
  bool registered;
};
class UsesFeatures : public nn::Module {
 public:
  explicit UsesFeatures(bool registered)
      : trunk(add<Features>("trunk", registered)), head(add<nn::Linear>("head", 6, 2)) {}
  Tensor forward(const Tensor& x) { return head(trunk->features(x)); }
  nn::Child<Features> trunk;
  nn::Child<nn::Linear> head;
};

TEST(FsdpTraining, F_012_AnotherMethodThanForward_T_11) {
  auto scenario = [](bool registered) {
    return Scenario{.make =
                        [=] {
                          return instance(
                              std::make_shared<UsesFeatures>(registered),
                              [](UsesFeatures& m, int rank, int step) {
                                return nn::call(m, random_input({4, 6}, rank, step)).sum();
                              });
                        },
                    .steps = 3};
  };
  const FsdpOptions o = units_of<Features>();
  expect_same_bits(train(scenario(true), fsdp_way(o), 2), train(scenario(true), ddp_way(), 2));
  expect_error([&] { train(scenario(false), fsdp_way(o), 2); }, {"trunk.lin.weight", "forward"});
}

TEST(FsdpTraining, F_013_OneStepByHand) {
  for (int world : {2, 4, 8}) {
    run_ranks(world, [=](int rank) {
      nn::Linear m(3, 3, {.bias = false});
      manual_seed(3);
      m.materialize();
      const nn::StateDict before = [&] {
        nn::StateDict d;
        for (auto& [name, t] : m.state_dict()) d.set(name, t.clone());
        return d;
      }();
      FullyShardedDataParallel fsdp(m, {});
      optim::SGD sgd(fsdp.parameters(), {.lr = 0.1});
      const Tensor x = random_input({1, 3}, rank, 0);
      const Tensor y = fsdp(x);
      const Tensor w = before.at("weight");
      Tensor mean = zeros({1, 3});
      for (int r = 0; r < world; ++r) mean = mean + random_input({1, 3}, r, 0) * (1.0 / world);
      const Tensor y_expected = x.matmul(w.t());
      for (int i = 0; i < 3; ++i)
        EXPECT_NEAR(y.data<float>()[i], y_expected.data<float>()[i], 1e-6);
      y.sum().backward();
      sgd.step();
      fsdp.for_each_full_parameter([&](const std::string&, const Tensor& got) {
        for (int i = 0; i < 9; ++i)
          EXPECT_NEAR(got.data<float>()[i],
                      w.data<float>()[i] - 0.1f * contiguous_raw(mean).data<float>()[i % 3], 1e-6);
      });
    });
  }
}

TEST(FsdpTraining, F_014_EvalGivesTheSameBits) {
  Scenario s = gpt_scenario({});
  s.steps = 1;
  for (auto k : kStrategies)
    train(s, fsdp_way(units_of<GptBlock>(k)), 2, [](Trainee& t) {
      t.module().eval();
      const double recorded = t.forward(9);
      NoGrad off;
      EXPECT_EQ(t.forward(9), recorded);
      EXPECT_EQ(t.forward(9), recorded);
    });
}

TEST(FsdpTraining, F_014_WeightOverwrittenInPlace) {
  for (auto k : kStrategies)
    run_ranks(2, [=](int) {
      nn::Linear m(3, 5);
      FullyShardedDataParallel fsdp(m, strategy(k));
      NoGrad off;
      for (int value : {2, 3}) {
        for (auto p : fsdp.parameters()) p.fill_(value);
        const Tensor y = fsdp(ones({1, 3}));
        for (int i = 0; i < 5; ++i) EXPECT_EQ(y.data<float>()[i], 3 * value + value);
      }
    });
}

TEST(FsdpTraining, F_016_CheckpointedBlocks) {
  for (bool tied : {false, true}) {
    Scenario plain = gpt_scenario({.tied = tied});
    Scenario checkpointed = gpt_scenario({.tied = tied, .checkpointed = true});
    plain.steps = checkpointed.steps = 4;
    const Result ddp = train(plain, ddp_way(), 2);
    expect_same_bits(train(checkpointed, ddp_way(), 2), ddp);
    for (auto k : kStrategies)
      expect_same_bits(train(checkpointed, fsdp_way(units_of<GptBlock>(k)), 2), ddp);
  }
}

class DropoutBlock : public nn::Module {
 public:
  DropoutBlock()
      : attention(add<nn::MultiheadAttention>("attention", 8, 2,
                                              nn::MultiheadAttentionOptions{.dropout = 0.3})),
        ffn(add<Mlp>("ffn", 8)),
        dropout(add<nn::Dropout>("dropout", 0.4)) {}
  Tensor forward(const Tensor& x) {
    const Tensor h = x + dropout(attention(x, x, x).output);
    return h + dropout(ffn(dropout(h)));
  }
  nn::Child<nn::MultiheadAttention> attention;
  nn::Child<Mlp> ffn;
  nn::Child<nn::Dropout> dropout;
};
// Blocks, each recomputed in backward or not, with a draw between and behind them, which must not
// move.
class DropoutNet : public nn::Module {
 public:
  explicit DropoutNet(bool checkpointed)
      : layers(add<nn::ModuleList<DropoutBlock>>("layers")), checkpointed(checkpointed) {
    for (int i = 0; i < 3; ++i) layers->append();
  }
  Tensor forward(const Tensor& input) {
    Tensor x = input;
    for (auto& l : *layers) {
      x = checkpointed ? checkpoint([&](const Tensor& h) { return l(h); }, x) : l(x);
      x = F::dropout(x, 0.1, true);
    }
    return x;
  }
  nn::Child<nn::ModuleList<DropoutBlock>> layers;
  bool checkpointed;
};
TEST(FsdpTraining, T_19_CheckpointedBlocksWithDropout) {
  const auto scenario = [](bool checkpointed) {
    Scenario s{.make = [=] {
      return instance(std::make_shared<DropoutNet>(checkpointed),
                      [](DropoutNet& m, int rank, int step) {
                        const Tensor y = nn::call(m, random_input({2, 5, 8}, rank, step));
                        return (y * y).mean();
                      });
    }};
    s.steps = 4;
    return s;
  };
  expect_same_bits(train(scenario(true), one_process(), 1),
                   train(scenario(false), one_process(), 1));
  const Result plain = train(scenario(false), ddp_way(), 2);
  expect_same_bits(train(scenario(true), ddp_way(), 2), plain);
  for (auto k : kStrategies)
    for (bool checkpointed : {false, true})
      expect_same_bits(train(scenario(checkpointed), fsdp_way(units_of<DropoutBlock>(k)), 2),
                       plain);
}

TEST(FsdpTraining, F_017_OneRank_T_03) {
  for (auto [in, hidden, out] : {std::tuple{16, 15, 8}, {7, 15, 3}, {16, 17, 8}}) {
    const Scenario s = two_layer_scenario(in, hidden, out);
    const Result one = train(s, one_process(), 1);
    for (auto k : kStrategies) {
      const Result got = train(s, fsdp_way(strategy(k)), 1);
      expect_same_bits(got, one);
      EXPECT_EQ(got.collectives[0], 0u);
      EXPECT_EQ(got.stats[0].gathers, 0);
    }
  }
}

TEST(FsdpTraining, F_018_ThreeGroupsOptimizerBeforeOrAfter_T_08) {
  Scenario s = gpt_scenario({.layers = 2});
  s.steps = 5;
  s.optimizers = [](const nn::Module::NamedTensors& named) {
    std::vector<optim::AdamGroup> groups(3);
    groups[0].weight_decay = 0.3;
    groups[1].weight_decay = 0;
    groups[2].lr = 3e-3;
    for (auto& [name, p] : named) {
      const size_t g = name.starts_with("layers") ? (name.ends_with("bias") ? 1 : 0) : 2;
      groups[g].params.push_back(p);
    }
    Optimizers o;
    o.push_back(std::make_unique<optim::AdamW>(groups, optim::AdamWOptions{.lr = 1e-2}));
    return o;
  };
  s.step = [](Trainee& t, int step) {
    if (step % 2 == 0) t.optimizers[0]->zero_grad();
    const double loss = t.forward(step);  // a forward of its own, that records
    t.losses[t.rank].push_back(loss);
    if (step % 2 == 1) t.optimizers[0]->zero_grad();
    t.backward(step);
    t.optimizers[0]->step();
  };
  const Result ddp = train(s, ddp_way(), 2);
  for (bool before : {false, true})
    for (auto k : kStrategies)
      for (auto prefetch :
           {BackwardPrefetch::kNone, BackwardPrefetch::kPre, BackwardPrefetch::kPost}) {
        if (before && prefetch != BackwardPrefetch::kPre) continue;
        s.optimizer_before_wrapping = before;
        FsdpOptions o = units_of<GptBlock>(k);
        o.backward_prefetch = prefetch;
        expect_same_bits(train(s, fsdp_way(o), 2), ddp);
      }
}

TEST(FsdpTraining, F_019_TwoOptimizersOneClears) {
  Scenario s = two_layer_scenario(6, 10, 3);
  s.steps = 4;
  s.optimizers = [](const nn::Module::NamedTensors& named) {
    std::vector<Tensor> weights, biases;
    for (auto& [name, p] : named) (name.ends_with("bias") ? biases : weights).push_back(p);
    Optimizers o;
    o.push_back(std::make_unique<optim::Adam>(weights, optim::AdamOptions{.lr = 5e-3}));
    o.push_back(std::make_unique<optim::AdamW>(biases, optim::AdamWOptions{.lr = 1e-2}));
    return o;
  };
  s.step = [](Trainee& t, int step) {
    t.optimizers[0]->zero_grad();
    if (step == 1) {
      t.forward(step);
      const auto left = t.gradients();
      EXPECT_EQ(left.size(), t.fsdp && t.rank > 0 ? 0u : 2u);
      for (auto& [name, g] : left) EXPECT_TRUE(name.ends_with("bias")) << name;
    }
    t.backward(step);
    for (auto& o : t.optimizers) o->step();
    if (step >= 2) t.optimizers[1]->zero_grad(false);
  };
  const Result ddp = train(s, ddp_way(), 2);
  for (auto k : kStrategies) expect_same_bits(train(s, fsdp_way(strategy(k)), 2), ddp);
}

// 0-d, of one element, without elements.
class Odd : public nn::Module {
 public:
  Odd()
      : scalar(parameter("scalar", {}, nn::init::constant(0.5))),
        one(parameter("one", {1}, nn::init::ones())),
        none(parameter("none", {0, 3}, nn::init::ones())),
        lin(add<nn::Linear>("lin", 3, 3)) {}
  Tensor forward(const Tensor& x) { return lin(x) * scalar + one + Tensor(none).sum(); }
  nn::Parameter scalar, one, none;
  nn::Child<nn::Linear> lin;
};

TEST(FsdpTraining, I_007_ScalarsAndEmptyParameters_T_07) {
  const Scenario s{.make = [] {
    return instance(std::make_shared<Odd>(), [](Odd& m, int rank, int step) {
      return nn::call(m, random_input({4, 3}, rank, step)).sum();
    });
  }};
  for (int world : {2, 4}) {
    const Result one = train(s, one_process(), world);
    const Result ddp = train(s, ddp_way(), world);
    for (auto k : kStrategies) {
      const Result got = train(s, fsdp_way(strategy(k)), world);
      expect_same_bits(got, ddp);
      expect_close(got, one, 1e-4, 1e-4);
    }
  }
}

}  // namespace
}  // namespace sherd::scenario
