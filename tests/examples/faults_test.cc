// What the main job does with mistakes of its user and with ranks that die.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
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
  expect_refused({"--resume", "--overwrite", "--checkpoint_dir=" + folder_},
                 {"--resume", "--overwrite"});
}

TEST_F(Mistakes, NumberOfRanks) {
  for (const char* n : {"0", "-1", "two", "1.5", "", "4x"}) {
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
  fs::create_directory(folder_ + "/nothing");
  expect_refused({"--data=" + folder_ + "/nothing"}, {"nothing"});
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
                 {"embedding.weight", "[97, 32]", "[101, 24]", "layers.0.attention.in_proj_weight",
                  "output_head.bias", "layers.2.layer_norm.weight"});
}

TEST_F(Mistakes, PlacesThatCannotBeWritten) {
  for (const char* flag : {"--log_jsonl=", "--save_weights="}) {
    expect_refused({flag + folder_ + "/no/such/folder"}, {flag + folder_ + "/no/such/folder"});
    expect_refused({flag + folder_}, {flag + folder_});
  }
  write_file(folder_ + "/file", "");
  expect_refused({"--checkpoint_dir=" + folder_ + "/file", "--save_interval=3"}, {"file"});
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
  if (access("/usr/bin/mpirun", X_OK) != 0) GTEST_SKIP() << "mpirun is not installed";
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

// One that throws: the loss becomes NaN, and every rank says so; it is told once.
TEST(DyingRanks, ThatThrow) {
  for (const char* backend : {"auto", "mpi"}) {
    if (backend == std::string("mpi") && access("/usr/bin/mpirun", X_OK) != 0) continue;
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
