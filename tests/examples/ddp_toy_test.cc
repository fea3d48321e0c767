// ddp_toy as a user runs it: it learns, its checkpoints load, and the number of ranks changes
// nothing but the order of additions.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "core/safetensors.h"
#include "distributed/checkpoint/checkpoint_folder.h"
#include "tests/examples/start.h"

namespace examples {
namespace {

using sherd::Tensor;
using sherd::dist::Result;
namespace fs = std::filesystem;

const char* const kToy = "examples/ddp_toy";

struct Training {
  std::vector<double> losses;  // by epoch
  double loaded = NAN;         // of the checkpoint, read again
  std::vector<std::string> lines;
  std::string folder;

  std::string file(int epoch, const std::string& name) const {
    char step[16];
    std::snprintf(step, sizeof step, "step-%06d", epoch);
    return folder + "/" + step + "/" + name;
  }
};

Training train(int ranks, std::vector<std::string> flags, Start how = Start::kItself) {
  Training t;
  t.folder = sherd::dist::new_folder() + "/checkpoints";
  flags.push_back("--checkpoint_dir=" + t.folder);
  const Result r = run(start(how, ranks, kToy, flags));
  EXPECT_EQ(r.exit_code, 0) << r.out << r.err;
  t.lines = plain_lines(r.out);
  for (const std::string& line : t.lines) {
    int epoch = 0;
    double loss = 0;
    if (std::sscanf(line.c_str(), "epoch %d loss %lf", &epoch, &loss) == 2)
      t.losses.push_back(loss);
    std::sscanf(line.c_str(), "loaded it again: loss %lf", &t.loaded);
  }
  return t;
}

TEST(DdpToy, LeavesCheckpointsOfOthersAlone) {
  const std::string folder = sherd::dist::new_folder();
  const std::string made = sherd::dist::CheckpointWriter(folder, 5, {}).commit({{"loss", 1.5}});
  const Result r = run(start(Start::kItself, 1, kToy, {"--checkpoint_dir=" + folder}));
  EXPECT_EQ(r.exit_code, 2) << r.err;
  EXPECT_NE(r.err.find("holds checkpoints of another program"), std::string::npos) << r.err;
  EXPECT_EQ(sherd::dist::open_checkpoint(made).state.at("loss"), 1.5);
}

TEST(DdpToy, LearnsAtAnyNumberOfRanks) {
  for (int ranks : {1, 2, 3}) {
    const Training t = train(ranks, {"--epochs=5", "--dataset_size=960", "--batch_size=8"});
    ASSERT_EQ(t.losses.size(), 5u);
    // Random targets have a variance of 1/12, which no model can get below.
    EXPECT_LT(t.losses.back(), 0.8 * t.losses.front()) << ranks << " ranks";
    EXPECT_NEAR(t.losses.back(), 1.0 / 12, 0.04) << ranks << " ranks";
    EXPECT_NEAR(t.loaded, t.losses.back(), 0.02) << ranks << " ranks";
  }
}

TEST(DdpToy, StartsFromTheSameWeights) {
  std::string first;
  for (int ranks : {1, 2, 3}) {
    const Training t = train(ranks, {"--epochs=1", "--lr=0"});
    const std::string bytes = sherd::dist::read_file(t.file(1, "model.safetensors"));
    ASSERT_GT(bytes.size(), 44u);  // 11 numbers and a header
    if (first.empty()) first = bytes;
    EXPECT_EQ(bytes, first) << ranks << " ranks";
  }
}

// With the same batches over all ranks, gradients differ by rounding alone.
TEST(DdpToy, RanksShareABatch) {
  std::vector<Training> runs;
  for (int ranks : {1, 2, 3})
    runs.push_back(train(
        ranks, {"--epochs=5", "--dataset_size=240", "--batch_size=" + std::to_string(12 / ranks)}));
  const auto one = sherd::load_safetensors(runs[0].file(5, "model.safetensors"));
  ASSERT_EQ(one.size(), 2u);
  for (const Training& t : runs) {
    ASSERT_EQ(t.losses.size(), 5u);
    for (int e = 0; e < 5; ++e) EXPECT_NEAR(t.losses[e], runs[0].losses[e], 2e-6);
    const auto model = sherd::load_safetensors(t.file(5, "model.safetensors"));
    for (const auto& [name, w] : one)
      for (int64_t i = 0; i < w.numel(); ++i)
        EXPECT_NEAR(model.at(name).data<float>()[i], w.data<float>()[i], 1e-6) << name << i;
  }
}

TEST(DdpToy, TheSameCommandGivesTheSameBytes) {
  const Training a = train(2, {"--epochs=2"}), b = train(2, {"--epochs=2"});
  for (const char* name : {"model.safetensors", "optimizer.safetensors"})
    EXPECT_EQ(sherd::dist::read_file(a.file(2, name)), sherd::dist::read_file(b.file(2, name)));
}

TEST(DdpToy, SavesAtTheIntervalAndAtTheEnd) {
  const Training t = train(2, {"--epochs=5", "--save_interval=2", "--dataset_size=64"});
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(t.folder))
    if (entry.path().filename().string().starts_with("step-"))
      names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names, (std::vector<std::string>{"step-000002", "step-000004", "step-000005"}));
  const auto optimizer = sherd::load_safetensors(t.file(4, "optimizer.safetensors"));
  ASSERT_TRUE(optimizer.contains("state.linear.weight.step"));
  EXPECT_EQ(optimizer.at("state.linear.weight.step").item<int64_t>(), 4);  // 64 samples are 1 batch

