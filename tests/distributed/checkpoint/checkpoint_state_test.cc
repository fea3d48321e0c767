// What of models and optimizers is in checkpoints and state_dicts. Ids are rows of the lists of
// scenarios and traps.
#include <gtest/gtest.h>

#include <cstring>

#include "autograd/grad_mode.h"
#include "core/allocator.h"
#include "distributed/checkpoint/model_state_dict.h"
#include "optim/sgd.h"
#include "tests/distributed/checkpoint/checkpoint_scenario.h"

namespace sherd::dist {
namespace {

// Buffers that compute in another dtype are stored in the model's own.
TEST_F(Checkpoints, C_018_BuffersKeepTheirDtype) {
  class Scaled : public nn::Module {
   public:
    Scaled() : linear(add<nn::Linear>("linear", 3, 3)), scale(buffer("scale", full({2}, 1.5))) {}
    Tensor forward(const Tensor& x) { return linear(x); }
    nn::Child<nn::Linear> linear;
    nn::Buffer scale;
  };
  fs::create_directories(folder_);
  const FsdpOptions half{.mixed_precision = {.param_dtype = kBFloat16, .buffer_dtype = kBFloat16}};
  run_ranks(2, [&](int rank) {
    Scaled m;
    FullyShardedDataParallel fsdp(m, half);
    ModelState state(fsdp);
    fsdp(scenario::random_input({2, 3}, rank, 0));
    ASSERT_EQ(m.scale->dtype(), kBFloat16);
    save_weights(folder("weights"), state);
    for (auto format : {CheckpointFormat::kSharded, CheckpointFormat::kFull})
      Checkpointer(folder(), default_group(), {.format = format})
          .save({.model = state, .step = int64_t(format)});
    const nn::StateDict all = get_model_state_dict(state);
    if (rank == 0) {
      EXPECT_EQ(all.at("scale").dtype(), kFloat32);
    }
  });
  EXPECT_EQ(load_safetensors(folder("weights")).at("scale").dtype(), kFloat32);
  for (int64_t step : {0, 1}) {
    ShardReader reader(open_checkpoint(folder() + "/" + checkpoint_name(step)));
    EXPECT_EQ(reader.index().tensor("model.scale").dtype, kFloat32);
    run_ranks(2, [&](int rank) {
      Scaled m;
      FullyShardedDataParallel fsdp(m, half);
      fsdp(scenario::random_input({2, 3}, rank, 0));
      Tensor(m.scale.get()).zero_();
      ModelState state(fsdp);
      ShardReader again(open_checkpoint(reader.path()));
      load_state(again, state, nullptr, {.allow_narrowing = false});
      EXPECT_EQ(to_raw(m.scale, kFloat32).data<float>()[0], 1.5f);
      Tensor(m.scale.get()).zero_();
      load_weights(folder("weights"), state);
      EXPECT_EQ(to_raw(m.scale, kFloat32).data<float>()[0], 1.5f);
    });
  }
}

// A checkpoint of weights alone: a schedule and a position in the data begin anew, and that is
// said. A position that does not fit is an error before anything is changed.
TEST_F(Checkpoints, C_019_PartsThatAreMissingOrDoNotFit) {
  fs::create_directories(folder_);
  const data::TensorDataset samples({{"x", zeros({12, 2})}}), more({{"x", zeros({13, 2})}});
  const auto begin = [](data::DataLoader& loader) {
    auto it = loader.begin();
    for (int i = 0; i < 2; ++i) ++it;
  };
  {
    Rank r({1, "", {}}, 1);
    r.train(0);
    TrainingState s = r.state();
    r.everything(folder("a"));
    s.step = 1;
    Checkpointer(folder("weights"), nullptr).save({.model = s.model, .step = 1});
    data::DataLoader loader(samples, {.batch_size = 2});
    begin(loader);
    s.loader = &loader;
    Checkpointer(folder(), nullptr).save(s);
  }
  Rank r({1, "", {}}, 2);
  const std::string before = r.everything(folder("b"));
  std::vector<std::string> lines;
  CheckpointerOptions options;
  options.report = [&](const std::string& line) { lines.push_back(line); };

  data::DataLoader other(more, {.batch_size = 2});
  TrainingState s = r.state();
  s.loader = &other;
  const data::LoaderState position = other.state_dict();
  Checkpointer c(folder(), nullptr, options);
  expect_parts(error_of([&] { c.load_latest(s); }), {"12 samples", "13"});
  EXPECT_TRUE(r.everything(folder("b")) == before);
  EXPECT_EQ(s.step, 0);
  // The loader fits, the model does not.
  data::DataLoader loader(samples, {.batch_size = 2});
  begin(loader);
  const data::LoaderState at = loader.state_dict();
  nn::Linear small(2, 2);
  TrainingState t{.model = ModelState(small, nullptr), .loader = &loader};
  expect_parts(error_of([&] { c.load_latest(t); }), {"weight", "missing"});
  EXPECT_EQ(loader.state_dict(), at);
  EXPECT_EQ(other.state_dict(), position);
  EXPECT_TRUE(lines.empty());

  s.loader = &loader;
  s.optimizer = nullptr;
  Checkpointer weights(folder("weights"), nullptr, options);
  ASSERT_TRUE(weights.load_latest(s));
  ASSERT_EQ(lines.size(), 2u);
  expect_parts(lines[0], {"step-000001", "schedule", "anew"});
  expect_parts(lines[1], {"step-000001", "position in the data", "anew"});
  EXPECT_EQ(s.step, 1);
  EXPECT_EQ(r.scheduler->last_epoch(), 0);
  r.everything(folder("b"));
  EXPECT_TRUE(read_file(folder("b-model")) == read_file(folder("a-model")));
}

TEST_F(Checkpoints, C_005_T_34_AllNamesThatDoNotFitAtOnce) {
  run_ranks(2, [&](int) {
    Rank r({2, "", blocks()}, 1);
    r.train(0);
    Checkpointer(folder(), default_group()).save(r.state());
  });
  run_ranks(3, [&](int) {
    Rank r({3, "", blocks()}, 2, {.layers = 3, .vocab = 11});
    const double before = r.loss(0, false);
    TrainingState s = r.state();
    Checkpointer c(folder(), default_group());
    const std::string text = error_of([&] { c.load_latest(s); });
    expect_parts(text, {"tokens.weight", "output.weight", "[8, 16]", "[11, 16]",
                        "layers.2.norm1.weight", "layers.2.attention.in_proj_weight",
                        "state.tokens.weight.exp_avg", "state.layers.2.ffn.up.weight.group"});
    EXPECT_EQ(r.loss(0, false), before);
  });
  run_ranks(2, [&](int) {
    Rank r({2, "", blocks()}, 2, {.layers = 3});
    TrainingState s = r.state();
    ShardReader reader(open_checkpoint(folder() + "/step-000000"));
    nn::LoadResult result = load_state(reader, s.model, nullptr, {.strict = false});
    EXPECT_EQ(result.missing.size(), 12u);
    for (auto& name : result.missing) EXPECT_TRUE(name.starts_with("layers.2.")) << name;
    EXPECT_TRUE(result.unexpected.empty());
    Rank small({2, "", blocks()}, 2, {.layers = 1});
    TrainingState t = small.state();
    result = load_state(reader, t.model, nullptr, {.strict = false});
    EXPECT_TRUE(result.missing.empty());
    EXPECT_EQ(result.unexpected.size(), 12u);
  });
}

TEST_F(Checkpoints, C_005_FullStateOnRankZeroAndByBroadcast) {
  const auto floats = [](const nn::StateDict& d) {
    std::map<std::string, std::string> all;
    for (auto& [name, t] : d) {
      const Tensor c = contiguous_raw(t);
      all[name] = concat(t.dtype(), t.sizes(), std::string_view(c.bytes(), size_t(c.nbytes())));
    }
    return all;
  };
  nn::StateDict saved;
  for (const Spread& spread : {Spread{3, "FULL_SHARD", blocks()}, {2, "DDP", {}}}) {
    run_ranks(spread.world, [&](int rank) {
      Rank r(spread, 1);
      r.train(0);
      const nn::StateDict all = get_model_state_dict(r.state().model);
      EXPECT_EQ(all.size() > 0, rank == 0);
      if (rank == 0) saved = all;
    });
    for (const Spread& other : spreads())
      in_world(other, [&](Group, int rank) {
        Rank r(other, 2);
        const ModelState model = r.state().model;
        set_model_state_dict(model, rank == 0 ? saved : nn::StateDict());
        const nn::StateDict all = get_model_state_dict(model);
        if (rank == 0) {
          EXPECT_TRUE(floats(all) == floats(saved)) << other.name;
        }
      });
  }
  run_ranks(2, [&](int rank) {
    Rank r({2, "", blocks()}, 2);
    const ModelState model = r.state().model;
    nn::StateDict other;
    if (rank == 0) {
      for (auto& [name, t] : saved)
        if (name != "norm.bias") other.set(name, t);
      other.set("stranger", zeros({2}));
    }
    const double before = r.loss(0, false);
    expect_parts(error_of([&] { set_model_state_dict(model, other); }),
                 {"norm.bias", "stranger", "missing", "unexpected"});
    EXPECT_EQ(r.loss(0, false), before);
    const nn::LoadResult result = set_model_state_dict(model, other, false);
    EXPECT_EQ(result.missing, std::vector<std::string>{"norm.bias"});
    EXPECT_EQ(result.unexpected, std::vector<std::string>{"stranger"});
    EXPECT_NE(r.loss(0, false), before);
  });
}

TEST_F(Checkpoints, C_006_RecomputedBlocksHaveTheSameNames) {
  fs::create_directories(folder_);
  for (bool source : {false, true}) {
    std::string saved;
    run_ranks(2, [&](int rank) {
      Rank r({2, "", blocks()}, 1, {.layers = 2, .checkpointed = source});
      r.train(0);
      Checkpointer(folder(), default_group()).save(r.state());
      const std::string all = r.everything(folder("a"));
      if (rank == 0) saved = all;
    });
    run_ranks(3, [&](int rank) {
      Rank r({3, "", blocks()}, 2, {.layers = 2, .checkpointed = !source});
      TrainingState s = r.state();
      Checkpointer(folder(), default_group()).load_latest(s);
      const std::string all = r.everything(folder("b"));
      if (rank == 0) {
        EXPECT_TRUE(all == saved);
      }
    });
  }
}

// Full weights on rank 0's host, the model declared only: memory stays near the pieces.
TEST_F(Checkpoints, C_021_NoSecondFullCopy) {
  const auto make = [] {
    return std::make_unique<nn::Sequential>(nn::Linear(300, 300), nn::Linear(300, 300),
                                            nn::Linear(300, 300), nn::Linear(300, 300));
  };
  nn::StateDict saved;
  {
    manual_seed(1);
    const auto model = make();
    model->materialize();
    saved = model->state_dict();
  }
  run_ranks(2, [&](int rank) {
    manual_seed(2);
    const auto model = make();
    FsdpModule fsdp(*model, {.auto_wrap_policy = module_wrap_policy<nn::Linear>()});
    const int64_t before = memory_stats().allocated;
    reset_peak_memory();
    set_model_state_dict(ModelState(fsdp), rank == 0 ? saved : nn::StateDict());
    // One parameter whole, and what a collective needs.
    EXPECT_LE(memory_stats().peak - before, 300 * 300 * 4 + (1 << 20));
    const nn::StateDict all = get_model_state_dict(ModelState(fsdp));
    for (auto& [name, t] : all)
      EXPECT_EQ(std::memcmp(t.bytes(), saved.at(name).bytes(), size_t(t.nbytes())), 0) << name;
  });
}

// Saved by rank 0 of a data parallel run, loaded into one and into the plain model.
TEST_F(Checkpoints, D_012_DataParallelGoesOn) {
  fs::create_directories(folder_);
  std::string expected;
  double loss = 0;
  run_ranks(2, [&](int rank) {
    Rank r({2, "DDP", {}}, 1);
    for (int step = 0; step < 3; ++step) r.train(step);
    Checkpointer(folder(), default_group(), {.format = CheckpointFormat::kFull}).save(r.state());
    for (int step = 3; step < 6; ++step) r.train(step);
    const std::string all = r.everything(folder("a"));
    const double l = r.loss(6, false);
    if (rank == 0) expected = all, loss = l;
    for (auto& [name, p] : r.model->named_parameters()) {
      NoGrad off;
      Tensor q = p;
      q.zero_();
    }
    TrainingState s = r.state();
    Checkpointer(folder(), default_group()).load_latest(s);
    for (int step = 3; step < 6; ++step) r.train(step);
    const std::string again = r.everything(folder("b"));
    if (rank == 0) {
      EXPECT_TRUE(again == expected);
    }
  });
  Rank plain({1, "", {}}, 9);
  TrainingState s = plain.state();
  Checkpointer(folder(), nullptr).load_latest(s);
  for (int step = 3; step < 6; ++step) plain.train(step);
  EXPECT_NEAR(plain.loss(6, false), loss, 1e-5);
}

TEST_F(Checkpoints, C_007_TiedWeightsAreStoredOnceUnderBothNames) {
  fs::create_directories(folder_);
  const scenario::GptOptions tied{.layers = 1, .vocab = 50, .tied = true};
  std::string saved;
  run_ranks(2, [&](int rank) {
    Rank r({2, "DDP", {}}, 1, tied);
    r.train(0);
    Checkpointer(folder(), default_group()).save(r.state());
    const std::string all = r.everything(folder("a"));
    if (rank == 0) saved = all;
  });
  const ShardReader reader(open_checkpoint(folder() + "/step-000000"));
  const auto &in = reader.index().tensor("model.tokens.weight").pieces,
             &out = reader.index().tensor("model.output.weight").pieces;
  ASSERT_EQ(in.size(), 1u);
  EXPECT_EQ(in[0].offset, out[0].offset);
  EXPECT_EQ(in[0].file, out[0].file);
  for (const Spread& spread : {Spread{3, "", blocks()}, {2, "", {}}})
    run_ranks(spread.world, [&](int rank) {
      Rank r(spread, 4, tied);
      TrainingState s = r.state();
      Checkpointer c(folder(), default_group());
      c.load(folder() + "/step-000000", s);
      const std::string all = r.everything(folder("b"));
      if (rank == 0) {
        EXPECT_TRUE(all == saved);
      }
      s.step = spread.world;
      c.save(s);  // and back
    });
  for (int64_t step : {3, 2}) {
    Rank r({1, "", {}}, 4, tied);
    TrainingState s = r.state();
    Checkpointer(folder(), nullptr).load(folder() + "/" + checkpoint_name(step), s);
    EXPECT_TRUE(r.everything(folder("b")) == saved) << step;
  }
}

TEST_F(Checkpoints, C_010_OptimizerStateIsByParameterName) {
  run_ranks(2, [&](int) {
    Rank r({2, "", blocks()}, 1);
    for (int step = 0; step < 3; ++step) r.train(step);
    Checkpointer(folder(), default_group()).save(r.state());
  });
  ShardReader reader(open_checkpoint(folder() + "/step-000000"));
  Rank plain({1, "", {}}, 1);
  for (int step = 0; step < 3; ++step) plain.train(step);
  const nn::StateDict expected = plain.optimizer->state_dict();
  size_t found = 0;
  for (auto& [name, info] : reader.index().tensors) found += name.starts_with("optimizer.");
  EXPECT_EQ(found, expected.size());
  for (auto& [name, t] : expected) {
    const auto& info = reader.index().tensor("optimizer." + name);
    EXPECT_EQ(info.shape, t.sizes()) << name;
    ASSERT_EQ(info.dtype, t.dtype()) << name;
    const Tensor stored = empty(info.shape, info.dtype);
    reader.read("optimizer." + name, 0, t.numel(), stored.bytes());
    if (t.dtype() != kFloat32) {
      EXPECT_EQ(std::memcmp(stored.bytes(), t.bytes(), size_t(t.nbytes())), 0) << name;
    } else {
      for (int64_t i = 0; i < t.numel(); ++i)
        EXPECT_NEAR(stored.data<float>()[i], t.data<float>()[i], 1e-6) << name;
    }
  }
}

TEST_F(Checkpoints, C_012_OptimizersOfDifferentParametersAreRefused) {
  std::vector<std::string> texts(2);
  run_ranks(2, [&](int rank) {
    Rank r({2, "", blocks()}, 1);
    auto named = r.fsdp->named_parameters();
    if (rank == 1) named.pop_back();
    optim::AdamW adam(named, {.lr = 0.1});
    TrainingState s = r.state();
    s.optimizer = &adam;
    texts[size_t(rank)] = error_of([&] { Checkpointer(folder(), default_group()).save(s); });
  });
  EXPECT_EQ(texts[0], texts[1]);
  expect_parts(texts[0], {"output.weight.group", "only on ranks 0"});
  EXPECT_TRUE(checkpoint_steps(folder()).empty());
}

// Never stepped; no moments; an empty second group; groups of their own lr.
TEST_F(Checkpoints, C_013_OptimizersWithoutState) {
  const auto make = [](Rank& r, double lr) {
    std::vector<Tensor> weights, biases;
    for (auto& [name, p] : r.fsdp->named_parameters())
      (name.ends_with("bias") ? biases : weights).push_back(p);
    auto sgd =
        std::make_unique<optim::SGD>(std::vector<optim::SgdGroup>{{.params = weights, .lr = lr},
                                                                  {.params = biases, .lr = 2 * lr}},
                                     optim::SgdOptions{.lr = lr});
    return sgd;
  };
  run_ranks(2, [&](int) {
    Rank r({2, "", blocks(ShardingStrategy::kNoShard)}, 1);
    auto sgd = make(r, 0.25);
    TrainingState s = r.state();
    s.optimizer = sgd.get(), s.scheduler = nullptr;
    Checkpointer c(folder(), default_group());
    c.save(s);
    r.loss(0, true);
    sgd->step();
    s.step = 1;
    c.save(s);
  });
  for (const char* step : {"/step-000000", "/step-000001"})
    run_ranks(3, [&](int) {
      Rank r({3, "", blocks()}, 1);
      auto sgd = make(r, 7);
      TrainingState s = r.state();
      s.optimizer = sgd.get(), s.scheduler = nullptr;
      Checkpointer c(folder(), default_group());
      c.load(folder() + step, s);
      EXPECT_EQ(sgd->lr(0), 0.25);
      EXPECT_EQ(sgd->lr(1), 0.5);
      r.loss(0, true);
      sgd->step();
      // Another kind of optimizer, in other groups.
      s.optimizer = r.optimizer.get();
      expect_parts(error_of([&] { c.load(folder() + step, s); }), {"group"});
    });
}

TEST_F(Checkpoints, C_009_GradientsAreLeftAlone) {
  run_ranks(2, [&](int) {
    Rank r({2, "", blocks()}, 1);
    r.loss(0, true);
    Checkpointer c(folder(), default_group());
    TrainingState s = r.state();
    std::vector<float> before;
    const auto gradients = [&] {
      std::vector<float> all;
      for (auto& p : r.fsdp->parameters())
        if (p.grad().defined()) {
          const Tensor g = contiguous_raw(p.grad());
          all.insert(all.end(), g.data<float>(), g.data<float>() + g.numel());
        }
      return all;
    };
    const auto then = gradients();
    EXPECT_GT(then.size(), 100u);
    c.save(s);
    c.load_latest(s);
    EXPECT_EQ(gradients(), then);
  });
}

// Loading into a model that computed before: full parameters that are kept are not used again.
TEST_F(Checkpoints, C_001_LoadedValuesAreUsed) {
  double loss = 0;
  run_ranks(2, [&](int rank) {
    Rank r({2, "", blocks(ShardingStrategy::kShardGradOp)}, 1);
    Checkpointer(folder(), default_group()).save(r.state());
    const double l = r.loss(0, false);
    if (rank == 0) loss = l;
  });
  run_ranks(2, [&](int) {
    Rank r({2, "", blocks(ShardingStrategy::kShardGradOp)}, 2);
    r.loss(0, true);  // the root keeps its own
    EXPECT_NE(r.loss(0, true), loss);
    TrainingState s = r.state();
    Checkpointer(folder(), default_group()).load_latest(s);
    EXPECT_EQ(r.loss(0, false), loss);
  });
}

}  // namespace
}  // namespace sherd::dist
