// Checkpoints to PyTorch's files and back. tests/goldens/checkpoint is PyTorch's own.
#include "distributed/checkpoint/convert.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "core/generator.h"
#include "core/safetensors.h"
#include "distributed/checkpoint/checkpointer.h"
#include "distributed/ddp.h"
#include "distributed/fsdp.h"
#include "nn/nn.h"
#include "optim/adamw.h"
#include "optim/lr_scheduler.h"
#include "tests/distributed/spawn.h"

namespace sherd::dist {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

const std::string kGolden = "tests/goldens/checkpoint/";

class Convert : public testing::Test {
 protected:
  void SetUp() override {
    const auto* t = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = fs::path(testing::TempDir()) / concat("convert-", t->name(), "-", int(getpid()));
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string path(const std::string& name) const { return folder_ / name; }

  fs::path folder_;
};

// The golden's model and inputs.
struct Trainer {
  explicit Trainer(uint64_t seed, const std::optional<FsdpOptions>& o) : model(build(seed)) {
    if (o) fsdp = std::make_unique<FsdpModule>(*model, *o);
    optimizer = std::make_unique<optim::AdamW>(
        fsdp ? fsdp->named_parameters() : model->named_parameters(), optim::AdamWOptions{.lr = 7});
  }
  static std::unique_ptr<nn::Sequential> build(uint64_t seed) {
    manual_seed(seed);
    return std::make_unique<nn::Sequential>(nn::Linear(5, 7), nn::ReLU(), nn::Linear(7, 3));
  }
  double step(int step, int rank, int world) {
    const int64_t mine = 12 / world;
    const Tensor x = empty({mine, 5}), y = empty({mine}, kInt64);
    for (int64_t i = 0; i < mine; ++i) {
      const int64_t row = rank * mine + i;
      y.data<int64_t>()[i] = (row + step) % 3;
      for (int64_t j = 0; j < 5; ++j)
        x.data<float>()[i * 5 + j] = float(std::sin(0.3 * double(row * 5 + j + 1 + 17 * step)));
    }
    Tensor loss = F::cross_entropy(nn::call(*model, x), y);
    optimizer->zero_grad();
    loss.backward();
    optimizer->step();
    Tensor mean = tensor<double>({loss.item() / world});
    if (world > 1) all_reduce(mean);
    return mean.item();
  }
  TrainingState state() {
    return {.model = fsdp ? ModelState(*fsdp) : ModelState(*model, nullptr),
            .optimizer = optimizer.get()};
  }

