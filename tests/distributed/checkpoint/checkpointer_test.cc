// Training that was saved by one world goes on in another. Ids are rows of the lists of scenarios
// and traps.
#include "distributed/checkpoint/checkpointer.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "autograd/grad_mode.h"
#include "core/allocator.h"
#include "core/generator.h"
#include "core/safetensors.h"
#include "core/threads.h"
#include "distributed/checkpoint/model_state_dict.h"
#include "distributed/ddp.h"
#include "distributed/fsdp.h"
#include "nn/nn.h"
#include "optim/adamw.h"
#include "optim/sgd.h"
#include "tests/distributed/scenario.h"

namespace sherd::dist {
namespace {

namespace fs = std::filesystem;
using scenario::Gpt;

class Checkpoints : public testing::Test {
 protected:
  void SetUp() override {
    const auto* t = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = fs::path(testing::TempDir()) / concat("checkpointer-", t->name(), "-", int(getpid()));
    fs::remove_all(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string folder(const char* name = "run") const { return folder_ / name; }

  fs::path folder_;
};

std::string error_text(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}
void expect_parts(const std::string& text, const std::vector<std::string>& parts) {
  for (auto& part : parts) EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
}

// How a model is spread over ranks.
struct Spread {
  int world;
  const char* name;
  std::optional<FsdpOptions> fsdp;  // none: DDP, or one plain process
};
FsdpOptions blocks(ShardingStrategy s = ShardingStrategy::kFullShard) {
  return {.auto_wrap_policy = module_wrap_policy<scenario::GptBlock>(), .sharding_strategy = s};
}

// A model and what trains it, on one rank of a spread. The batch is 24 sequences over all ranks.
class Rank {
 public:
  Rank(const Spread& spread, uint64_t seed, const scenario::GptOptions& o = {.layers = 2})
      : world_(spread.world), vocab_(o.vocab) {
    manual_seed(seed);
    model = std::make_unique<Gpt>(o);
    if (spread.fsdp) {
      FsdpOptions options = *spread.fsdp;
      if (is_hybrid(options.sharding_strategy)) options.device_mesh = scenario::hybrid_mesh(2);
      fsdp = std::make_unique<FsdpModule>(*model, options);
    } else if (world_ > 1) {
      ddp = std::make_unique<DistributedDataParallel<Gpt>>(*model);
    } else {
      model->materialize();
    }
    optimizer =
        std::make_unique<optim::AdamW>(fsdp ? fsdp->named_parameters() : model->named_parameters(),
                                       optim::AdamWOptions{.lr = 1e-2});
    scheduler = std::make_unique<optim::StepLR>(*optimizer, optim::StepOptions{.step_size = 2});
  }

  double loss(int step, bool backward) {
    const int rank = world_ > 1 ? dist::rank() : 0;
    const int64_t mine = 24 / world_;
    const Tensor all = scenario::random_ids({24, 9}, vocab_, 0, step),
                 ids = all.narrow(0, rank * mine, mine);
    Tensor l = F::cross_entropy(nn::call(*model, ids.narrow(1, 0, 8)).view({-1, vocab_}),
                                ids.narrow(1, 1, 8).reshape({-1}));
    if (backward) {
      optimizer->zero_grad();
      l.backward();
    }
    Tensor sum = tensor<double>({l.item() / world_});
    if (world_ > 1) all_reduce(sum);
    return sum.item();
  }
  double train(int step) {
    const double l = loss(step, true);
    optimizer->step();
    scheduler->step();
    return l;
  }

  TrainingState state() {
    return {.model = fsdp ? ModelState(*fsdp)
                          : ModelState(*model, world_ > 1 ? default_group() : nullptr),
            .optimizer = optimizer.get(),
            .scheduler = scheduler.get()};
  }
  // Everything, in PyTorch's names and whole shapes, as bytes; on rank 0.
  std::string everything(const std::string& scratch) {
    TrainingState s = state();
    save_weights(scratch + "-model", s.model);
    save_optimizer(scratch + "-optimizer", s.model, *optimizer);
    if (!s.model.is_rank0()) return "";
    std::string text;
    for (auto* file : {"-model", "-optimizer"})
      for (auto& [name, t] : load_safetensors(scratch + file))
        text += concat(name, t.dtype(), t.sizes(),
                       std::string_view(t.numel() ? t.bytes() : "", size_t(t.nbytes())));
    return text;
  }

  std::unique_ptr<Gpt> model;
  std::unique_ptr<FsdpModule> fsdp;
  std::unique_ptr<DistributedDataParallel<Gpt>> ddp;
  std::unique_ptr<optim::AdamW> optimizer;
  std::unique_ptr<optim::StepLR> scheduler;

 private:
  int world_;
  int64_t vocab_;
};

void in_world(const Spread& spread, const std::function<void(Group, int)>& f) {
  if (spread.world == 1 && !spread.fsdp)
    f(nullptr, 0);
  else
    run_ranks(spread.world, [&](int rank) { f(default_group(), rank); });
}

const std::vector<Spread>& spreads() {
  static const std::vector<Spread> all{
      {1, "one process", {}},
      {1, "FULL_SHARD", blocks()},
      {2, "FULL_SHARD", blocks()},
      {3, "FULL_SHARD", blocks()},
      {8, "FULL_SHARD", blocks()},
      {4, "root only", FsdpOptions{}},
      {3, "SHARD_GRAD_OP", blocks(ShardingStrategy::kShardGradOp)},
      {2, "NO_SHARD", blocks(ShardingStrategy::kNoShard)},
      {2, "DDP", {}},
      {4, "DDP", {}},
      {4, "HYBRID_SHARD", blocks(ShardingStrategy::kHybridShard)},
      {8, "HYBRID_SHARD_ZERO2", blocks(ShardingStrategy::kHybridShardZero2)},
  };
  return all;
}

// Saved at 4 ranks, FULL_SHARD, AdamW.
TEST_F(Checkpoints, C_002_C_011_H_007_T_32_LoadsInAnyOtherWorld) {
  fs::create_directories(folder_);
  const Spread saver{4, "FULL_SHARD", blocks()};
  std::string saved;
  std::vector<double> expected;
  run_ranks(4, [&](int rank) {
    Rank r(saver, 1);
    for (int step = 0; step < 3; ++step) r.train(step);
    TrainingState s = r.state();
    s.step = 3;
    s.user = {{"note", "mine"}};
    Checkpointer(folder(), default_group()).save(s);
    const std::string all = r.everything(folder("a"));
    if (rank == 0) saved = all;
    for (int step = 3; step < 6; ++step) {
      const double l = r.train(step);
      if (rank == 0) expected.push_back(l);
    }
  });
  for (const Spread& spread : spreads())
    in_world(spread, [&](Group group, int rank) {
      SCOPED_TRACE(concat(spread.world, " ", spread.name));
      Rank r(spread, 99);
      TrainingState s = r.state();
      Checkpointer c(folder(), group);
      EXPECT_EQ(c.load_latest(s), folder() + "/step-000003");
      EXPECT_EQ(s.step, 3);
      EXPECT_EQ(s.user.at("note"), "mine");
      EXPECT_EQ(r.scheduler->last_epoch(), 3);
      const std::string all = r.everything(folder("b"));
      if (rank == 0) {
        EXPECT_TRUE(all == saved);
      }
      for (int step = 3; step < 6; ++step) {
        const double l = r.train(step);
        EXPECT_NEAR(l, expected[size_t(step - 3)], step == 3 ? 1e-6 : 1e-5) << step;
      }
    });
}

// The other way: what each of them saves, four ranks load, with the same bytes.
TEST_F(Checkpoints, H_007_T_32_AnyWorldSavesForAnyOther) {
  fs::create_directories(folder_);
  for (const Spread& spread : spreads()) {
    std::string saved;
    fs::remove_all(folder());
    in_world(spread, [&](Group group, int rank) {
      Rank r(spread, 1);
      r.train(0);
      TrainingState s = r.state();
      Checkpointer(folder(), group).save(s);
      const std::string all = r.everything(folder("a"));
      if (rank == 0) saved = all;
    });
    run_ranks(3, [&](int rank) {
      SCOPED_TRACE(concat(spread.world, " ", spread.name));
      Rank r({3, "", blocks()}, 5);
      TrainingState s = r.state();
      Checkpointer(folder(), default_group()).load(folder() + "/step-000000", s);
      const std::string all = r.everything(folder("b"));
      if (rank == 0) {
        EXPECT_TRUE(all == saved);
      }
    });
  }
}

TEST_F(Checkpoints, C_003_AsynchronousSaveHasTheValuesOfItsMoment) {
  fs::create_directories(folder_);
  std::vector<std::string> then(4);
  run_ranks(2, [&](int rank) {
    Rank r({2, "", blocks()}, 1);
    Checkpointer c(folder(), default_group());
    for (int step = 0; step < 4; ++step) {
      r.train(step);
      const std::string all = r.everything(folder("a"));
      if (rank == 0) then[size_t(step)] = all;
      TrainingState s = r.state();
      s.step = step;
      c.async_save(s);
      // Training goes on, in the memory that is being saved.
    }
    for (int step = 4; step < 7; ++step) r.train(step);
    c.wait();
    EXPECT_FALSE(c.is_saving());
  });
  EXPECT_EQ(checkpoint_steps(folder()), (std::vector<int64_t>{0, 1, 2, 3}));
  for (int64_t step = 0; step < 4; ++step) {
    Rank r({1, "", {}}, 3);
    TrainingState s = r.state();
    Checkpointer(folder(), nullptr).load(folder() + "/" + checkpoint_name(step), s);
    EXPECT_TRUE(r.everything(folder("b")) == then[size_t(step)]) << step;
  }
}

// It returns before the data are on the disk; two are never in flight; an error comes back at the
// next save, or at the end, on every rank.
TEST_F(Checkpoints, C_003_C_017_AsynchronousErrorsComeBack) {
  run_ranks(2, [&](int rank) {
    Rank r({2, "", blocks()}, 1);
    std::atomic<bool> go = false, fails = false;
    std::atomic<int> running = 0;
    std::vector<std::string> reports;
    CheckpointerOptions options;
    options.report = [&](const std::string& line) { reports.push_back(line); };
    options.on_stage = [&](const std::string& stage) {
      if (stage != "write") return;
      EXPECT_EQ(++running, 1);
      while (!go) std::this_thread::yield();
      --running;
      if (fails && rank == 1) fail("no room on disk");
    };
    {
      Checkpointer c(folder(), default_group(), options);
      TrainingState s = r.state();
      s.step = 1;
      c.async_save(s);
      EXPECT_TRUE(c.is_saving());
      EXPECT_TRUE(checkpoint_steps(folder()).empty());
      barrier();
      go = true;
      s.step = 2;
      c.async_save(s);
      c.wait();
      EXPECT_EQ(checkpoint_steps(folder()), (std::vector<int64_t>{1, 2}));
      barrier();
      fails = true;
      s.step = 3;
      c.async_save(s);
      s.step = 4;
      EXPECT_EQ(error_text([&] { c.save(s); }), "rank 1: no room on disk");
      fails = false;
      barrier();
      c.save(s);  // and it goes on
      EXPECT_EQ(checkpoint_steps(folder()), (std::vector<int64_t>{1, 2, 4}));
      barrier();
      fails = true;
      s.step = 5;
      c.async_save(s);
    }
    ASSERT_EQ(reports.size(), rank == 0 ? 1u : 0u);
    if (rank == 0) expect_parts(reports[0], {"rank 1: no room on disk"});
    EXPECT_EQ(checkpoint_steps(folder()), (std::vector<int64_t>{1, 2, 4}));
  });
}

// Ranks outside the group know nothing of its saves, and what they make with the others later is
// theirs all the same.
TEST_F(Checkpoints, C_003_AsynchronousSavesOfSomeRanks) {
  run_ranks(3, [&](int rank) {
    const Group pair = new_group({0, 2});
    if (pair->rank() >= 0) {
      nn::Linear model(3, 4);
      for (const char* name : {"a", "b"}) {
        Checkpointer c(folder(name), pair);
        for (int64_t step : {1, 2}) c.async_save({.model = ModelState(model, pair), .step = step});
      }
    }
    const Group all = new_group({0, 1, 2});
    Tensor sum = full({1}, 1.0);
    all_reduce(sum, ReduceOp::kSum, {.group = all});
    EXPECT_EQ(sum.item<float>(), 3) << rank;
  });
  for (const char* name : {"a", "b"})
    EXPECT_EQ(checkpoint_steps(folder(name)), (std::vector<int64_t>{1, 2}));
}

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

// A checkpoint of weights alone: a schedule and a position in the data begin anew, and that is said.
// A position that does not fit is an error before anything is changed.
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
  expect_parts(error_text([&] { c.load_latest(s); }), {"12 samples", "13"});
  EXPECT_TRUE(r.everything(folder("b")) == before);
  EXPECT_EQ(s.step, 0);
  // The loader fits, the model does not.
  data::DataLoader loader(samples, {.batch_size = 2});
  begin(loader);
  const data::LoaderState at = loader.state_dict();
  nn::Linear small(2, 2);
  TrainingState t{.model = ModelState(small, nullptr), .loader = &loader};
  expect_parts(error_text([&] { c.load_latest(t); }), {"weight", "missing"});
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

TEST_F(Checkpoints, C_004_OnlyWhatIsWantedIsRead) {
  run_ranks(2, [&](int) {
    Rank r({2, "", blocks()}, 1);
    r.train(0);
    Checkpointer(folder(), default_group()).save(r.state());
  });
  const Checkpoint c = open_checkpoint(folder() + "/step-000000");
  run_ranks(4, [&](int) {
    Rank r({4, "", blocks()}, 2);
    TrainingState s = r.state();
    ShardReader weights(c);
    load_state(weights, s.model, nullptr);
    int64_t mine = 0, block = 0;
    for (auto& p : s.model.parts()) {
      mine += 4 * (p.end - p.begin);
      if (p.name.starts_with("layers.1.")) block += 4 * (p.end - p.begin);
    }
    EXPECT_EQ(weights.bytes_read(), mine);
    ShardReader some(c);
    const auto other = [](const std::string& name) { return name.starts_with("layers.1."); };
    load_state(some, s.model, nullptr, {.only = other});
    EXPECT_EQ(some.bytes_read(), block);
    // With the optimizer: two moments more, and its scalars.
    ShardReader all(c);
    load_state(all, s.model, r.optimizer.get());
    EXPECT_GE(all.bytes_read(), 3 * mine);
    EXPECT_LE(all.bytes_read(), 3 * mine + 16 * int64_t(s.model.parts().size()) + 200);
  });
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
    const std::string text = error_text([&] { c.load_latest(s); });
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
    expect_parts(error_text([&] { set_model_state_dict(model, other); }),
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
    texts[size_t(rank)] = error_text([&] { Checkpointer(folder(), default_group()).save(s); });
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
      expect_parts(error_text([&] { c.load(folder() + step, s); }), {"group"});
    });
}

TEST_F(Checkpoints, C_018_NarrowerDtypesOnRequest) {
  Rank r({1, "", {}}, 1);
  TrainingState s = r.state();
  Checkpointer(folder(), nullptr).save(s);
  const Checkpoint c = open_checkpoint(folder() + "/step-000000");
  ShardReader reader(c);
  Gpt half({.layers = 2});
  half.to(kBFloat16);
  ModelState narrow(half, nullptr);
  expect_parts(error_text([&] { load_state(reader, narrow, nullptr, {.allow_narrowing = false}); }),
               {"tokens.weight", "dtype mismatch", "float32", "bfloat16"});
  load_state(reader, narrow, nullptr);
  EXPECT_EQ(to_raw(half.norm->weight, kFloat32).data<float>()[0], 1);
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

TEST_F(Checkpoints, T_33_TheLastWholeOneIsTakenAndThatIsSaid) {
  run_ranks(2, [&](int) {
    Rank r({2, "", blocks()}, 1);
    Checkpointer c(folder(), default_group(), {.keep_last = 3});
    for (int step = 0; step < 5; ++step) {
      r.train(step);
      TrainingState s = r.state();
      s.step = step;
      c.save(s);
    }
  });
  EXPECT_EQ(checkpoint_steps(folder()), (std::vector<int64_t>{2, 3, 4}));
  // Of the newest a byte in the data of rank 1's file is changed, the next is cut short.
  const auto file = [&](const char* step) {
    return folder() + "/" + step + "/rank-00001-of-00002.safetensors";
  };
  const auto bytes = fs::file_size(file("step-000004"));
  {
    std::fstream f(file("step-000004"), std::ios::in | std::ios::out | std::ios::binary);
    f.seekp(int64_t(bytes) - 3);
    f.put('\x5a');
  }
  fs::resize_file(file("step-000003"), bytes - 1);
  for (int world : {2, 3})
    run_ranks(world, [&](int rank) {
      std::vector<std::string> lines;
      CheckpointerOptions options;
      options.report = [&](const std::string& line) { lines.push_back(line); };
      Rank r({world, "", blocks()}, 7);
      TrainingState s = r.state();
      Checkpointer c(folder(), default_group(), options);
      EXPECT_EQ(c.load_latest(s), folder() + "/step-000002");
      EXPECT_EQ(s.step, 2);
      ASSERT_EQ(lines.size(), rank == 0 ? 2u : 0u);
      if (rank > 0) return;
      expect_parts(lines[0], {"step-000004", file("step-000004"), "checksum"});
      expect_parts(lines[1], {"step-000003", file("step-000003")});
    });
  fs::remove(folder() + "/step-000002/index.json");
  run_ranks(2, [&](int) {
    Rank r({2, "", blocks()}, 7);
    TrainingState s = r.state();
    CheckpointerOptions quiet;
    quiet.report = [](const std::string&) {};
    Checkpointer c(folder(), default_group(), quiet);
    expect_parts(error_text([&] { c.load_latest(s); }), {"none of the 3 checkpoints", folder()});
    Checkpointer none(folder("other"), default_group());
    EXPECT_FALSE(none.load_latest(s));
  });
}

TEST_F(Checkpoints, T_35_RandomStateIsARanksOwn) {
  std::vector<float> expected(3);
  run_ranks(3, [&](int rank) {
    Rank r({3, "", blocks()}, 1);
    default_generator().seed(11, uint64_t(rank));
    rand({5});
    Checkpointer(folder(), default_group()).save(r.state());
    expected[size_t(rank)] = rand({1}).item<float>();
  });
  EXPECT_NE(expected[0], expected[1]);
  run_ranks(3, [&](int rank) {
    Rank r({3, "", blocks()}, 1);
    TrainingState s = r.state();
    Checkpointer(folder(), default_group()).load_latest(s);
    EXPECT_EQ(rand({1}).item<float>(), expected[size_t(rank)]);
  });
}

// The full format holds the same, and loads alike.
TEST_F(Checkpoints, FullFormat) {
  fs::create_directories(folder_);
  std::string saved;
  run_ranks(2, [&](int rank) {
    Rank r({2, "", blocks()}, 1);
    r.train(0);
    TrainingState s = r.state();
    Checkpointer c(folder(), default_group(), {.format = CheckpointFormat::kFull});
    c.save(s);
    EXPECT_THROW(c.async_save(s), Error);
    const std::string all = r.everything(folder("a"));
    if (rank == 0) saved = all;
  });
  EXPECT_TRUE(fs::exists(folder() + "/step-000000/model.safetensors"));
  run_ranks(3, [&](int rank) {
    Rank r({3, "", blocks()}, 2);
    TrainingState s = r.state();
    Checkpointer c(folder(), default_group());
    ASSERT_TRUE(c.load_latest(s));
    EXPECT_EQ(r.scheduler->last_epoch(), 1);
    const std::string all = r.everything(folder("b"));
    if (rank == 0) {
      EXPECT_TRUE(all == saved);
    }
    Rank other({3, "", blocks()}, 3);
    TrainingState t = other.state();
    load_weights_from(folder() + "/step-000000", t.model);
    load_weights_from(folder() + "/step-000000/model.safetensors", t.model);
    EXPECT_EQ(other.loss(0, false), r.loss(0, false));
  });
  std::fstream f(folder() + "/step-000000/optimizer.safetensors",
                 std::ios::in | std::ios::out | std::ios::binary);
  f.seekp(-3, std::ios::end);
  f.put('\x5a');
  f.close();
  run_ranks(2, [&](int) {
    Rank r({2, "", blocks()}, 2);
    TrainingState s = r.state();
    CheckpointerOptions quiet;
    quiet.report = [](const std::string&) {};
    EXPECT_THROW(Checkpointer(folder(), default_group(), quiet).load_latest(s), Error);
  });
}

// Killed at any moment of a save, also of an asynchronous one: the last whole checkpoint is there.
TEST_F(Checkpoints, T_33_KilledWhileSaving) {
  fs::create_directories(folder_);
  const auto newest = [&] {
    const auto steps = checkpoint_steps(folder());
    return steps.empty() ? -1 : steps.back();
  };
  for (int run = 0; run < 8; ++run) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      set_num_threads(1);  // a pool of threads does not survive a fork
      Rank r({1, "", {}}, 1);
      CheckpointerOptions options{.keep_last = 2};
      options.report = [](const std::string&) {};
      Checkpointer c(folder(), nullptr, options);
      TrainingState s = r.state();
      c.load_latest(s);
      for (;;) {
        r.train(int(s.step));
        ++s.step;
        run % 2 ? c.async_save(s) : c.save(s);
      }
    }
    const int64_t before = newest();
    for (int i = 0; i < 4000 && newest() == before; ++i) usleep(5000);
    usleep(useconds_t(1000 * (run * 7 % 20)));
    kill(child, SIGKILL);
    int status;
    waitpid(child, &status, 0);
    EXPECT_EQ(WTERMSIG(status), SIGKILL);
  }
  const auto steps = checkpoint_steps(folder());
  ASSERT_FALSE(steps.empty());
  // Each of them is whole, and the newest is what an uninterrupted run has.
  for (int64_t step : steps) open_checkpoint(folder() + "/" + checkpoint_name(step));
  Rank resumed({1, "", {}}, 2), whole({1, "", {}}, 1);
  TrainingState s = resumed.state();
  Checkpointer c(folder(), nullptr, {.keep_last = 2});
  ASSERT_TRUE(c.load_latest(s));
  EXPECT_EQ(s.step, steps.back());
  for (int step = 0; step < s.step; ++step) whole.train(step);
  EXPECT_TRUE(resumed.everything(folder("a")) == whole.everything(folder("b"))) << s.step;
  c.save(s);  // what the dead left behind goes
  int entries = 0;
  for (auto& e : fs::directory_iterator(folder()))
    entries += e.path().filename().string().starts_with(".");
  EXPECT_EQ(entries, 0);
}

}  // namespace
}  // namespace sherd::dist
