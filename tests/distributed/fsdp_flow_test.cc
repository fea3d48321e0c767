// Unusual ways through forward and backward: rows F-010, F-015, F-020, A-007, P-008 of the
// scenarios.
#include <thread>

#include "autograd/grad_mode.h"
#include "core/generator.h"
#include "tests/distributed/scenario.h"

namespace sherd::scenario {
namespace {

// ---- F-010
struct Pair {
  Tensor a, b;
};
struct Nest {
  Pair pair;
  std::vector<Tensor> list;
};
constexpr int64_t kWidth = 24;

class Opens : public nn::Module {
 public:
  Opens() : layer(add<nn::Linear>("layer", kWidth, kWidth)) {}
  std::vector<Tensor> forward(const Tensor& x) {
    const Tensor h = relu(layer(x));
    return {h, h * 2.0};
  }
  nn::Child<nn::Linear> layer;
};
class Packs : public nn::Module {
 public:
  Packs() : layer(add<nn::Linear>("layer", kWidth, kWidth)) {}
  std::tuple<Nest, std::map<std::string, Tensor>> forward(const std::vector<Tensor>& in) {
    const Tensor h = relu(layer(in[0])) + in[1];
    return {Nest{{h, h + 1.0}, {in[0]}}, {{"x", h * 0.5}}};
  }
  nn::Child<nn::Linear> layer;
};
class Closes : public nn::Module {
 public:
  Closes() : layer(add<nn::Linear>("layer", kWidth, kWidth)) {}
  Pair forward(const Nest& nest, const std::map<std::string, Tensor>& by_name) {
    dtype = by_name.at("x").dtype();
    return {layer(nest.pair.a + nest.list[0]), layer(nest.pair.b + by_name.at("x"))};
  }
  nn::Child<nn::Linear> layer;
  DType dtype = kInt64;
};
class Travels : public nn::Module {
 public:
  Travels()
      : opens(add<Opens>("opens")), packs(add<Packs>("packs")), closes(add<Closes>("closes")) {}
  Tensor forward(const Tensor& x) {
    const auto [nest, by_name] = packs(opens(x));
    const Pair p = closes(nest, by_name);
    return p.a + p.b;
  }
  nn::Child<Opens> opens;
  nn::Child<Packs> packs;
  nn::Child<Closes> closes;
};

TEST(FsdpFlow, F_010_TensorsInsideOfOthers) {
  Scenario s{.make = [] {
    return instance(std::make_shared<Travels>(), [](Travels& m, int rank, int step) {
      return nn::call(m, random_input({2, kWidth}, rank, step)).to(kFloat32).sum();
    });
  }};
  s.steps = 4;
  FsdpOptions o{.auto_wrap_policy = module_wrap_policy<Opens, Packs, Closes>()};
  const Result ddp = train(s, ddp_way(), 4);
  const Result fsdp = train(s, fsdp_way(o), 4);
  expect_same_bits(fsdp, ddp);
  expect_close(ddp, train(s, one_process(), 4), 1e-4, 1e-3);
  o.mixed_precision = {.param_dtype = kBFloat16, .reduce_dtype = kFloat32};
  const Result low = train(s, fsdp_way(o), 4, [](Trainee& t) {
    EXPECT_EQ(static_cast<Travels&>(t.module()).closes->dtype, kBFloat16);
  });
  for (int r = 0; r < 4; ++r)
    EXPECT_NEAR(low.losses[r][0], fsdp.losses[r][0], 0.02 * std::abs(fsdp.losses[r][0]) + 0.5);
}

// ---- F-015
class Trunk : public nn::Module {
 public:
  Trunk() : tokens(add<nn::Embedding>("tokens", 32, 16)), block(add<GptBlock>("block", 16)) {}
  Tensor forward(const Tensor& ids) { return block(tokens(ids)); }
  nn::Child<nn::Embedding> tokens;
  nn::Child<GptBlock> block;
};
class Head : public nn::Module {
 public:
  Head()
      : norm(add<nn::LayerNorm>("norm", 16)),
        output(add<nn::Linear>("output", 16, 32, nn::LinearOptions{.bias = false})) {}
  Tensor forward(const Tensor& h) { return output(norm(h)); }
  nn::Child<nn::LayerNorm> norm;
  nn::Child<nn::Linear> output;
};
class Parts : public nn::Module {
 public:
  explicit Parts() : trunk(add<Trunk>("trunk")), head(add<Head>("head")) {}
  Tensor forward(const Tensor& ids) { return trunk(ids); }  // without its head
  nn::Child<Trunk> trunk;
  nn::Child<Head> head;
};

Scenario chunked(bool chunks) {
  Scenario s{.make = [] {
    return instance(std::make_shared<Parts>(), [](Parts& m, int rank, int step) {
      return nn::call(m, random_ids({2, 16}, 32, rank, step)).sum();
    });
  }};
  s.steps = 5;
  s.step = [=](Trainee& t, int step) {
    auto& m = static_cast<Parts&>(t.module());
    t.optimizers[0]->zero_grad();
    for (int r = t.fsdp ? t.rank : 0; r < (t.fsdp ? t.rank + 1 : t.world); ++r) {
      const double scale = t.fsdp ? 1 : 1.0 / t.world;
      const Tensor ids = random_ids({2, 17}, 32, r, step);
      const Tensor h = nn::call(m, ids.narrow(1, 0, 16));
      const Tensor labels = ids.narrow(1, 1, 16);
      const auto loss_of = [&](const Tensor& part, int64_t at, int64_t n) {
        const Tensor logits = m.head(part).view({-1, 32});
        return F::cross_entropy(logits, labels.narrow(1, at, n).reshape({-1}),
                                {.reduction = Reduction::kSum}) *
               (scale / 32);
      };
      if (!chunks) {
        Tensor loss = loss_of(h, 0, 16);
        t.losses[r].push_back(loss.item());
        loss.backward();
        continue;
      }
      Tensor cut = h.detach();
      cut.set_requires_grad(true);
      double sum = 0;
      for (int64_t at = 0; at < 16; at += 4) {
        Tensor loss = loss_of(cut.narrow(1, at, 4), at, 4);
        sum += loss.item();
        const auto head_gradient = [&] {  // what this rank has of it
          for (auto& p : t.fsdp->parts())
            if (p.name == "head.output.weight" && p.parameter.grad().defined())
              return p.parameter.grad().detach().clone();
          return Tensor();
        };
        const Tensor before = head_gradient();
        loss.backward();
        const Tensor after = head_gradient();
        ASSERT_TRUE(after.defined());
        for (int64_t i = 0, same = 0; before.defined() && i < after.numel(); ++i) {
          same += before.data<float>()[i] == after.data<float>()[i];
          ASSERT_LT(same, after.numel());  // it grew
        }
      }
      t.losses[r].push_back(sum);
      backward({h}, {cut.grad()});
    }
    t.optimizers[0]->step();
  };
  return s;
}

TEST(FsdpFlow, F_015_HeadByChunks) {
  const Result whole = train(chunked(false), one_process(), 2);
  FsdpOptions o{.auto_wrap_policy = module_wrap_policy<GptBlock, Head>()};
  for (auto k : {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp}) {
    o.sharding_strategy = k;
    Result fsdp = train(chunked(true), fsdp_way(o), 2);
    Result expected = whole;
    for (auto& losses : expected.losses)  // one process scales each rank's
      for (double& l : losses) l *= 2;
    expect_close(fsdp, expected, 1e-3, 1e-4);
  }
}

// ---- F-020
TEST(FsdpFlow, F_020_StepAsGradientsBecomeFinal) {
  class Two : public nn::Module {
   public:
    Two() : a(add<nn::Linear>("a", 10, 10)), b(add<nn::Linear>("b", 10, 10)) {}
    Tensor forward(const Tensor& x) { return b(a(x)); }
    nn::Child<nn::Linear> a, b;
  };
  std::vector<std::map<std::string, std::vector<float>>> results;
  for (bool in_backward : {false, true})
    run_ranks(2, [&](int rank) {
      manual_seed(5);
      Two m;
      FullyShardedDataParallel fsdp(m, {.auto_wrap_policy = module_wrap_policy<nn::Linear>()});
      std::vector<std::unique_ptr<optim::SGD>> each;
      optim::SGD all(fsdp.parameters(), {.lr = 0.03});
      if (in_backward)
        for (const Tensor& p : fsdp.parameters()) {
          each.push_back(
              std::make_unique<optim::SGD>(std::vector<Tensor>{p}, optim::SgdOptions{.lr = 0.03}));
          autograd::register_post_accumulate_grad_hook(p, [o = each.back().get()](const Tensor&) {
            o->step();
            o->zero_grad();
          });
        }
      for (int step = 0; step < 3; ++step) {
        fsdp(random_input({2, 10}, rank, step)).sum().backward();
        if (!in_backward) {
          all.step();
          all.zero_grad();
        }
        for (const Tensor& p : fsdp.parameters()) EXPECT_FALSE(p.grad().defined());
      }
      std::map<std::string, std::vector<float>> now;
      fsdp.for_each_full_parameter([&](const std::string& name, const Tensor& t) {
        now[name] = {t.data<float>(), t.data<float>() + t.numel()};
      });
      if (rank == 0) results.push_back(now);
    });
  ASSERT_EQ(results.size(), 2u);
  EXPECT_EQ(results[0], results[1]);
}

// ----
Scenario gpt() {
  const GptOptions o;
  Scenario s{.make = [=] {
    return instance(std::make_shared<Gpt>(o), [=](Gpt& m, int rank, int step) {
      const Tensor ids = random_ids({2, 9}, o.vocab, rank, step);
      const Tensor logits = nn::call(m, ids.narrow(1, 0, 8));
      return F::cross_entropy(logits.view({-1, o.vocab}), ids.narrow(1, 1, 8).reshape({-1}));
    });
  }};
  s.steps = 2;
  return s;
}

TEST(FsdpFlow, A_007_MicroBatchesGatheredAheadAndKept) {
  Scenario plain = gpt();
  plain.step = [](Trainee& t, int step) {
    t.optimizers[0]->zero_grad();
    for (int i = 0; i < 3; ++i) {
      const auto off = i < 2 ? t.no_sync() : nullptr;
      t.backward(3 * step + i);
    }
    t.optimizers[0]->step();
  };
  const Result ddp = train(plain, ddp_way(), 2);
  for (bool ahead : {false, true})
    for (bool keep : {false, true}) {
      Scenario s = plain;
      s.step = [=](Trainee& t, int step) {
        t.optimizers[0]->zero_grad();
        if (ahead) t.fsdp->unshard();
        t.fsdp->reset_stats();
        for (int i = 0; i < 3; ++i) {
          t.fsdp->set_reshard_after_backward(!keep || i == 2);
          const auto off = i < 2 ? t.no_sync() : nullptr;
          t.backward(3 * step + i);
        }
        EXPECT_EQ(t.fsdp->stats().gathers, (keep ? 4 : 12) - (ahead ? 4 : 0));
        t.optimizers[0]->step();
      };
      expect_same_bits(train(s,
                             fsdp_way({.auto_wrap_policy = module_wrap_policy<GptBlock>(),
                                       .sharding_strategy = ShardingStrategy::kShardGradOp}),
                             2),
                       ddp);
    }
}

// ---- P-008: a rank that lags at any moment changes nothing.
TEST(FsdpFlow, P_008_DelaysChangeNothing) {
  const Result prompt =
      train(gpt(), fsdp_way({.auto_wrap_policy = module_wrap_policy<GptBlock>()}), 2);
  for (auto k : {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp})
    for (int lagging : {0, 1}) {
      Scenario s = gpt();
      s.step = [=](Trainee& t, int step) {
        const auto lag = [&] {
          if (t.rank == lagging) std::this_thread::sleep_for(std::chrono::milliseconds(50));
        };
        t.optimizers[0]->zero_grad(step % 2 == 0);
        lag();  // before the gathers of forward
        Tensor loss = t.loss(t.rank, step);
        t.losses[t.rank].push_back(loss.item());
        lag();
        // Before each block's backward, so before its reduction.
        autograd::register_hook(loss, [&](const Tensor&) -> Tensor {
          lag();
          return {};
        });
        loss.backward();
        lag();
        t.optimizers[0]->step();
      };
      expect_same_bits(train(s,
                             fsdp_way({.auto_wrap_policy = module_wrap_policy<GptBlock>(),
                                       .sharding_strategy = k}),
                             2),
                       prompt);
    }
}

// ---- Z-006: DDP around FSDP around DDP
class Sandwich : public nn::Module {
 public:
  class Middle : public nn::Module {
   public:
    Middle() : own(add<nn::Linear>("own", 8, 8)), inner(add<nn::Linear>("inner", 8, 8)) {}
    Tensor forward(const Tensor& x) { return relu(inner(relu(own(x)))); }
    nn::Child<nn::Linear> own, inner;
  };
  Sandwich()
      : first(add<nn::Linear>("first", 8, 8)),
        middle(add<Middle>("middle")),
        last(add<nn::Linear>("last", 8, 8)) {}
  Tensor forward(const Tensor& x) { return last(middle(relu(first(x)))); }
  nn::Child<nn::Linear> first;
  nn::Child<Middle> middle;
  nn::Child<nn::Linear> last;
};

TEST(FsdpFlow, Z_006_DdpAroundFsdpAroundDdp) {
  using Values = std::map<std::string, std::vector<float>>;
  const auto floats = [](const Tensor& t) {
    const Tensor c = contiguous_raw(t.detach());
    return std::vector<float>(c.data<float>(), c.data<float>() + c.numel());
  };
  // Losses and parameters of each step, on rank 0.
  const auto trained = [&](bool nested, std::vector<double>& losses) {
    std::vector<Values> steps;
    run_ranks(2, [&](int rank) {
      manual_seed(7);
      Sandwich m;
      m.materialize();
      std::shared_ptr<dist::DdpReducer> inner, outer;
      std::unique_ptr<FsdpModule> fsdp;
      if (nested) {
        inner = std::make_shared<dist::DdpReducer>(*m.middle->inner, DdpOptions{});
        fsdp = std::make_unique<FsdpModule>(*m.middle,
                                            FsdpOptions{.ignored_modules = {&*m.middle->inner}});
        // Error where they are not left out.
        EXPECT_THROW(dist::DdpReducer(m, {}), Error);
        outer = std::make_shared<dist::DdpReducer>(
            m, DdpOptions{.ignored_parameters = fsdp->parameters()});
      } else {
        outer = std::make_shared<dist::DdpReducer>(m, DdpOptions{});
      }
      nn::Module::NamedTensors stepped;
      for (auto& [name, p] : m.named_parameters())
        if (!nested || !name.starts_with("middle")) stepped.emplace_back(name, p);
      if (nested)
        for (auto& [name, p] : fsdp->named_parameters()) stepped.emplace_back("middle." + name, p);
      ASSERT_EQ(stepped.size(), 8u);
      optim::Adam adam(stepped, {.lr = 1e-2});
      for (int step = 0; step < 3; ++step) {
        adam.zero_grad();
        Tensor loss = nn::call(m, random_input({4, 8}, rank, step)).sum();
        loss.backward();
        adam.step();
        Values values;
        for (auto& [name, p] : m.named_parameters())
          if (!nested || !name.starts_with("middle")) values[name] = floats(p);
        if (nested)
          fsdp->for_each_full_parameter([&](const std::string& name, const Tensor& t) {
            values["middle." + name] = floats(t);
          });
        if (rank != 0) continue;
        losses.push_back(loss.item());
        steps.push_back(values);
      }
    });
    return steps;
  };
  std::vector<double> plain_losses, losses;
  const auto plain = trained(false, plain_losses), nested = trained(true, losses);
  EXPECT_EQ(losses, plain_losses);
  ASSERT_EQ(nested.size(), 3u);
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(nested[i], plain[i]) << "step " << i;
}

}  // namespace
}  // namespace sherd::scenario
