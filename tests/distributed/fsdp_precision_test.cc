// Mixed precision under FSDP: rows M-001 to M-008, M-010, M-012, M-013 of the scenarios, T-18 of
// the traps.
#include "autograd/grad_mode.h"
#include "core/gemm.h"
#include "core/generator.h"
#include "tests/distributed/scenario.h"

namespace sherd::scenario {
namespace {

class ThreeMlps : public nn::Module {
 public:
  ThreeMlps() : mlps(add<nn::ModuleList<Mlp>>("mlps")) {
    for (int i = 0; i < 3; ++i) mlps->append(16);
  }
  Tensor forward(const Tensor& x) {
    Tensor h = x;
    for (auto& m : *mlps) h = m(h);
    seen = h.dtype();
    return h;
  }
  nn::Child<nn::ModuleList<Mlp>> mlps;
  DType seen = kFloat32;
};

constexpr int kSteps = 6;
Scenario three_mlps() {
  return {.make =
              [] {
                return instance(std::make_shared<ThreeMlps>(),
                                [](ThreeMlps& m, int rank, int step) {
                                  return nn::call(m, random_input({4, 16}, rank, step)).sum();
                                });
              },
          .steps = kSteps};
}

// Gradients in `compute`, summed over ranks in `reduce` (in the tree: a pair, then pairs of
// pairs), divided in float32, Adam on float32 masters.
Trainee::Values by_hand(DType compute, DType reduce, int world, std::vector<double>& losses) {
  Trainee::Values values;
  run_ranks(1, [&](int) {
    manual_seed(7);
    ThreeMlps master, low;
    master.materialize();
    low.materialize();
    low.to(compute);
    optim::Adam adam(master.named_parameters(), {.lr = 1e-2});
    const auto masters = master.parameters(), lows = low.parameters();
    for (int step = 0; step < kSteps; ++step) {
      {
        NoGrad off;
        for (size_t i = 0; i < lows.size(); ++i) Tensor(lows[i]).copy_(masters[i]);
      }
      std::vector<std::vector<Tensor>> grads(world);
      for (int r = 0; r < world; ++r) {
        low.zero_grad();
        const Tensor loss = nn::call(low, random_input({4, 16}, r, step).to(compute)).sum();
        if (r == 0) losses.push_back(loss.item());
        loss.backward();
        for (auto& p : lows) grads[r].push_back(to_raw(p.grad().detach(), reduce));
      }
      NoGrad off;
      for (size_t i = 0; i < masters.size(); ++i) {
        // Float16 is halved before the exchange, of two ranks and of four.
        const double before = reduce == kFloat16 ? 2 : 1;
        std::vector<Tensor> g;
        for (int r = 0; r < world; ++r) g.push_back(grads[r][i] / before);
        const Tensor sum = world == 2 ? g[0] + g[1] : (g[0] + g[1]) + (g[2] + g[3]);
        masters[i].set_grad(to_raw(sum, kFloat32) * (before / world));
      }
      adam.step();
    }
    for (auto& [name, p] : master.named_parameters()) {
      const Tensor c = contiguous_raw(p.detach());
      values[name] = {c.data<float>(), c.data<float>() + c.numel()};
    }
  });
  return values;
}

struct Case {
  const char* name;
  MixedPrecision precision;
  DType compute, reduce;
};
class FsdpPrecision : public testing::TestWithParam<Case> {};

TEST_P(FsdpPrecision, M_001_M_002_M_003_EqualsTheReferenceByHand) {
  const Case c = GetParam();
  for (int world : {2, 4}) {
    std::vector<double> losses;
    const auto expected = by_hand(c.compute, c.reduce, world, losses);
    for (auto k : kStrategies) {
      FsdpOptions o{.auto_wrap_policy = module_wrap_policy<Mlp>(),
                    .sharding_strategy = k,
                    .mixed_precision = c.precision};
      const Result got = train(three_mlps(), fsdp_way(o), world, [&](Trainee& t) {
        for (auto& u : t.fsdp->units())
          for (auto& g : u->groups()) {
            EXPECT_EQ(g.master, kFloat32);
            EXPECT_EQ(g.compute, c.compute);
            EXPECT_EQ(g.bucket->reduced_bytes(), g.layout->padded() * size_of(c.reduce));
          }
        for (auto& p : t.stepped()) {
          EXPECT_EQ(p.dtype(), kFloat32);
          EXPECT_TRUE(!p.grad().defined() || p.grad().dtype() == kFloat32);
        }
        // T-18: moments too.
        for (auto& [name, s] : t.optimizers[0]->state_dict())
          if (name.find("exp_avg") != std::string::npos) {
            EXPECT_EQ(s.dtype(), kFloat32) << name;
          }
        EXPECT_EQ(static_cast<ThreeMlps&>(t.module()).seen, c.compute);
      });
      EXPECT_EQ(got.parameters, expected) << world << " " << name_of(k);
      EXPECT_EQ(got.losses[0], losses);
    }
  }
}
INSTANTIATE_TEST_SUITE_P(
    Dtypes, FsdpPrecision,
    testing::Values(
        Case{"M_001_bf16", {.param_dtype = kBFloat16}, kBFloat16, kBFloat16},
        Case{"M_001_fp16", {.param_dtype = kFloat16}, kFloat16, kFloat16},
        Case{"M_002_bf16_sums_in_float32",
             {.param_dtype = kBFloat16, .reduce_dtype = kFloat32},
             kBFloat16,
             kFloat32},
        Case{"M_003_float32_sums_in_bf16", {.reduce_dtype = kBFloat16}, kFloat32, kBFloat16}),
    [](const auto& p) { return p.param.name; });

class SeesDtypes : public nn::Module {
 public:
  SeesDtypes() : table(add<nn::Embedding>("table", 10, 6)), head(add<nn::Linear>("head", 6, 4)) {}
  Tensor forward(const Tensor& ids, const Tensor& weights) {
    EXPECT_EQ(ids.dtype(), kInt64);
    seen = weights.dtype();
    return head(table(ids) * weights);
  }
  nn::Child<nn::Embedding> table;
  nn::Child<nn::Linear> head;
  DType seen = kFloat64;
};

TEST(FsdpPrecision, M_004_IntegersAreNeverCast) {
  for (const MixedPrecision& p :
       {MixedPrecision{.param_dtype = kBFloat16}, MixedPrecision{.reduce_dtype = kBFloat16}})
    run_ranks(2, [&](int rank) {
      SeesDtypes m;
      FullyShardedDataParallel fsdp(m, {.mixed_precision = p});
      optim::SGD sgd(fsdp.parameters(), {.lr = 0.1});
      for (int step = 0; step < 6; ++step) {
        const Tensor loss =
            fsdp(random_ids({3, 2}, 10, rank, step), random_input({3, 2, 6}, rank, step)).sum();
        const DType compute = p.param_dtype.value_or(kFloat32);
        EXPECT_EQ(loss.dtype(), compute);
        EXPECT_EQ(m.seen, compute);
        loss.backward();
        sgd.step();
        sgd.zero_grad();
      }
    });
}

// Records the dtypes that it is called with.
class Sees : public nn::Module {
 public:
  explicit Sees(bool norm = false) : layer(add<nn::Linear>("layer", 4, 4)) {
    if (norm) this->norm = add<nn::LayerNorm>("norm", 4);
  }
  Tensor forward(const Tensor& x, const Tensor& y = {}) {
    seen.push_back(x.dtype());
    if (y.defined()) seen.push_back(y.dtype());
    const Tensor h = layer(x.to(layer->weight->dtype()));
    return norm.get() ? norm(h) : h;
  }
  nn::Child<nn::Linear> layer;
  nn::Child<nn::LayerNorm> norm;
  std::vector<DType> seen;
};
class Parent : public nn::Module {
 public:
  explicit Parent(bool makes_one)
      : first(add<Sees>("first")), second(add<Sees>("second")), makes_one(makes_one) {}
  Tensor forward(const Tensor& x) {
    seen.push_back(x.dtype());
    if (!makes_one) return second(first(x));
    return second(x, ones({2, 4}));
  }
  nn::Child<Sees> first, second;
  bool makes_one;
  std::vector<DType> seen;
};
using DTypes = std::vector<DType>;

TEST(FsdpPrecision, M_005_OnlyTheSecondChildInFloat16) {
  for (bool casts : {true, false})
    run_ranks(2, [=](int rank) {
      Parent m(false);
      FsdpOptions o{.auto_wrap_policy = module_wrap_policy<Sees>()};
      o.unit_options = [=](nn::Module& unit, FsdpOptions& options) {
        if (unit.full_name() == "second")
          options.mixed_precision = {.param_dtype = kFloat16, .cast_forward_inputs = casts};
      };
      FullyShardedDataParallel fsdp(m, o);
      fsdp(random_input({2, 4}, rank, 0)).sum().backward();
      EXPECT_EQ(m.seen, DTypes{kFloat32});
      EXPECT_EQ(m.first->seen, DTypes{kFloat32});
      EXPECT_EQ(m.second->seen, DTypes{casts ? kFloat16 : kFloat32});
      for (const Tensor& p : fsdp.parameters())
        if (p.numel()) {
          EXPECT_TRUE(p.grad().defined());
        }
    });
}

TEST(FsdpPrecision, M_006_TensorsMadeInsideTheParent) {
  for (bool casts : {true, false})
    run_ranks(2, [=](int rank) {
      Parent m(true);
      FsdpOptions o{.auto_wrap_policy = module_wrap_policy<Sees>(),
                    .mixed_precision = {.param_dtype = kFloat16}};
      o.unit_options = [=](nn::Module& unit, FsdpOptions& options) {
        if (unit.full_name() == "second") options.mixed_precision.cast_forward_inputs = casts;
      };
      FullyShardedDataParallel fsdp(m, o);
      fsdp(random_input({2, 4}, rank, 0)).sum().backward();
      EXPECT_EQ(m.second->seen, (DTypes{kFloat16, casts ? kFloat16 : kFloat32}));
    });
}

TEST(FsdpPrecision, M_007_CheckpointedUnitSeesTheSameTwice) {
  run_ranks(2, [](int rank) {
    Parent m(false);
    nn::apply_activation_checkpointing(m, [](nn::Module& u) { return dynamic_cast<Sees*>(&u); });
    FullyShardedDataParallel fsdp(m, {.auto_wrap_policy = module_wrap_policy<Sees>(),
                                      .mixed_precision = {.param_dtype = kBFloat16}});
    Tensor x = random_input({2, 4}, rank, 0);
    fsdp(x).sum().backward();
    EXPECT_EQ(m.first->seen, (DTypes{kBFloat16, kBFloat16}));
    EXPECT_EQ(m.second->seen, (DTypes{kBFloat16, kBFloat16}));
  });
}

class Norms : public nn::Module {
 public:
  Norms()
      : a(add<nn::Linear>("a", 32, 32)),
        norm(add<nn::LayerNorm>("norm", 32)),
        b(add<nn::Linear>("b", 32, 32)) {}
  Tensor forward(const Tensor& x) { return b(norm(a(x))); }
  nn::Child<nn::Linear> a;
  nn::Child<nn::LayerNorm> norm;
  nn::Child<nn::Linear> b;
};

TEST(FsdpPrecision, M_008_NormsAsUnits) {
  for (DType dtype : {kBFloat16, kFloat16})
    run_ranks(2, [=](int rank) {
      Norms m;
      FullyShardedDataParallel fsdp(
          m, {.auto_wrap_policy = lambda_auto_wrap_policy([](nn::Module&) { return true; }),
              .mixed_precision = {.param_dtype = dtype}});
      const Tensor y = fsdp(random_input({2, 32}, rank, 0));
      EXPECT_EQ(y.dtype(), dtype);
      y.to(kFloat32).sum().backward();
      for (auto& [name, p] : fsdp.named_parameters())
        if (name.starts_with("norm") && p.numel() > 0) {
          EXPECT_TRUE(p.grad().defined());
        }
    });
}

class WithBuffers : public nn::Module {
 public:
  WithBuffers()
      : layer(add<nn::Linear>("layer", 3, 3)),
        scale(buffer("scale", full({3}, 0.1, kFloat64))),
        count(buffer("count", full({1}, 7, kInt64))) {}
  Tensor forward(const Tensor& x) {
    seen = scale->dtype();
    return layer(x) * scale.get().to(x.dtype());
  }
  nn::Child<nn::Linear> layer;
  nn::Buffer scale, count;
  DType seen = kInt64;
};

TEST(FsdpPrecision, M_010_BufferDtype_T_18) {
  run_ranks(2, [](int rank) {
    WithBuffers m;
    FullyShardedDataParallel fsdp(
        m, {.mixed_precision = {.param_dtype = kFloat16, .buffer_dtype = kFloat16}});
    EXPECT_EQ(m.scale->dtype(), kFloat64);
    fsdp(random_input({2, 3}, rank, 0)).sum().backward();
    EXPECT_EQ(m.seen, kFloat16);
    EXPECT_EQ(m.scale->dtype(), kFloat16);
    EXPECT_EQ(m.count->dtype(), kInt64);
    {
      const auto summoned = fsdp.summon_full_params();
      EXPECT_EQ(m.scale->dtype(), kFloat16);
    }
    const nn::StateDict state = fsdp.full_state_dict();
    if (rank == 0) {
      EXPECT_EQ(state.find("scale")->dtype(), kFloat64);
      EXPECT_EQ(state.find("count")->dtype(), kInt64);
    }
    EXPECT_EQ(m.scale->dtype(), kFloat16);
  });
}

TEST(FsdpPrecision, M_012_LowPrecisionGradientsAreKeptOnRequest) {
  for (bool keep : {false, true})
    run_ranks(2, [=](int rank) {
      Mlp m(8);
      FullyShardedDataParallel fsdp(
          m, {.mixed_precision = {.param_dtype = kBFloat16, .keep_low_precision_grads = keep}});
      for (int step = 0; step < 2; ++step) {
        fsdp(random_input({2, 8}, rank, step)).sum().backward();
        for (auto& p : fsdp.parameters())
          if (p.numel() > 0) {
            EXPECT_EQ(p.grad().dtype(), keep ? kBFloat16 : kFloat32);
          }
      }
    });
}

TEST(FsdpPrecision, WrappingMakesBf16ProductsThoseOfRank0) {
  if (!has_native_bf16_products()) GTEST_SKIP() << "there are converted products alone";
  for (const auto first : {Bf16Products::kNative, Bf16Products::kConverted}) {
    const auto second =
        first == Bf16Products::kNative ? Bf16Products::kConverted : Bf16Products::kNative;
    dist::run_processes(2, [=](int rank) {
      const Bf16Products mine = rank == 0 ? first : second;
      const auto after = [&](const std::function<void(nn::Module&)>& wrap, DType dtype) {
        set_bf16_products(mine);
        Mlp m(4);
        m.to(dtype);
        wrap(m);
        return bf16_products();
      };
      const auto sharded = [](const MixedPrecision& precision) {
        return [=](nn::Module& m) { FsdpModule(m, {.mixed_precision = precision}); };
      };
      const auto replicated = [](nn::Module& m) { dist::DdpReducer(m, {}); };
      EXPECT_EQ(after(sharded({.param_dtype = kBFloat16}), kFloat32), first);
      EXPECT_EQ(after(sharded({}), kBFloat16), first);
      EXPECT_EQ(after(replicated, kBFloat16), first);
      // Nobody is asked where there are no such products.
      EXPECT_EQ(after(sharded({}), kFloat32), mine);
      EXPECT_EQ(after(replicated, kFloat32), mine);
    });
  }
}

TEST(FsdpPrecision, M_013_DtypesThatAreNone) {
  run_ranks(1, [](int) {
    Mlp m(4);
    expect_error([&] { FsdpModule(m, {.mixed_precision = {.param_dtype = kInt64}}); },
                 {"param_dtype", "int64", "bfloat16", "float32"});
    expect_error([&] { FsdpModule(m, {.mixed_precision = {.reduce_dtype = kBool}}); },
                 {"reduce_dtype", "bool"});
    expect_error([&] { FsdpModule(m, {.mixed_precision = {.buffer_dtype = kInt64}}); },
                 {"buffer_dtype", "int64"});
  });
}

}  // namespace
}  // namespace sherd::scenario
