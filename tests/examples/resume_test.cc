// Checkpoints of the main job: a run that was killed goes on from the last whole one and ends in
// the same bytes as one that was not.
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <thread>

#include "core/error.h"
#include "distributed/checkpoint/convert.h"
#include "tests/examples/big_model_run.h"

namespace examples {
namespace {

using namespace sherd;
namespace fs = std::filesystem;

class Resume : public testing::Test {
 protected:
  // Shuffled and accumulated: the order of the data and the moments matter.
  Flags flags(int ranks, int64_t steps, const Flags& more) const {
    return small_run(ranks) +
           Flags{concat("--steps=", steps),
                 "--shuffle",
                 "--accumulate=2",
                 "--save_interval=3",
                 "--lr=0.01",
                 "--checkpoint_dir=" + checkpoints(),
                 "--save_weights=" + folder_ + "/weights",
                 "--log_jsonl=" + folder_ + "/log"} +
           more;
  }
  std::string checkpoints() const { return folder_ + "/run"; }
  dist::Result run(const Flags& f) const { return big_model(f); }
  std::string weights() const { return dist::read_file(folder_ + "/weights"); }
  std::string newest() const {
    std::string last;
    for (auto& e : fs::directory_iterator(checkpoints()))
      if (const std::string name = e.path().filename(); name.starts_with("step-"))
        last = std::max(last, name);
    return checkpoints() + "/" + last;
  }
  int64_t last_step() const {
    const auto steps = lines_with(read_log(folder_ + "/log"), "loss");
    return steps.empty() ? 0 : steps.back()["step"].get<int64_t>();
  }
  // Of the last run: a log goes on where its run does.
  int64_t first_step() const {
    int64_t first = 0;
    for (const nlohmann::json& line : read_log(folder_ + "/log")) {
      if (line.contains("config")) first = 0;
      if (line.contains("loss") && first == 0) first = line["step"].get<int64_t>();
    }
    return first;
  }

  // The weights of an uninterrupted run, elsewhere.
  std::string uninterrupted(int ranks, int64_t steps, const Flags& more) const {
    const std::string path = dist::new_folder() + "/weights";
    const dist::Result r =
        big_model(flags(ranks, steps, more) +
                  Flags{"--save_interval=0", "--checkpoint_dir=", "--save_weights=" + path});
    EXPECT_EQ(r.exit_code, 0) << r.err;
    const std::string bytes = dist::read_file(path);
    EXPECT_GT(bytes.size(), 1000u);
    return bytes;
  }