  std::unique_ptr<nn::Sequential> model;
  std::unique_ptr<FsdpModule> fsdp;
  std::unique_ptr<optim::AdamW> optimizer;
};

// PyTorch's files become a folder, from which any world goes on with PyTorch's losses; what it
// saves becomes files again, with the bytes that Python would write.
TEST_F(Convert, C_019_GoesOnFromPyTorchAndBack) {
  const std::string made =
      to_sharded(kGolden + "model.safetensors", kGolden + "optimizer.safetensors", path("run"), 3);
  EXPECT_EQ(made, path("run") + "/step-000003");
  const auto losses = json::parse(read_file(kGolden + "trace.json")).at("losses");
  for (int world : {1, 2, 3, 4})
    run_ranks(world, [&](int rank) {
      Trainer t(5, FsdpOptions{.auto_wrap_policy = module_wrap_policy<nn::Linear>()});
      TrainingState s = t.state();
      Checkpointer(path("run"), default_group()).load(made, s);
      EXPECT_EQ(s.step, 3);
      s.step = 4;
      Checkpointer(path(concat("run", world)), default_group()).save(s);
      for (int step = 3; step < 6; ++step)
        EXPECT_NEAR(t.step(step, rank, world), losses[size_t(step - 3)].get<double>(), 1e-6);
    });
  for (int world : {1, 2, 3, 4}) {
    const std::string saved = path(concat("run", world)) + "/step-000004";
    to_full(saved, path("model.safetensors"), {.optimizer = path("optimizer.safetensors")});
    for (const char* file : {"model.safetensors", "optimizer.safetensors"})
      EXPECT_TRUE(read_file(path(file)) == read_file(kGolden + file)) << file << " " << world;
  }
}

// A schedule begins anew, and that is said.
TEST_F(Convert, C_019_ScheduleBeginsAnew) {
  const std::string made =
      to_sharded(kGolden + "model.safetensors", kGolden + "optimizer.safetensors", path("run"), 3);
  run_ranks(2, [&](int rank) {
    Trainer t(5, FsdpOptions{});
    TrainingState s = t.state();
    optim::ConstantLR schedule(*t.optimizer, optim::ConstantOptions{.factor = 0.25});
    schedule.step(100);  // it has been somewhere else
    s.scheduler = &schedule;
    std::vector<std::string> lines;
    CheckpointerOptions options;
    options.report = [&](const std::string& line) { lines.push_back(line); };
    ASSERT_TRUE(Checkpointer(path("run"), default_group(), options).load_latest(s));
    ASSERT_EQ(lines.size(), rank == 0 ? 1u : 0u);
    if (rank == 0) {
      EXPECT_NE(lines[0].find("schedule"), std::string::npos) << lines[0];
    }
    EXPECT_EQ(schedule.last_epoch(), 0);
    EXPECT_EQ(t.optimizer->lr(0), 0.25 * t.optimizer->initial_lr(0));
    EXPECT_EQ(s.step, 3);
  });
}

TEST_F(Convert, C_019_C_020_SeveralFilesWithAnIndex) {
  const std::string made = to_sharded(kGolden + "model.safetensors", "", path("run"), 0);
  to_full(made, path("model.safetensors"), {.files = 2});
  const json index = json::parse(read_file(path("model.safetensors.index.json")));
  EXPECT_EQ(index.at("metadata").at("total_size"), 4 * (35 + 7 + 21 + 3));
  EXPECT_EQ(index.at("weight_map").size(), 4u);
  const SafetensorsReader whole(kGolden + "model.safetensors");
  std::map<std::string, int> files;
  for (auto& [name, file] : index.at("weight_map").items()) {
    const SafetensorsReader part(path(file.get<std::string>()));
    const Tensor a = part.read(name), b = whole.read(name);
    EXPECT_EQ(a.sizes(), b.sizes());
    EXPECT_EQ(std::string(a.bytes(), size_t(a.nbytes())),
              std::string(b.bytes(), size_t(b.nbytes())));
    ++files[file];
  }
  EXPECT_EQ(files.size(), 2u);
  EXPECT_TRUE(files.contains("model-00001-of-00002.safetensors"));
  // And back.
  const std::string again = to_sharded(path("model.safetensors.index.json"), "", path("again"), 0);
  to_full(again, path("whole.safetensors"));
  EXPECT_TRUE(read_file(path("whole.safetensors")) == read_file(kGolden + "model.safetensors"));
}

TEST_F(Convert, FullCheckpointsToo) {
  Trainer t(5, {});
  t.step(0, 0, 1);
  Checkpointer(path("run"), nullptr, {.format = CheckpointFormat::kFull}).save(t.state());
  to_full(path("run/step-000000"), path("model.safetensors"),
          {.optimizer = path("optimizer.safetensors")});
  Trainer other(6, {});
  TrainingState s = other.state();
  load_weights_from(path("model.safetensors"), s.model);
  load_optimizer(path("optimizer.safetensors"), s.model, *s.optimizer);
  EXPECT_EQ(other.step(1, 0, 1), t.step(1, 0, 1));
  EXPECT_EQ(other.step(2, 0, 1), t.step(2, 0, 1));
}

TEST_F(Convert, Refuses) {
  const auto error = [](const std::function<void()>& f) -> std::string {
    try {
      f();
    } catch (const Error& e) {
      return e.what();
    }
    return "no error";
  };
  const std::string made = to_sharded(kGolden + "model.safetensors", "", path("run"), 0);
  EXPECT_NE(error([&] {
              to_full(made, path("m.safetensors"), {.optimizer = path("o.safetensors")});
            }).find("no optimizer"),
            std::string::npos);
  EXPECT_FALSE(fs::exists(path("m.safetensors")));
  EXPECT_NE(error([&] { to_full(made, path("m.bin")); }).find("m.bin"), std::string::npos);
  EXPECT_NE(error([&] { to_full(path("run"), path("m.safetensors")); }).find("state.json"),
            std::string::npos);
  std::ofstream(path("x.index.json")) << R"({"weight_map": {"a": "nothere.safetensors"}})";
  EXPECT_NE(error([&] { to_sharded(path("x.index.json"), "", path("y"), 0); }).find("nothere"),
            std::string::npos);
  // One for the other, or both in one file.
  const std::string model = kGolden + "model.safetensors",
                    optimizer = kGolden + "optimizer.safetensors";
  EXPECT_NE(error([&] { to_sharded(model, model, path("y"), 0); }).find("no optimizer's file"),
            std::string::npos);
  EXPECT_NE(error([&] { to_sharded(optimizer, "", path("y"), 0); }).find("an optimizer's file"),
            std::string::npos);
  const std::string whole = to_sharded(model, optimizer, path("whole"), 0),
                    one = path("one.safetensors"), second = path("one-00002-of-00002.safetensors");
  EXPECT_NE(error([&] { to_full(whole, one, {.optimizer = one}); }).find("same file"),
            std::string::npos);
  EXPECT_NE(
      error([&] { to_full(whole, one, {.optimizer = second, .files = 2}); }).find("same file"),
      std::string::npos);
  // A byte of the data changed.
  {
    std::fstream f(made + "/rank-00000-of-00001.safetensors",
                   std::ios::in | std::ios::out | std::ios::binary);
    f.seekp(-2, std::ios::end);
    f.put('x');
  }
  EXPECT_NE(error([&] { to_full(made, path("m.safetensors")); }).find("checksum"),
            std::string::npos);
  EXPECT_FALSE(fs::exists(path("m.safetensors")));
}

}  // namespace
}  // namespace sherd::dist