  EXPECT_FALSE(fs::exists(train(2, {"--epochs=1", "--save_interval=0"}).folder));
}

TEST(DdpToy, StartsUnderLaunchers) {
  const std::vector<std::string> flags = {"--epochs=2", "--save_interval=0"};
  const Training itself = train(2, flags);
  ASSERT_EQ(itself.losses.size(), 2u);
  for (Start how : {Start::kSherdrun, Start::kMpirun})
    EXPECT_EQ(train(2, flags, how).lines, itself.lines) << name_of(how);
}

TEST(DdpToy, WrongFlagsAreOneLineAndExitCode2) {
  for (const char* flag :
       {"--epoch=3", "--epochs=many", "--epochs=-1", "--batch_size=0", "--nproc_per_node=0",
        "--nproc_per_node=some", "surplus", "--batch_size=9223372036854775807",
        "--dataset_size=9223372036854775807", "--epochs=99999999999999999999", "--lr=nan",
        "--checkpoint_dir=/proc/x", "--nproc_per_node="}) {
    const Result r = run({kToy, flag});
    EXPECT_EQ(r.exit_code, 2) << flag;
    EXPECT_EQ(sherd::dist::lines_of(r.err).size(), 1u) << flag << "\n" << r.err;
    EXPECT_EQ(r.out, "") << flag;
  }
  const Result r = run(start(Start::kSherdrun, 2, kToy, {"--epoch=3"}));
  EXPECT_EQ(r.exit_code, 2);
  EXPECT_EQ(sherd::dist::lines_of(r.err).size(), 1u) << r.err;

  const Result help = run({kToy, "--help"});
  EXPECT_EQ(help.exit_code, 0);
  for (const char* flag : {"--epochs", "--batch_size", "--lr", "--dataset_size", "--save_interval",
                           "--nproc_per_node"})
    EXPECT_EQ(sherd::dist::count(help.out, std::string(flag) + " "), 1) << flag << "\n" << help.out;
}

TEST(DdpToy, AnEmptyValueTakesNoOtherWord) {
  const Result r = run({kToy, "--checkpoint_dir=", "--epochs=none"});
  EXPECT_EQ(r.exit_code, 2);
  EXPECT_NE(r.err.find("--epochs: none"), std::string::npos) << r.err;
}

// The checkpoint cannot be made: rank 0 says why, and nobody waits for it.
TEST(DdpToy, AnErrorEndsAllRanks) {
  const std::string folder = sherd::dist::new_folder();
  std::ofstream(folder + "/step-000001") << "a file";
  const Result r =
      run(start(Start::kItself, 2, kToy, {"--epochs=1", "--checkpoint_dir=" + folder}));
  EXPECT_EQ(r.exit_code, 1);
  EXPECT_NE(r.err.find("step-000001"), std::string::npos) << r.err;
  EXPECT_LT(r.seconds, 20);
}

TEST(DdpToy, ALossThatIsNoNumberIsAnError) {
  const Result r =
      run(start(Start::kItself, 2, kToy, {"--epochs=50", "--save_interval=0", "--lr=1e30"}));
  EXPECT_EQ(r.exit_code, 1);
  EXPECT_NE(r.err.find("try a smaller --lr"), std::string::npos) << r.err;
}

}  // namespace
}  // namespace examples
