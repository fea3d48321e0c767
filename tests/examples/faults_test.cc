// What the main job does with mistakes of its user and with ranks that die.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "core/safetensors.h"
#include "tests/examples/big_model_run.h"

namespace examples {
namespace {

using namespace sherd;
namespace fs = std::filesystem;

std::string write_file(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
  return path;
}

// Without FSDP's note that one rank has nothing to share.
std::string complaint(const dist::Result& r) {
  std::string text;
  for (auto& line : dist::lines_of(r.err))
    if (!line.starts_with("[fsdp] there is one rank")) text += line + "\n";
  return text;
}

// A mistake of the user's: one line that says what, and exit code 2, at 1 rank and at 2.
void expect_refused(const Flags& flags, const std::vector<std::string>& texts) {
  for (int ranks : {1, 2}) {
    const bool own_data =
        std::any_of(flags.begin(), flags.end(), [](auto& f) { return f.starts_with("--data="); });
    const Flags base = small_run(ranks);
    const dist::Result r = big_model((own_data ? without_data(base) : base) + flags);
    EXPECT_EQ(r.exit_code, 2) << r.err;
    const std::string said = complaint(r);
    EXPECT_EQ(dist::lines_of(said).size(), 1u) << r.err;
    EXPECT_TRUE(said.starts_with("big_model: ")) << r.err;
    for (auto& text : texts) EXPECT_NE(said.find(text), std::string::npos) << text << "\n" << r.err;
  }
}

class Mistakes : public testing::Test {
 protected:
  const std::string folder_ = dist::new_folder();
};

TEST_F(Mistakes, Flags) {
  expect_refused({"--no_such_flag=1"}, {"--no_such_flag"});
  expect_refused({"stray"}, {"stray"});
  expect_refused({""}, {"an empty argument"});
  expect_refused({"--layers=", "--heads=2"}, {"--layers"});
  expect_refused({"--layers=two"}, {"--layers", "two"});
  expect_refused({"--layers=-1"}, {"--layers", "-1"});
  expect_refused({"--strategy=full_shard", "--shard_group_size=1"},
                 {"--shard_group_size", "hybrid_shard"});
  expect_refused({"--strategy=zero"}, {"--strategy", "zero", "full_shard", "shard_grad_op", "ddp"});
  expect_refused({"--precision=fp8"}, {"--precision", "fp8", "bf16"});
  expect_refused({"--schedule=linear"}, {"--schedule", "linear", "cosine"});
  expect_refused({"--preset=huge"}, {"--preset", "huge", "laptop"});
  expect_refused({"--tokenizer=words"}, {"--tokenizer", "words", "bpe"});
  expect_refused({"--causal=perhaps"}, {"--causal", "perhaps"});
  expect_refused({"--lr=nan"}, {"--lr", "nan"});
  expect_refused({"--lr=-1"}, {"--lr", "-1"});
  expect_refused({"--beta2=1"}, {"--beta2", "1"});
  expect_refused({"--batch_size=0"}, {"--batch_size", "0"});
  expect_refused({"--heads=7"}, {"--heads", "7", "--dim"});
  expect_refused({"--lr=1e-5", "--min_lr=1e-4"}, {"--min_lr=0.0001", "--lr=1e-05", "rise"});
  for (const char* flag : {"--heads=", "--lr=", "--seed="})
    expect_refused({flag}, {std::string(flag, strlen(flag) - 1) + ": an empty value"});
  expect_refused({"--strategy=none", "--precision=bf16"},
                 {"give --nproc_per_node=1 and --precision=fp32"});
  expect_refused({"--save_weights=" + folder_ + "/x.pt"},
                 {"--save_weights=", "x.pt: weights are written as .safetensors"});
  expect_refused({"--resume", "--overwrite", "--checkpoint_dir=" + folder_},
                 {"--resume", "--overwrite"});
}

// No number is clamped, and no sizes lead to an overflow.
TEST_F(Mistakes, NumbersOutOfRange) {
  for (const char* flag :
       {"layers", "dim", "ff_dim", "heads", "vocab_size", "seq_len", "batch_size", "accumulate",
        "steps", "warmup_steps", "threads", "seed", "end_id", "wrap_min_params", "top_k",
        "max_new_tokens", "eval_interval", "save_interval", "shard_group_size"})
    for (const char* value : {"18446744073709551615", "99999999999999999999"}) {
      const dist::Result r = big_model(small_run(1) + Flags{concat("--", flag, "=", value)});
      EXPECT_EQ(r.exit_code, 2) << flag << r.err;
      EXPECT_EQ(r.err, concat("big_model: --", flag, ": ", value, " is too large: at most ",
                              r.err.substr(r.err.find("at most ") + 8)));
    }
  expect_refused({"--dim=4000000000"}, {"--dim", "16777216"});
  expect_refused({"--threads=1000000"}, {"--threads", "1024"});
  expect_refused({"--warmup_steps=9223372036854775807"}, {"--warmup_steps", "at most"});
  expect_refused({"--dim=1000000", "--ff_dim=10000000", "--heads=1"}, {"parameters", "--ff_dim"});
  expect_refused({"--steps=-1"}, {"--steps: -1 should be a whole number from 0"});
  expect_refused({"--steps=x", "--steps=y"}, {"--steps: y should be"});
  EXPECT_EQ(big_model(small_run(1) + Flags{"--steps=x", "--steps=1", "--threads=0"}).exit_code, 0);
}

TEST_F(Mistakes, NumberOfRanks) {
  for (const char* n : {"0", "-1", "two", "1.5", "", "4x", "2000", "99999999999"}) {
    const dist::Result r = big_model(small_run(1) + Flags{concat("--nproc_per_node=", n)});
    EXPECT_EQ(r.exit_code, 2) << n << r.err;
    EXPECT_EQ(dist::lines_of(r.err).size(), 1u) << r.err;
    EXPECT_NE(r.err.find("nproc_per_node"), std::string::npos) << r.err;
  }
}

TEST_F(Mistakes, Data) {
  expect_refused({"--data=" + folder_ + "/none.bin"}, {"none.bin"});
  expect_refused({"--val_data=" + folder_ + "/none.bin"}, {"none.bin"});
  const std::string whole = dist::read_file(concat(kGoldens, "bigmodel_odd/tokens.bin"));
  auto data = [&](const char* name, const std::string& bytes) {
    return "--data=" + write_file(folder_ + "/" + name, bytes);
  };
  expect_refused({data("odd.bin", whole.substr(0, 1001))}, {"odd.bin", "1001"});
  expect_refused({data("empty.bin", "")}, {"empty.bin", "empty"});
  expect_refused({data("short.bin", whole.substr(0, 10))}, {"short.bin"});
  expect_refused({data("few.bin", whole.substr(0, 2 * (3 * 11 + 1)))}, {"3 samples", "batch"});
  expect_refused({data("large.bin", whole.substr(0, 2000) + std::string("\x65\x00", 2))},  // 101
                 {"large.bin", "101", "1000"});
  expect_refused({"--vocab_size=100"}, {"tokens.bin", "100"});
  expect_refused({data("empty.txt", "")}, {"empty.txt", "empty"});
  expect_refused({data("some.txt", std::string(4000, 'x')), "--tokenizer=bytes"},
                 {"--vocab_size=101", "256"});
  expect_refused({data("a.txt", "text"), data("a.bin", whole)}, {"a.bin"});
  expect_refused({data("short.txt", "x"), "--tokenizer=bytes", "--vocab_size=256"},
                 {"--data=", "short.txt", "too few"});
  fs::create_directory(folder_ + "/bins");
  write_file(folder_ + "/bins/a.bin", whole);
  expect_refused({"--data=" + folder_ + "/bins"}, {"bins", "name the files"});
  expect_refused({data("little.txt", std::string(4000, 'x'))}, {"--data and --vocab_size=101: "});
  fs::create_directory(folder_ + "/nothing");
  expect_refused({"--data=" + folder_ + "/nothing"}, {"nothing"});
}

// Sizes that the user never gave are not spoken of as if.
TEST_F(Mistakes, APresetThatNeedsMoreText) {
  const std::string text = write_file(folder_ + "/text.txt", std::string(4000, 'x'));
  const dist::Result r = big_model({"--nproc_per_node=1", "--preset=seed", "--data=" + text});
  EXPECT_EQ(r.exit_code, 2);
  EXPECT_NE(r.err.find("--vocab_size=50000, which --preset=seed sets: "), std::string::npos)
      << r.err;
}

TEST_F(Mistakes, Weights) {
  expect_refused({"--init_from=" + folder_ + "/none.safetensors"}, {"none.safetensors"});
  const std::string whole = dist::read_file(concat(kGoldens, "bigmodel_odd/init.safetensors"));
  for (size_t bytes : {size_t(0), size_t(5), size_t(100), whole.size() - 1})
    expect_refused(
        {"--init_from=" + write_file(folder_ + "/cut.safetensors", whole.substr(0, bytes))},
        {"cut.safetensors"});
  // Of another shape, with other names: all of them at once.
  expect_refused({concat("--init_from=", kGoldens, "gpt_tiny/init.safetensors")},
                 {"embedding.weight", "layers.2.ffn.2.bias", "output_head.weight", "wpe", "ln_f"});
  expect_refused({concat("--init_from=", kGoldens, "bigmodel_tiny/init.safetensors")},
                 {"big_model: give the --layers, --dim, --ff_dim, --vocab_size that the weights",
                  "embedding.weight", "[97, 32]", "[101, 24]", "layers.0.attention.in_proj_weight",
                  "output_head.bias", "layers.2.layer_norm.weight"});
}

TEST_F(Mistakes, IntegersAreNoWeights) {
  const std::string path = folder_ + "/integers.safetensors";
  std::map<std::string, Tensor> weights =
      load_safetensors(concat(kGoldens, "bigmodel_odd/init.safetensors"));
  weights.at("output_head.weight") = to_raw(weights.at("output_head.weight"), kInt64);
  save_safetensors(path, weights);
  expect_refused({"--init_from=" + path}, {"output_head.weight", "int64", "float32"});
  weights.at("output_head.weight") = to_raw(weights.at("output_head.weight"), kFloat16);
  save_safetensors(path, weights);
  const dist::Result r = big_model(small_run(1) + Flags{"--steps=1", "--init_from=" + path});
  EXPECT_EQ(r.exit_code, 0) << r.err;  // other floating point numbers are converted
}

// Each flag with a path, each kind of thing that cannot be what it names.
TEST_F(Mistakes, Paths) {
  const auto at = [&](const char* name) { return folder_ + "/" + name; };
  ASSERT_EQ(symlink("loop", at("loop").c_str()), 0);
  ASSERT_EQ(mkfifo(at("fifo").c_str(), 0600), 0);
  ASSERT_EQ(mkfifo(at("fifo.bin").c_str(), 0600), 0);
  write_file(at("file"), "");
  const std::string long_name = at(std::string(300, 'x').c_str());
  const Flags saves = {"--save_interval=3"};
  for (const char* flag : {"--data=", "--val_data=", "--init_from="}) {
    expect_refused({flag + at("loop")}, {flag, "symbolic links"});
    expect_refused({flag + long_name}, {flag, "too long"});
    expect_refused({flag + at("fifo")}, {flag, "is neither a regular file nor a folder"});
    expect_refused({flag + at("fifo.bin")}, {flag, "is neither a regular file nor a folder"});
    expect_refused({flag + at("file/a")}, {flag, "Not a directory"});
  }
  for (const char* flag : {"--log_jsonl=", "--save_weights=", "--checkpoint_dir="}) {
    expect_refused(saves + Flags{flag + at("loop")}, {flag, "symbolic links"});
    expect_refused(saves + Flags{flag + long_name}, {flag, "too long"});
    expect_refused(saves + Flags{flag + at("fifo")}, {flag, "is not a"});
    expect_refused(saves + Flags{flag + at("file/a")}, {flag, "Not a directory"});
    expect_refused(saves + Flags{flag + std::string("/proc/x")}, {flag, "No such file"});
  }
  for (const char* flag : {"--log_jsonl=", "--save_weights="}) {
    expect_refused({flag + at("no/such/folder")}, {flag, "there is no folder " + at("no/such")});
    expect_refused({flag + folder_}, {flag, "is not a regular file"});
  }
  expect_refused(saves + Flags{"--checkpoint_dir=" + at("file")}, {"file is not a folder"});
  // One of our own: who may make devices may lose them too.
  if (mknod(at("device").c_str(), S_IFCHR | 0600, makedev(1, 3)) == 0)
    expect_refused({"--save_weights=" + at("device")}, {"is not a regular file"});
}

TEST_F(Mistakes, AFolderThatIsGone) {
  const std::string gone = folder_ + "/gone", program = fs::absolute(kBigModel);
  for (const char* flag :
       {"--data", "--init_from", "--log_jsonl", "--save_weights", "--checkpoint_dir"}) {
    const dist::Result r = dist::run({"/bin/sh", "-c",
                                      concat("mkdir ", gone, "; cd ", gone, "; rmdir ", gone,
                                             "; exec ", program, " ", flag, "=here")},
                                     big_model_environment());
    EXPECT_EQ(r.exit_code, 2) << r.err;
    EXPECT_NE(r.err.find("here is relative to the current folder, which is gone"),
              std::string::npos)
        << r.err;
  }
}

TEST_F(Mistakes, OutputsThatAreInputsOrEachOther) {
  const std::string tokens = folder_ + "/tokens.bin", weights = folder_ + "/init.safetensors",
                    link = folder_ + "/link", hard = folder_ + "/hard", other = folder_ + "/other";
  fs::copy(concat(kGoldens, "bigmodel_odd/tokens.bin"), tokens);
  fs::copy(concat(kGoldens, "bigmodel_odd/init.safetensors"), weights);
  fs::permissions(tokens, fs::perms::owner_write, fs::perm_options::add);
  fs::permissions(weights, fs::perms::owner_write, fs::perm_options::add);
  fs::create_symlink("tokens.bin", link);
  fs::create_hard_link(tokens, hard);
  fs::create_symlink("new", folder_ + "/to_new");
  const std::string before = dist::read_file(tokens);
  for (const char* flag : {"--log_jsonl=", "--save_weights="}) {
    for (const std::string& path :
         {tokens, link, hard,
          folder_ + "/../" + fs::path(folder_).filename().string() + "/tokens.bin"})
      expect_refused({"--data=" + tokens, flag + path}, {"--data=", flag, "same file"});
    expect_refused({"--init_from=" + weights, flag + weights}, {"--init_from=", flag, "same file"});
  }
  for (const char* name : {"new", "to_new"})
    expect_refused(
        {"--log_jsonl=" + folder_ + "/new", concat("--save_weights=", folder_, "/", name)},
        {"--log_jsonl=", "--save_weights=", "same file"});
  EXPECT_EQ(dist::read_file(tokens), before);
}

// A run's folder, and a folder that looks as a checkpoint of it does.
TEST_F(Mistakes, OutputsAmongWhatIsThere) {
  const std::string run = folder_ + "/run", step = run + "/step-000003";
  fs::create_directories(step);
  std::ofstream(step + "/state.json") << R"({"checksum": "0", "files": {}})";
  const Flags saves = {"--save_interval=3", "--checkpoint_dir=" + run};
  expect_refused(saves + Flags{"--overwrite", "--init_from=" + step},
                 {"--overwrite", "--init_from"});
  expect_refused({"--overwrite", "--checkpoint_dir=" + run}, {"--overwrite", "--save_interval=0"});
  // In a checkpoint, through a link to nothing yet as well, with or without a run.
  fs::create_symlink(step + "/new", folder_ + "/dangling");
  for (const char* flag : {"--log_jsonl=", "--save_weights="})
    for (const std::string& path : {step + "/x", folder_ + "/dangling"})
      expect_refused({flag + path}, {flag, "would lie in the checkpoint"});
  expect_refused({"--save_interval=3", "--checkpoint_dir=" + step}, {"--checkpoint_dir", step});
  // Under names that the run has for its own.
  for (const char* name : {"/.run-lock", "/step-000006", "/tokenizer.model"})
    expect_refused(saves + Flags{"--overwrite", "--save_weights=" + run + name},
                   {"--save_weights", "--checkpoint_dir"});
  expect_refused({"--save_weights=" + folder_ + "/w.safetensors",
                  "--log_jsonl=" + folder_ + "/w.tokenizer.model"},
                 {"the tokenizer of --save_weights", "same file"});
  // A tokenizer of somebody else's stays.
  const std::string theirs = run + "/tokenizer.model";
  std::ofstream(theirs) << "precious";
  expect_refused(saves + Flags{"--overwrite"}, {theirs, "another program's"});
  EXPECT_EQ(dist::read_file(theirs), "precious");
  // So does what somebody keeps in a checkpoint, and the log of the run that was not overwritten.
  fs::remove(theirs);
  std::ofstream(step + "/notes") << "mine";
  const std::string log = folder_ + "/log";
  write_file(log, "{\"step\": 1}\n");
  expect_refused(saves + Flags{"--overwrite", "--log_jsonl=" + log}, {"notes", "move it"});
  EXPECT_EQ(dist::read_file(log), "{\"step\": 1}\n");
  // Among texts: it would be read as text next time, or replace one.
  fs::create_directory(folder_ + "/texts");
  std::ofstream(folder_ + "/texts/a.txt") << "some text";
  for (const char* flag :
       {"--log_jsonl=", "--save_weights=", "--save_interval=3 --checkpoint_dir="}) {
    const std::string words = concat(flag, folder_, "/texts/a.txt");
    const size_t space = words.find(' ');
    Flags outputs = {words.substr(space == std::string::npos ? 0 : space + 1)};
    if (space != std::string::npos) outputs.push_back(words.substr(0, space));
    outputs[0] += space == std::string::npos ? "" : "x";
    expect_refused(Flags{"--data=" + folder_ + "/texts"} + outputs, {"would lie in --data="});
  }
  EXPECT_EQ(dist::read_file(folder_ + "/texts/a.txt"), "some text");
}

TEST_F(Mistakes, FoldersThatOneMayNotEnter) {
  if (geteuid() == 0) GTEST_SKIP() << "root may enter all";
  const std::string closed = folder_ + "/closed";
  fs::create_directory(closed);
  fs::permissions(closed, fs::perms::none);
  for (const char* flag :
       {"--data=", "--init_from=", "--log_jsonl=", "--save_weights=", "--checkpoint_dir="})
    expect_refused({flag + closed + "/x/y", "--save_interval=3"}, {flag, "Permission denied"});
  fs::permissions(closed, fs::perms::owner_all);
}

TEST_F(Mistakes, Environment) {
  using Variables = std::map<std::string, std::string>;
  for (auto& [variables, text] : std::vector<std::pair<Variables, std::string>>{
           {{{"RANK", "2"}, {"WORLD_SIZE", "2"}}, "RANK=2 is not in 0 ... WORLD_SIZE - 1 = 1"},
           {{{"RANK", "0"}, {"WORLD_SIZE", "0"}}, "WORLD_SIZE=0"},
           {{{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "1"}},
            "LOCAL_RANK=1"},
           {{{"SHERD_BACKEND", "nccl"}}, "SHERD_BACKEND=nccl"},
           {{{"SHERD_DEBUG", "garbage"}}, "garbage"},
           {{{"SHERD_GEMM", "garbage"}}, "garbage"},
           {{{"SHERD_BF16", "garbage"}}, "garbage"}}) {
    const dist::Result r = big_model(small_run(2), {.environment = variables});
    EXPECT_EQ(r.exit_code, 2) << r.err;
    EXPECT_EQ(dist::lines_of(r.err).size(), 1u) << r.err;
    EXPECT_NE(r.err.find(text), std::string::npos) << r.err;
  }
}

// Disks that fill up while the run goes on.
TEST_F(Mistakes, FullDisks) {
  const dist::Result log = big_model(small_run(2) + Flags{"--log_jsonl=/dev/full"});
  EXPECT_EQ(log.exit_code, 1) << log.err;
  EXPECT_NE(log.err.find("cannot write --log_jsonl=/dev/full: No space left"), std::string::npos)
      << log.err;
  rlimit before;
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit limit{10'000, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &limit);
  const dist::Result weights =
      big_model(small_run(1) + Flags{"--steps=1", "--save_weights=" + folder_ + "/weights"});
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_EQ(weights.exit_code, 1) << weights.err;
  EXPECT_NE(weights.err.find("weights: File too large"), std::string::npos) << weights.err;
  EXPECT_TRUE(fs::is_empty(folder_));
}

// A symbolic link is followed, also to nothing yet; what it points to is replaced.
TEST_F(Mistakes, LinksAreFollowed) {
  fs::create_symlink("weights", folder_ + "/link");
  for (int i = 0; i < 2; ++i) {
    const dist::Result r =
        big_model(small_run(1) + Flags{"--steps=1", "--save_weights=" + folder_ + "/link"});
    EXPECT_EQ(r.exit_code, 0) << r.err;
    EXPECT_TRUE(fs::is_symlink(folder_ + "/link"));
    EXPECT_TRUE(fs::is_regular_file(folder_ + "/weights"));
  }
}

// A job holds its folder and its log.
TEST_F(Mistakes, PlacesThatAnotherJobWrites) {
  const std::string folder = folder_ + "/run", log = folder_ + "/log";
  const dist::Program other(
      big_model_command(small_run(2) + Flags{"--steps=1000000", "--checkpoint_dir=" + folder,
                                             "--save_interval=1000000", "--log_jsonl=" + log}),
      big_model_environment());
  ASSERT_TRUE(dist::soon([&] { return fs::exists(log) && fs::file_size(log) > 0; }, 30));
  expect_refused({"--checkpoint_dir=" + folder, "--save_interval=3"},
                 {folder, "in use by process ", "another job"});
  expect_refused({"--checkpoint_dir=" + folder, "--save_interval=3", "--overwrite"},
                 {folder, "in use by process "});
  expect_refused({"--log_jsonl=" + log}, {"--log_jsonl=" + log, "in use by process "});
}

// What was cut short while it is read is named.
TEST_F(Mistakes, DataCutShortWhileTraining) {
  const std::string tokens = folder_ + "/tokens.bin", log = folder_ + "/log";
  write_file(tokens, std::string(1 << 20, '\0'));
  dist::Program run(
      big_model_command(without_data(small_run(1)) +
                        Flags{"--steps=1000000", "--data=" + tokens, "--log_jsonl=" + log}),
      big_model_environment());
  ASSERT_TRUE(dist::soon([&] { return fs::exists(log) && fs::file_size(log) > 0; }, 30));
  fs::resize_file(tokens, 10);
  const dist::Result r = run.wait();
  EXPECT_NE(r.exit_code, 0);
  EXPECT_NE(r.err.find(tokens + ": the file was cut short"), std::string::npos) << r.err;
}

TEST_F(Mistakes, PortInUse) {
  const int taken = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  ASSERT_EQ(bind(taken, reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(listen(taken, 1), 0);
  getsockname(taken, reinterpret_cast<sockaddr*>(&address), &size);
  const std::string port = std::to_string(ntohs(address.sin_port));
  const dist::Result r = big_model(small_run(1), {.environment = {{"RANK", "0"},
                                                                  {"WORLD_SIZE", "2"},
                                                                  {"MASTER_ADDR", "127.0.0.1"},
                                                                  {"MASTER_PORT", port}}});
  close(taken);
  EXPECT_NE(r.exit_code, 0);
  EXPECT_EQ(dist::lines_of(r.err).size(), 1u) << r.err;
  EXPECT_NE(r.err.find(port), std::string::npos) << r.err;
  EXPECT_LT(r.seconds, 10);
}

// ---- a rank that dies
// A run of two ranks that would go on for minutes, and the process ids of its ranks.
class LongRun {
 public:
  explicit LongRun(const Flags& flags)
      : folder_(dist::new_folder()),
        program_(
            big_model_command(small_run(2) +
                              Flags{"--steps=100000", "--log_jsonl=" + folder_ + "/log"} + flags),
            big_model_environment()) {}

  int64_t steps() const { return int64_t(lines_with(read_log(folder_ + "/log"), "loss").size()); }
  bool reaches(int64_t step) {
    return dist::soon([&] { return steps() >= step; }, 30);
  }
  // Of the rank, a child of the program.
  pid_t rank(int r) const {
    const std::string p = concat("/proc/", program_.pid());
    std::istringstream children(dist::read_file(p + concat("/task/", program_.pid(), "/children")));
    for (pid_t child; children >> child;) {
      const std::string environment = dist::read_file(concat("/proc/", child, "/environ"));
      if (environment.find(concat(std::string(1, '\0'), "RANK=", r, std::string(1, '\0'))) !=
          std::string::npos)
        return child;
    }
    return 0;
  }
  dist::Program& program() { return program_; }

 private:
  std::string folder_;
  dist::Program program_;
};

void kill_in_mid_run(int victim, const Flags& flags, int seconds) {
  LongRun run(flags);
  ASSERT_TRUE(run.reaches(3));
  const pid_t ranks[] = {run.rank(0), run.rank(1)};
  ASSERT_TRUE(dist::is_running(ranks[0]) && dist::is_running(ranks[1]));
  const auto start = std::chrono::steady_clock::now();
  kill(ranks[victim], SIGKILL);
  const dist::Result r = run.program().wait();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(seconds));
  EXPECT_FALSE(dist::is_running(ranks[0]) || dist::is_running(ranks[1]));
  EXPECT_GT(r.exit_code, 0);
  EXPECT_NE(r.err.find(concat("rank ", victim, ": killed by SIGKILL")), std::string::npos) << r.err;
}

TEST(DyingRanks, KilledInMidRun) {
  for (int victim : {1, 0}) kill_in_mid_run(victim, {}, 5);
}
TEST(DyingRanks, KilledInMidRunOverMpi) {
  if (!sherd::dist::has_mpirun()) GTEST_SKIP() << "mpirun is not installed";
  kill_in_mid_run(1, {"--backend=mpi"}, 15);  // mpirun takes some seconds to end
}

TEST(DyingRanks, InterruptEndsAll) {
  LongRun run({});
  ASSERT_TRUE(run.reaches(2));
  const pid_t ranks[] = {run.rank(0), run.rank(1)};
  kill(run.program().pid(), SIGINT);
  const dist::Result r = run.program().wait();
  EXPECT_EQ(r.exit_code, 128 + SIGINT);
  EXPECT_FALSE(dist::is_running(ranks[0]) || dist::is_running(ranks[1]));
}

TEST(DyingRanks, AnInterruptedRunSaysHowToGoOn) {
  for (const Flags& more : {Flags{}, Flags{"--async_save"}}) {
    const std::string folder = dist::new_folder() + "/run";
    LongRun run(more + Flags{"--save_interval=2", "--checkpoint_dir=" + folder});
    ASSERT_TRUE(run.reaches(8));
    kill(run.program().pid(), SIGINT);
    const dist::Result r = run.program().wait();
    EXPECT_EQ(r.exit_code, 128 + SIGINT);
    const std::string said = "the last checkpoint is ";
    const size_t at = r.err.find(said + folder + "/step-");
    ASSERT_NE(at, std::string::npos) << r.err;
    const size_t name = at + said.size(), end = r.err.find(';', name);
    EXPECT_TRUE(fs::exists(r.err.substr(name, end - name) + "/state.json")) << r.err;
    EXPECT_EQ(r.err.find("; go on: --resume --checkpoint_dir=" + folder + "\n"), end) << r.err;
  }
}

// One that throws: the loss becomes NaN, and every rank says so; it is told once.
TEST(DyingRanks, ThatThrow) {
  for (const char* backend : {"auto", "mpi"}) {
    if (backend == std::string("mpi") && !sherd::dist::has_mpirun()) continue;
    const dist::Result r =
        big_model(small_run(2) + Flags{"--lr=1e30", concat("--backend=", backend)});
    EXPECT_EQ(r.exit_code, 1);
    EXPECT_NE(r.err.find("--lr"), std::string::npos) << r.err;
    EXPECT_EQ(r.err.find("mpirun"), std::string::npos) << r.err;
    EXPECT_LT(r.seconds, 20);
  }
}

}  // namespace
}  // namespace examples
