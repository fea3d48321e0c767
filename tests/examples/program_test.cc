// The main job as a program: its flags, what it writes, and how it is started.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "core/error.h"
#include "tests/examples/big_model_run.h"

namespace examples {
namespace {

using namespace sherd;
namespace fs = std::filesystem;

class BigModelProgram : public testing::Test {
 protected:
  const std::string folder_ = dist::new_folder();
};

TEST_F(BigModelProgram, Log) {
  const dist::Result r =
      big_model(golden_flags("bigmodel_tiny", 2) +
                Flags{"--steps=6", "--eval_interval=3", "--warmup_steps=2",
                      concat("--val_data=", kGoldens, "bigmodel_tiny/tokens.bin"),
                      "--log_jsonl=" + folder_ + "/log"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  const auto log = read_log(folder_ + "/log");
  const nlohmann::json config = log.at(0)["config"];
  EXPECT_EQ(log[0].size(), 1u);
  EXPECT_EQ(config["strategy"], "full_shard");
  EXPECT_EQ(config["world_size"], 2);
  EXPECT_EQ(config["backend"], "shm");
  EXPECT_EQ(config["device"], "cpu");
  EXPECT_EQ(config["shard_group_size"], 2);
  EXPECT_EQ(config["precision"], "fp32");
  EXPECT_EQ(config["backward_prefetch"], "pre");
  EXPECT_EQ(config["units"], 3);
  EXPECT_EQ(config["threads"], 1);

  const auto steps = lines_with(log, "loss");
  ASSERT_EQ(steps.size(), 6u);
  double exposed_ms = 0;
  for (size_t i = 0; i < steps.size(); ++i) {
    const nlohmann::json& s = steps[i];
    EXPECT_EQ(s["step"], i + 1);
    EXPECT_GT(s["loss"].get<double>(), 0);
    EXPECT_GT(s["grad_norm"].get<double>(), 0);
    EXPECT_FLOAT_EQ(s["lr"].get<float>(), i == 0 ? 0.0015f : 0.003f);
    EXPECT_GT(s["step_ms"].get<double>(), 0);
    EXPECT_NEAR(s["tokens_per_s"].get<double>() * s["step_ms"].get<double>() / 1e3, 8 * 16, 1e-6);
    EXPECT_GT(s["peak_mem_mib"].get<double>(), 0.1);
    EXPECT_LT(s["peak_mem_mib"].get<double>(), 100);
    // 3 units: gathered in forward; again in backward, but for the root, which keeps its own.
    EXPECT_EQ(s["all_gather"]["calls"], 3 + 2 + 1);  // the one of the losses
    EXPECT_EQ(s["reduce_scatter"]["calls"], 3);
    EXPECT_EQ(s["all_reduce"]["calls"], 1);  // the norm
    int64_t bytes = 0;
    for (const char* kind : {"all_gather", "reduce_scatter", "all_reduce"})
      bytes += s[kind]["bytes"].get<int64_t>();
    EXPECT_EQ(s["comm_bytes"], bytes);
    EXPECT_GT(bytes, 3 * config["parameters"].get<int64_t>());
    EXPECT_GE(s["exposed_ms"].get<double>(), 0);  // 0 where the peer came first each time
    exposed_ms += s["exposed_ms"].get<double>();
    EXPECT_LT(s["exposed_ms"].get<double>(), s["step_ms"].get<double>());
  }
  EXPECT_GT(exposed_ms, 0);
  EXPECT_NE(r.out.find("  exchanged "), std::string::npos) << r.out;
  EXPECT_NE(r.out.find("% exposed"), std::string::npos) << r.out;
  const auto validations = lines_with(log, "val_loss");
  ASSERT_EQ(validations.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(validations[i]["step"], 3 * i);
    EXPECT_GT(validations[i]["val_loss"].get<double>(), 0);
    EXPECT_FALSE(validations[i].contains("val_bits_per_byte"));  // of tokens it is not known
  }
  EXPECT_LT(validations[2]["val_loss"], validations[0]["val_loss"]);
  EXPECT_EQ(log.size(), 1 + steps.size() + validations.size());
}

// A validation loss is the mean over all tokens of all samples, whatever the ranks.
TEST_F(BigModelProgram, ValidationDoesNotDependOnTheRanks) {
  std::vector<double> losses;
  for (int ranks : {1, 2, 4}) {
    // 23 samples: no number of ranks or batch divides them.
    const std::string tokens = dist::read_file(concat(kGoldens, "bigmodel_odd/tokens.bin"));
    std::ofstream(folder_ + "/val.bin") << tokens.substr(0, 2 * (23 * 11 + 1));
    const dist::Result r =
        big_model(small_run(ranks) +
                  Flags{"--steps=1", "--eval_interval=10", "--val_data=" + folder_ + "/val.bin",
                        concat("--init_from=", kGoldens, "bigmodel_odd/init.safetensors"),
                        "--log_jsonl=" + folder_ + "/log"});
    ASSERT_EQ(r.exit_code, 0) << r.err;
    losses.push_back(lines_with(read_log(folder_ + "/log"), "val_loss").at(0)["val_loss"]);
  }
  EXPECT_NEAR(losses[1], losses[0], 1e-6 * losses[0]);
  EXPECT_NEAR(losses[2], losses[0], 1e-6 * losses[0]);
}

TEST_F(BigModelProgram, TextWithBytes) {
  std::string text;
  for (int i = 0; i < 700; ++i) text += concat("line ", i * 7919 % 1000, " of the text\n");
  std::ofstream(folder_ + "/text.txt") << text;
  const dist::Result r =
      big_model(without_data(small_run(2)) +
                Flags{"--data=" + folder_ + "/text.txt", "--tokenizer=bytes", "--vocab_size=256",
                      "--steps=20", "--eval_interval=10", "--max_new_tokens=5", "--prompt=line 7",
                      "--log_jsonl=" + folder_ + "/log"});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  const auto validations = lines_with(read_log(folder_ + "/log"), "val_loss");
  ASSERT_EQ(validations.size(), 3u);
  for (auto& v : validations)  // a token is a byte
    EXPECT_NEAR(v["val_bits_per_byte"].get<double>(), v["val_loss"].get<double>() / std::log(2.0),
                1e-3 * v["val_loss"].get<double>());
  EXPECT_NEAR(validations[0]["val_bits_per_byte"].get<double>(), 8, 1);
  EXPECT_NE(r.out.find("line 7"), std::string::npos) << r.out;
}

// The model knows no positions, so what packing puts beside a document must not matter.
TEST_F(BigModelProgram, PackedDocumentsDoNotSeeEachOther) {
  std::string text, tokens;
  for (int i = 0; i < 400; ++i) {
    const std::string line =
        std::string("abcdefghijklmnop").substr(0, 2 + i * 7919 % 13) + "\n";  // up to 15 tokens
    text += line;
    for (char c : line) tokens += c == '\n' ? std::string(2, '\0') : std::string{c, '\0'};
  }
  std::ofstream(folder_ + "/text.txt") << text;
  std::ofstream(folder_ + "/tokens.bin") << tokens;
  const auto validation = [&](const Flags& flags) {
    const dist::Result r =
        big_model(without_data(small_run(2)) + flags +
                  Flags{"--vocab_size=256", "--steps=10", "--eval_interval=10",
                        "--max_new_tokens=0", "--log_jsonl=" + folder_ + "/log"});
    EXPECT_EQ(r.exit_code, 0) << r.err;
    std::vector<double> losses;
    for (auto& v : lines_with(read_log(folder_ + "/log"), "val_loss"))
      losses.push_back(v["val_loss"]);
    EXPECT_EQ(losses.size(), 2u);
    EXPECT_LT(losses[1], losses[0]);
    return losses[0];
  };
  const Flags bytes{"--data=" + folder_ + "/text.txt", "--val_data=" + folder_ + "/text.txt",
                    "--tokenizer=bytes", "--pack_documents"};
  const double narrow = validation(bytes + Flags{"--seq_len=16"});
  EXPECT_NEAR(validation(bytes + Flags{"--seq_len=50"}), narrow, 1e-5);
  // The same documents with another last token, each seen by itself again.
  const Flags files{"--data=" + folder_ + "/tokens.bin", "--val_data=" + folder_ + "/tokens.bin"};
  const double of_files = validation(files + Flags{"--pack_documents", "--seq_len=16"});
  EXPECT_NEAR(validation(files + Flags{"--pack_documents", "--seq_len=50"}), of_files, 1e-5);
  EXPECT_GT(std::abs(validation(files + Flags{"--seq_len=50"}) - of_files), 1e-4);
}

TEST_F(BigModelProgram, RelativePathsAreTheUsers) {
  fs::copy(concat(kGoldens, "bigmodel_odd/tokens.bin"), folder_ + "/tokens.bin");
  fs::copy(concat(kGoldens, "bigmodel_odd/init.safetensors"), folder_ + "/init.safetensors");
  const dist::Result r =
      big_model(without_data(small_run(2)) +
                    Flags{"--steps=4", "--data=tokens.bin", "--val_data=./tokens.bin",
                          "--init_from=init.safetensors", "--save_weights=out.safetensors",
                          "--log_jsonl=log", "--checkpoint_dir=some/run", "--save_interval=2"},
                {.environment = {{"BUILD_WORKING_DIRECTORY", folder_}}});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  for (const char* file : {"out.safetensors", "log", "some/run/step-000004/index.json"})
    EXPECT_TRUE(fs::exists(folder_ + "/" + file)) << file;
}

TEST_F(BigModelProgram, BooleanFlags) {
  auto log = [&](const Flags& flags) {
    const dist::Result r =
        big_model(small_run(1) + Flags{"--steps=1", "--log_jsonl=" + folder_ + "/log"} + flags);
    EXPECT_EQ(r.exit_code, 0) << r.err;
    return read_log(folder_ + "/log").at(0)["config"];
  };
  EXPECT_EQ(log({"--causal=false"})["causal"], false);
  EXPECT_EQ(log({"--causal=false", "--causal"})["causal"], true);
  EXPECT_EQ(log({"--causal=true"})["causal"], true);
  EXPECT_EQ(log({})["activation_checkpointing"], false);
  EXPECT_EQ(log({"--activation_checkpointing"})["activation_checkpointing"], true);
  EXPECT_EQ(log({"--activation_checkpointing=false"})["activation_checkpointing"], false);
}

// One rank exchanges nothing; a hybrid job's bytes are those of all its groups.
TEST_F(BigModelProgram, ExchangedBytes) {
  const auto bytes = [&](const Flags& flags) {
    const dist::Result r =
        big_model(flags + Flags{"--steps=2", "--max_norm=0", "--log_jsonl=" + folder_ + "/log"});
    EXPECT_EQ(r.exit_code, 0) << r.err;
    return lines_with(read_log(folder_ + "/log"), "loss").at(1)["comm_bytes"].get<int64_t>();
  };
  EXPECT_EQ(bytes(small_run(1)), 0);
  const int64_t full = bytes(small_run(4)),
                hybrid =
                    bytes(small_run(4) + Flags{"--strategy=hybrid_shard", "--shard_group_size=2"});
  EXPECT_GT(hybrid, full);  // the pieces' sums over the replicas besides
}

TEST_F(BigModelProgram, NanCheckNamesTheFirstModule) {
  const Flags flags{"--steps=50", "--lr=1e30", "--warmup_steps=0", "--schedule=constant"};
  const dist::Result plain = big_model(small_run(2) + flags);
  EXPECT_EQ(plain.exit_code, 1);
  EXPECT_NE(plain.err.find("--nan_check to see where it comes from"), std::string::npos)
      << plain.err;
  const dist::Result checked = big_model(small_run(2) + flags + Flags{"--nan_check"});
  EXPECT_EQ(checked.exit_code, 1);
  EXPECT_NE(checked.err.find("[nan_check] "), std::string::npos) << checked.err;
  EXPECT_NE(checked.err.find("layers.0"), std::string::npos) << checked.err;
  const dist::Result well = big_model(small_run(2) + Flags{"--steps=2", "--nan_check"});
  EXPECT_EQ(well.exit_code, 0) << well.err;
}

TEST_F(BigModelProgram, AnEmptyValueIsAValue) {
  const dist::Result r = big_model(
      small_run(1) +
      Flags{"--steps=1", "--prompt=", "--checkpoint_dir=", "--log_jsonl=" + folder_ + "/log"});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  EXPECT_EQ(lines_with(read_log(folder_ + "/log"), "loss").size(), 1u);
}

// Without a flag that says so, the learning rate never rises after the warmup.
TEST_F(BigModelProgram, TheLearningRateFallsFromAnyHeight) {
  for (const char* lr : {"--lr=1e-2", "--lr=1e-6"}) {
    const dist::Result r =
        big_model(small_run(1) + Flags{"--steps=5", "--schedule=cosine", "--warmup_steps=0", lr,
                                       "--log_jsonl=" + folder_ + "/log"});
    ASSERT_EQ(r.exit_code, 0) << r.err;
    const auto steps = lines_with(read_log(folder_ + "/log"), "lr");
    ASSERT_EQ(steps.size(), 5u);
    for (size_t i = 1; i < steps.size(); ++i)
      EXPECT_LE(steps[i]["lr"].get<double>(), steps[i - 1]["lr"].get<double>()) << lr;
  }
}

TEST_F(BigModelProgram, WhatIsPassedOverInAFolderIsNamed) {
  const std::string texts = folder_ + "/texts";
  fs::create_directory(texts);
  std::ofstream(texts + "/a.txt") << std::string(4000, 'x');
  std::ofstream(texts + "/b.dat") << std::string(4000, '\0');
  const dist::Result r =
      big_model(without_data(small_run(1)) +
                Flags{"--data=" + texts, "--tokenizer=bytes", "--vocab_size=256", "--steps=1"});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  EXPECT_NE(r.out.find(" of 1 file(s) (passed over as no text: b.dat), "), std::string::npos)
      << r.out;
}

// Bytes have 256 tokens unless a flag says otherwise, and then only those are sampled.
TEST_F(BigModelProgram, BytesAreSampledAlone) {
  std::ofstream(folder_ + "/text.txt") << std::string(4000, 'x');
  Flags flags = without_data(small_run(1)) + Flags{"--data=" + folder_ + "/text.txt",
                                                   "--tokenizer=bytes",
                                                   "--steps=1",
                                                   "--temperature=1000",
                                                   "--top_k=0",
                                                   "--max_new_tokens=40",
                                                   "--log_jsonl=" + folder_ + "/log"};
  const dist::Result more = big_model(flags + Flags{"--vocab_size=2000"});
  EXPECT_EQ(more.exit_code, 0) << more.err;
  std::erase_if(flags, [](const std::string& f) { return f.starts_with("--vocab_size="); });
  const dist::Result r = big_model(flags);
  EXPECT_EQ(r.exit_code, 0) << r.err;
  EXPECT_EQ(read_log(folder_ + "/log").at(0)["config"]["vocab_size"], 256);
}

TEST_F(BigModelProgram, HelpWinsAndIsWrittenOrFails) {
  for (const Flags& flags : {Flags{"--layers=x", "--help"}, Flags{"--help", "--none"}}) {
    const dist::Result r = big_model(flags);
    EXPECT_EQ(r.exit_code, 0) << r.err;
    EXPECT_NE(r.out.find("--layers"), std::string::npos);
  }
  const dist::Result r = dist::run({"/bin/sh", "-c", concat(kBigModel, " --help >/dev/full")});
  EXPECT_EQ(r.exit_code, 1);
  EXPECT_NE(r.err.find("cannot write to stdout: No space left"), std::string::npos) << r.err;
}

TEST_F(BigModelProgram, Help) {
  const dist::Result r = big_model({"--help"});
  EXPECT_EQ(r.exit_code, 0);
  EXPECT_EQ(r.err, "");
  for (const char* flag : {"--nproc_per_node",
                           "--preset",
                           "--layers",
                           "--dim",
                           "--ff_dim",
                           "--heads",
                           "--vocab_size",
                           "--seq_len",
                           "--causal",
                           "--batch_size",
                           "--accumulate",
                           "--steps",
                           "--lr",
                           "--min_lr",
                           "--beta1",
                           "--beta2",
                           "--weight_decay",
                           "--max_norm",
                           "--warmup_steps",
                           "--schedule",
                           "--strategy",
                           "--shard_group_size",
                           "--backward_prefetch",
                           "--cpu_offload",
                           "--wrap_min_params",
                           "--precision",
                           "--activation_checkpointing",
                           "--data",
                           "--val_data",
                           "--tokenizer",
                           "--prompt",
                           "--max_new_tokens",
                           "--temperature",
                           "--top_k",
                           "--shuffle",
                           "--eval_interval",
                           "--checkpoint_dir",
                           "--save_interval",
                           "--resume",
                           "--overwrite",
                           "--init_from",
                           "--save_weights",
                           "--log_jsonl",
                           "--seed",
                           "--threads"})
    EXPECT_NE(r.out.find(flag), std::string::npos) << flag;
}

TEST_F(BigModelProgram, HelpSaysWhatTheModelsSizesAre) {
  const std::string help = big_model({"--help"}).out;
  for (const char* text : {"laptop: small", "the default text is too short", "0: OMP_NUM_THREADS",
                           "a multiple of --heads", "of a block's attention", "its labels"})
    EXPECT_NE(help.find(text), std::string::npos) << text;
}

// Bytes that a model made up, NUL and halves of characters among them.
TEST_F(BigModelProgram, TheSampleIsTextAndEndsItsLine) {
  std::string bytes;
  for (int i = 0; i < 20000; ++i) bytes += char(i * 7919 % 256);
  std::ofstream(folder_ + "/text.txt") << std::string(70000, 'x') + bytes;
  const dist::Result r = big_model(without_data(small_run(1)) +
                                   Flags{"--data=" + folder_ + "/text.txt", "--tokenizer=bytes",
                                         "--vocab_size=256", "--steps=1", "--temperature=1000",
                                         "--top_k=0", "--max_new_tokens=1000", "--prompt=begin"});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  const size_t begin = r.out.find("\nbegin"), end = r.out.find("\n\nnext: ");
  ASSERT_TRUE(begin != std::string::npos && end != std::string::npos) << r.out;
  const std::string sample = r.out.substr(begin + 1, end - begin - 1);
  EXPECT_GT(dist::count(sample, "\uFFFD"), 100) << sample;
  EXPECT_GT(sample.size(), 1000u);
  for (const char c : sample)
    EXPECT_TRUE(c < 0 || c == '\n' || c == '\t' || (c >= ' ' && c != 127)) << int(c);
}

TEST_F(BigModelProgram, SaysHowToGoOn) {
  const std::string run = folder_ + "/run";
  const Flags flags = small_run(1) + Flags{"--steps=4", "--checkpoint_dir=" + run};
  const dist::Result saved = big_model(flags + Flags{"--save_interval=2"});
  EXPECT_EQ(saved.exit_code, 0) << saved.err;
  EXPECT_NE(saved.out.find("  go on: --resume --checkpoint_dir=" + run + " --steps=8"),
            std::string::npos)
      << saved.out;
  const dist::Result none = big_model(flags + Flags{"--checkpoint_dir="});
  EXPECT_EQ(none.out.find("go on: "), std::string::npos) << none.out;
}

// mpirun may give a rank a terminal of its own.
TEST_F(BigModelProgram, RedrawsOnATerminalThatIsNotMpiruns) {
  const std::string command = [] {
    std::string text = kBigModel;
    for (const std::string& flag : small_run(1) + Flags{"--steps=3"}) text += " " + flag;
    return text;
  }();
  const auto redraws = [&](const std::map<std::string, std::string>& environment) {
    const dist::Result r = dist::run({"/usr/bin/script", "-qec", command, "/dev/null"},
                                     big_model_environment({.environment = environment}));
    EXPECT_EQ(r.exit_code, 0) << r.err;
    EXPECT_NE(r.out.find("step 3/3"), std::string::npos) << r.out;
    return dist::count(r.out, "\033[K");
  };
  EXPECT_GT(redraws({}), 0);
  EXPECT_EQ(redraws({{"OMPI_COMM_WORLD_RANK", "0"},
                     {"OMPI_COMM_WORLD_SIZE", "1"},
                     {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                     {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"},
                     {"OMPI_MCA_orte_jobfam_session_dir", folder_},
                     {"SHERD_BACKEND", "shm"}}),
            0);
}

TEST_F(BigModelProgram, NothingIsWrittenUnasked) {
  const dist::Result r =
      big_model(small_run(2) + Flags{"--steps=2"},
                {.environment = {{"HOME", folder_}, {"XDG_CACHE_HOME", folder_}}});
  ASSERT_EQ(r.exit_code, 0) << r.err;
  EXPECT_EQ(r.err, "");
  for (auto& e : fs::recursive_directory_iterator(folder_))
    EXPECT_FALSE(e.is_regular_file()) << e.path();
}

}  // namespace
}  // namespace examples