  const std::string folder_ = dist::new_folder();
};

struct Killed {
  const char* name;
  int ranks;
  Flags flags;
};
class ResumeKilled : public Resume, public testing::WithParamInterface<Killed> {};

std::vector<pid_t> children_of(pid_t pid) {
  std::istringstream text(dist::read_file(concat("/proc/", pid, "/task/", pid, "/children")));
  std::vector<pid_t> pids;
  for (pid_t p; text >> p;) pids.push_back(p);
  return pids;
}

// Killed again and again, all of it or one rank, at whatever moment it is in: between steps, in a
// save, in the first steps.
TEST_P(ResumeKilled, T_33_EndsInTheSameBytes) {
  const auto& [name, ranks, more] = GetParam();
  std::mt19937 random{uint32_t(ranks)};
  const int64_t kSteps = 60;
  const std::string expected = uninterrupted(ranks, kSteps, more);
  int64_t reached = 0, kills = 0;
  for (const int64_t ahead : {1, 4, 3, 7, 2, 5}) {
    fs::remove(folder_ + "/log");
    dist::Program program(big_model_command(flags(ranks, kSteps, more + Flags{"--resume"})),
                          big_model_environment());
    const int64_t target = std::min(reached + ahead, kSteps - 5);
    ASSERT_TRUE(dist::soon([&] { return last_step() >= target; }, 40)) << program.out();
    const std::vector<pid_t> children = children_of(program.pid());
    // Of the whole the kernel kills the ranks; of one rank the launcher ends the others.
    kill(children.empty() || kills % 2 == 0 ? program.pid() : children[random() % children.size()],
         SIGKILL);
    program.wait();
    for (pid_t child : children) EXPECT_TRUE(dist::soon([&] { return !dist::is_running(child); }));
    reached = last_step();
    if (reached < kSteps) ++kills;
    // A rank that still lives could publish one more checkpoint.
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  EXPECT_GE(kills, 3);
  const dist::Result r = run(flags(ranks, kSteps, more + Flags{"--resume"}));
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_TRUE(weights() == expected);
  EXPECT_NE(r.out.find("resumed from " + checkpoints() + "/step-"), std::string::npos) << r.out;
}
INSTANTIATE_TEST_SUITE_P(
    Ways, ResumeKilled,
    testing::Values(
        Killed{"full_shard_async", 2, {"--strategy=full_shard", "--async_save"}},
        Killed{"ddp", 2, {"--strategy=ddp"}},
        Killed{"shard_grad_op_async", 4, {"--strategy=shard_grad_op", "--async_save"}},
        Killed{"full_shard", 4, {"--strategy=full_shard"}},
        Killed{"no_shard_full_format", 1, {"--strategy=no_shard", "--checkpoint_format=full"}}),
    [](const auto& p) { return concat(p.param.name, "_", p.param.ranks, "_ranks"); });

TEST_F(Resume, MoreStepsGoOn) {
  const std::string expected = uninterrupted(2, 11, {});
  ASSERT_EQ(run(flags(2, 5, {})).exit_code, 0);
  EXPECT_EQ(fs::path(newest()).filename(), "step-000005");  // the end is saved too
  const dist::Result r = run(flags(2, 11, {"--resume"}));
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_EQ(first_step(), 6);
  EXPECT_TRUE(weights() == expected);
  // Nothing is left to do.
  const dist::Result again = run(flags(2, 11, {"--resume"}));
  ASSERT_EQ(again.exit_code, 0) << again.err;
  EXPECT_TRUE(weights() == expected);
}

// At another number of ranks the sums differ in their last bits, no more.
TEST_F(Resume, T_32_AtAnotherNumberOfRanksAndStrategy) {
  const auto losses = [&] {
    std::map<int64_t, double> all;
    for (auto& line : lines_with(read_log(folder_ + "/log"), "loss"))
      all[line["step"].get<int64_t>()] = line["loss"].get<double>();
    return all;
  };
  ASSERT_EQ(run(flags(2, 12, {"--save_interval=0", "--checkpoint_dir="})).exit_code, 0);
  const auto expected = losses();
  for (const char* format : {"--checkpoint_format=sharded", "--checkpoint_format=full"}) {
    fs::remove_all(checkpoints());
    ASSERT_EQ(run(flags(2, 6, {"--strategy=full_shard", format})).exit_code, 0);
    const std::string at_six = weights();
    for (const char* strategy : {"--strategy=ddp", "--strategy=shard_grad_op"}) {
      // With no steps more, the very bits of the checkpoint.
      const dist::Result r = run(flags(4, 6, {"--resume", strategy}));
      ASSERT_EQ(r.exit_code, 0) << r.err;
      EXPECT_TRUE(weights() == at_six) << strategy;
      EXPECT_NE(r.out.find("strategy \"full_shard\" -> \""), std::string::npos) << r.out;
      EXPECT_NE(r.out.find("world_size 2 -> 4"), std::string::npos) << r.out;
    }
    fs::remove(folder_ + "/log");
    ASSERT_EQ(run(flags(4, 12, {"--resume", "--strategy=ddp", format})).exit_code, 0);
    const auto found = losses();
    ASSERT_EQ(found.size(), 6u);
    for (auto [step, loss] : found) EXPECT_NEAR(loss, expected.at(step), 1e-5) << step;
  }
}

// Weights alone, of a checkpoint's folder.
TEST_F(Resume, C_004_InitFromACheckpoint) {
  ASSERT_EQ(run(flags(2, 3, {})).exit_code, 0);
  const std::string expected = weights();
  const dist::Result r = run(flags(4, 0, {"--init_from=" + newest(), "--checkpoint_dir="}));
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_TRUE(weights() == expected);
}

TEST_F(Resume, WithNoneStartsAfreshAndSaysSo) {
  const std::string expected = uninterrupted(2, 4, {});
  const dist::Result r = run(flags(2, 4, {"--resume"}));
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_NE(r.out.find("starting afresh"), std::string::npos) << r.out;
  EXPECT_EQ(first_step(), 1);
  EXPECT_TRUE(weights() == expected);
}

TEST_F(Resume, OutranksInitFrom) {
  const std::string expected = uninterrupted(2, 6, {});
  ASSERT_EQ(run(flags(2, 3, {})).exit_code, 0);
  const dist::Result r = run(
      flags(2, 6, {"--resume", concat("--init_from=", kGoldens, "bigmodel_odd/init.safetensors")}));
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_TRUE(weights() == expected);
}

TEST_F(Resume, FolderWithCheckpointsIsRefused) {
  ASSERT_EQ(run(flags(2, 3, {})).exit_code, 0);
  const std::string before = weights();
  const dist::Result r = run(flags(2, 3, {}));
  EXPECT_EQ(r.exit_code, 2);
  EXPECT_EQ(dist::lines_of(r.err).size(), 1u) << r.err;
  for (const char* text : {"--resume", "--overwrite"})
    EXPECT_NE(r.err.find(text), std::string::npos) << r.err;
  EXPECT_TRUE(fs::exists(checkpoints() + "/step-000003"));

  // What is refused has removed nothing.
  const dist::Result refused = run(flags(
      2, 2, {"--overwrite", concat("--init_from=", kGoldens, "bigmodel_tiny/init.safetensors")}));
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_TRUE(fs::exists(checkpoints() + "/step-000003"));

  ASSERT_EQ(run(flags(2, 2, {"--overwrite"})).exit_code, 0);
  EXPECT_EQ(first_step(), 1);
  EXPECT_FALSE(fs::exists(checkpoints() + "/step-000003"));
  EXPECT_TRUE(fs::exists(checkpoints() + "/step-000002"));
}

TEST_F(Resume, AFolderThatWasMovedIsNotWrittenToAnew) {
  dist::Program program(
      big_model_command(flags(2, 100000, {"--save_interval=3", "--save_weights="})),
      big_model_environment());
  ASSERT_TRUE(dist::soon([&] { return fs::exists(checkpoints() + "/step-000003"); }, 40));
  fs::rename(checkpoints(), folder_ + "/moved");
  const dist::Result r = program.wait();
  EXPECT_EQ(r.exit_code, 1);
  EXPECT_NE(r.err.find("was moved or removed"), std::string::npos) << r.err;
  EXPECT_FALSE(fs::exists(checkpoints() + "/state.json"));
}

TEST_F(Resume, SaveIntervalZeroSavesNothing) {
  const dist::Result r = run(flags(2, 6, {"--save_interval=0"}));
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_FALSE(fs::exists(checkpoints()));
  EXPECT_EQ(r.out.find("checkpoint"), std::string::npos) << r.out;
}

TEST_F(Resume, T_33_CutShort) {
  for (const auto& [format, name, other] :
       {std::tuple{"sharded", "rank-00001-of-00002.safetensors", "rank-00000-of-00002.safetensors"},
        {"full", "model.safetensors", "optimizer.safetensors"}}) {
    fs::remove_all(checkpoints());
    const std::string flag = concat("--checkpoint_format=", format);
    ASSERT_EQ(run(flags(2, 6, {flag})).exit_code, 0);
    const std::string file = checkpoints() + "/step-000006/" + name;
    fs::resize_file(file, fs::file_size(file) - 1);
    // The last whole one is taken, and that is said.
    const dist::Result r = run(flags(2, 6, {"--resume", flag}));
    ASSERT_EQ(r.exit_code, 0) << r.err;
    EXPECT_NE(r.out.find("resumed from " + checkpoints() + "/step-000003"), std::string::npos);
    EXPECT_NE((r.out + r.err).find(file), std::string::npos) << r.err;
    EXPECT_EQ(first_step(), 4);

    for (const char* step : {"3", "6"})
      fs::resize_file(checkpoints() + "/step-00000" + step + "/" + other, 100);
    const dist::Result none = run(flags(2, 6, {"--resume"}));
    EXPECT_EQ(none.exit_code, 2);
    EXPECT_NE(none.err.find(checkpoints()), std::string::npos) << none.err;
    EXPECT_EQ(dist::count(none.err, "big_model: "), 1) << none.err;
  }
}

TEST_F(Resume, OfAnotherFunctionOrSchedule) {
  ASSERT_EQ(run(flags(2, 3, {})).exit_code, 0);
  for (const auto& [flag, text] : {std::pair{"--heads=1", "--heads=8, not --heads=1"},
                                   {"--causal=false", "--causal=true, not --causal=false"}}) {
    const dist::Result r = run(flags(2, 6, {"--resume", flag}));
    EXPECT_EQ(r.exit_code, 2);
    EXPECT_EQ(dist::lines_of(r.err).size(), 1u) << r.err;
    EXPECT_NE(r.err.find(text), std::string::npos) << r.err;
    // Nor as the start of another run.
    const dist::Result begun = run(
        flags(2, 6, {"--init_from=" + newest(), "--checkpoint_dir=", "--save_interval=0", flag}));
    EXPECT_EQ(begun.exit_code, 2);
    EXPECT_EQ(dist::lines_of(begun.err).size(), 1u) << begun.err;
    EXPECT_NE(begun.err.find(text), std::string::npos) << begun.err;
  }
  const dist::Result other =
      run(flags(2, 4, {"--resume", "--seed=1", "--accumulate=1", "--shuffle=false"}));
  EXPECT_EQ(other.exit_code, 0) << other.err;
  EXPECT_NE(other.out.find("differs from the checkpoint, and is as given now: accumulate 2 -> 1, "
                           "shuffle true -> false, "
                           "seed 0 -> 1\n"),
            std::string::npos)
      << other.out;
  const dist::Result none =
      run(flags(2, 2, {"--resume", "--seed=1", "--accumulate=1", "--shuffle=false"}));
  EXPECT_EQ(none.exit_code, 0) << none.err;
  EXPECT_EQ(none.out.find("differs"), std::string::npos) << none.out;
  EXPECT_NE(none.out.find("nothing to train: the checkpoint is of step 4, and --steps=2"),
            std::string::npos)
      << none.out;
}

TEST_F(Resume, OfWeightsAlone) {
  dist::to_sharded(concat(kGoldens, "bigmodel_odd/init.safetensors"), "", checkpoints(), 3);
  const dist::Result r = run(flags(2, 6, {"--resume"}));
  EXPECT_EQ(r.exit_code, 2);
  EXPECT_EQ(dist::lines_of(r.err).size(), 1u) << r.err;
  EXPECT_NE(r.err.find("holds no optimizer's state: begin anew with its weights by --init_from=" +
                       checkpoints() + " and another --checkpoint_dir"),
            std::string::npos)
      << r.err;
  const dist::Result begun = run(flags(
      2, 3, {"--init_from=" + checkpoints(), concat("--checkpoint_dir=", folder_, "/other")}));
  EXPECT_EQ(begun.exit_code, 0) << begun.err;
}

TEST_F(Resume, OnOtherDataOfTheSameSize) {
  std::string tokens = dist::read_file(concat(kGoldens, "bigmodel_tiny/tokens.bin"));
  const std::string file = folder_ + "/tokens.bin";
  const auto on_own_data = [&](int64_t steps, const Flags& more) {
    std::ofstream(file) << tokens;
    return run(without_data(flags(2, steps, more)) + Flags{"--data=" + file});
  };
  ASSERT_EQ(on_own_data(3, {}).exit_code, 0);
  tokens[100] ^= 1;
  const dist::Result r = on_own_data(6, {"--resume"});
  EXPECT_EQ(r.exit_code, 2);
  EXPECT_EQ(dist::lines_of(r.err).size(), 1u) << r.err;
  EXPECT_NE(r.err.find("of another dataset of"), std::string::npos) << r.err;
  // Its weights alone fit any data.
  const Flags weights = {"--init_from=" + newest(), "--checkpoint_dir=", "--save_interval=0"};
  EXPECT_EQ(on_own_data(3, weights).exit_code, 0);
}

// What the command line says counts, and the log goes on.
TEST_F(Resume, WithOtherOptionsOfTheOptimizer) {
  ASSERT_EQ(run(flags(2, 3, {"--lr=1e-3"})).exit_code, 0);
  const dist::Result same = run(flags(2, 6, {"--lr=1e-3", "--resume", "--save_interval=0"}));
  ASSERT_EQ(same.exit_code, 0) << same.err;
  const std::string expected = weights();
  const dist::Result r = run(flags(2, 6, {"--lr=2e-3", "--resume", "--save_interval=0"}));
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_NE(r.out.find("lr 0.001 -> 0.002"), std::string::npos) << r.out;
  EXPECT_FALSE(weights() == expected);
  const auto steps = lines_with(read_log(folder_ + "/log"), "lr");
  ASSERT_EQ(steps.size(), 9u);  // 3, and 3 twice
  EXPECT_EQ(steps[3]["lr"], 1e-3);
  EXPECT_EQ(steps[8]["lr"], 2e-3);
  // Nothing that cannot be gone on from is saved.
  const dist::Result lost = run(flags(2, 4, {"--lr=1e300", "--resume"}));
  EXPECT_NE(lost.exit_code, 0);
  EXPECT_NE(lost.err.find("after step 4, so nothing is saved"), std::string::npos) << lost.err;
  EXPECT_EQ(newest(), checkpoints() + "/step-000003");
  // Nor does an output replace a part of a checkpoint.
  for (const char* flag : {"--log_jsonl=", "--save_weights="}) {
    const dist::Result inside = run(flags(2, 6, {"--resume", flag + newest() + "/state.json"}));
    EXPECT_EQ(inside.exit_code, 2);
    EXPECT_NE(inside.err.find("would lie in the checkpoint"), std::string::npos) << inside.err;
  }
}

// Weights are worth something with their own tokenizer alone.
TEST_F(Resume, WithTheTokenizerOfItsWeights) {
  std::string text;
  for (int i = 0; i < 3000; ++i) text += concat("the line of number ", i * 7919 % 1000, "\n");
  std::ofstream(folder_ + "/a.txt") << text;
  for (size_t at = 0; (at = text.find("line", at)) != std::string::npos;)
    text.replace(at, 4, "row");
  std::ofstream(folder_ + "/b.txt") << text;
  const auto of = [&](const char* name, const Flags& more) {
    return without_data(flags(2, 3, {})) +
           Flags{concat("--data=", folder_, "/", name), "--vocab_size=300",
                 concat("--save_weights=", folder_, "/w.safetensors"), "--max_new_tokens=0"} +
           more;
  };
  ASSERT_EQ(run(of("a.txt", {})).exit_code, 0);
  const std::string kept = dist::read_file(checkpoints() + "/tokenizer.model");
  EXPECT_TRUE(kept == dist::read_file(folder_ + "/w.tokenizer.model"));
  const Flags other = {concat("--save_weights=", folder_, "/v.safetensors"), "--save_interval=0",
                       "--checkpoint_dir="};
  const auto other_tokenizer = [&] { return dist::read_file(folder_ + "/v.tokenizer.model"); };
  const std::string file = folder_ + "/w.safetensors", step = checkpoints() + "/step-000003";
  for (const std::string& weights : {file, step, step + "/"}) {
    const dist::Result r = run(of("b.txt", other + Flags{"--init_from=" + weights}));
    ASSERT_EQ(r.exit_code, 0) << r.err;
    EXPECT_TRUE(kept == other_tokenizer()) << weights;
  }
  // A command line that may be given again begins with the weights, and their tokenizer.
  const dist::Result again =
      run(of("b.txt", other + Flags{"--init_from=" + file, "--resume",
                                    "--checkpoint_dir=" + folder_ + "/new"}));
  ASSERT_EQ(again.exit_code, 0) << again.err;
  EXPECT_TRUE(kept == other_tokenizer());
  const dist::Result afresh = run(of("b.txt", other));
  ASSERT_EQ(afresh.exit_code, 0) << afresh.err;
  EXPECT_FALSE(kept == other_tokenizer());
  // Of tokens there is none: an earlier one would be taken for theirs.
  const std::string tokens = concat("--data=", kGoldens, "bigmodel_tiny/tokens.bin");
  ASSERT_EQ(run(without_data(flags(2, 1, other)) + Flags{tokens}).exit_code, 0);
  EXPECT_FALSE(fs::exists(folder_ + "/v.tokenizer.model"));

  // On going on: that of the checkpoints, and what is refused changes nothing.
  const dist::Result bytes = run(of("a.txt", {"--resume", "--tokenizer=bytes"}));
  EXPECT_EQ(bytes.exit_code, 2);
  EXPECT_NE(bytes.err.find("--tokenizer=bytes, and the weights are of"), std::string::npos)
      << bytes.err;
  // Another run's step in this one's folder does not get this one's tokenizer.
  ASSERT_EQ(run(of("b.txt", {"--checkpoint_dir=" + folder_ + "/b"})).exit_code, 0);
  fs::copy(folder_ + "/b/step-000003", checkpoints() + "/step-000001");
  const dist::Result mixed =
      run(of("b.txt", other + Flags{"--init_from=" + checkpoints() + "/step-000001"}));
  EXPECT_EQ(mixed.exit_code, 2);
  EXPECT_NE(mixed.err.find("of another tokenizer"), std::string::npos) << mixed.err;
  fs::remove_all(checkpoints() + "/step-000001");
  const dist::Result differs = run(of("b.txt", {"--resume"}));
  EXPECT_EQ(differs.exit_code, 2);
  EXPECT_NE(differs.err.find("samples"), std::string::npos) << differs.err;
  EXPECT_NE(differs.err.find("--init_from"), std::string::npos) << differs.err;
  EXPECT_TRUE(kept == dist::read_file(checkpoints() + "/tokenizer.model"));
  const dist::Result same = run(of("a.txt", {"--resume", "--steps=4"}));
  ASSERT_EQ(same.exit_code, 0) << same.err;
  EXPECT_EQ(newest(), checkpoints() + "/step-000004");
  EXPECT_TRUE(kept == dist::read_file(checkpoints() + "/tokenizer.model"));
}

// A vocabulary may be larger than the bytes.
TEST_F(Resume, WithBytes) {
  std::ofstream(folder_ + "/a.txt") << std::string(3000, 'a') + std::string(3000, 'b');
  const auto of = [&](int64_t steps, const Flags& more) {
    return without_data(flags(2, steps, {})) +
           Flags{"--data=" + folder_ + "/a.txt", "--tokenizer=bytes", "--vocab_size=300"} + more;
  };
  ASSERT_EQ(run(of(3, {})).exit_code, 0);
  const dist::Result r = run(of(4, {"--resume"}));
  EXPECT_EQ(r.exit_code, 0) << r.err;
  // A log goes on where there is nothing to resume, too: the folder's name may be a slip.
  const size_t lines = read_log(folder_ + "/log").size();
  const dist::Result slip = run(of(3, {"--resume", "--checkpoint_dir=" + folder_ + "/rum"}));
  EXPECT_EQ(slip.exit_code, 0) << slip.err;
  EXPECT_GT(read_log(folder_ + "/log").size(), lines);
}

TEST_F(Resume, OfAnotherShape) {
  ASSERT_EQ(run(flags(2, 3, {})).exit_code, 0);
  const dist::Result r = run(flags(2, 6, {"--resume", "--dim=32", "--layers=4"}));
  EXPECT_EQ(r.exit_code, 2);
  EXPECT_EQ(dist::lines_of(r.err).size(), 1u) << r.err;
  for (const char* text :
       {"of --layers=3 --dim=24, this run of --layers=4 --dim=32. ", "embedding.weight",
        "[101, 24]", "[101, 32]", "layers.0.ffn.0.weight", "output_head.weight",
        "layers.3.attention.in_proj_bias", "layers.3.ffn.2.bias"})
    EXPECT_NE(r.err.find(text), std::string::npos) << text << "\n" << r.err;
}

}  // namespace
}  // namespace examples
