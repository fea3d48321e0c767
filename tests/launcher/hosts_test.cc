// Two hosts: two network namespaces with a cable between them (a veth pair). Needs the right to
// make them (root, or CAP_SYS_ADMIN and CAP_NET_ADMIN); skipped with a line where it is not given.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <memory>

#include "tests/launcher/program.h"

namespace sherd::dist {
namespace {

using Words = std::vector<std::string>;

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}
#define EXPECT_HAS(text, part) EXPECT_TRUE(has(text, part)) << "'" << (part) << "' in: " << (text)

constexpr const char* kBigModel = "examples/big_model";

class Hosts : public testing::Test {
 protected:
  void SetUp() override {
    // Left by a run that was killed: a name holds the pid of the process that made it.
    for (int host : {0, 1}) {
      const Result r = ip({"netns", "add", name(host)});
      if (r.exit_code != 0) GTEST_SKIP() << "network namespaces are not permitted here: " << r.err;
      made_ = host + 1;
      ip_in(host, {"link", "set", "lo", "up"});
    }
    const Result r = ip({"link", "add", "cable", "netns", name(0), "type", "veth", "peer", "name",
                         "cable", "netns", name(1)});
    if (r.exit_code != 0) GTEST_SKIP() << "veth pairs are not permitted here: " << r.err;
    for (int host : {0, 1}) {
      ip_in(host, {"addr", "add", address(host) + "/24", "dev", "cable"});
      ip_in(host, {"link", "set", "cable", "up"});
    }
  }
  void TearDown() override {
    jobs_.clear();
    for (int host = 0; host < made_; ++host) ip({"netns", "del", name(host)});
  }

  static std::string address(int host) { return "10.77.0." + std::to_string(host + 1); }
  void cut_the_cable() { ip_in(0, {"link", "set", "cable", "down"}); }

  // A sherdrun on the host, of these flags and more.
  Program& start(int host, Words flags, const Words& command, bool with_token = true) {
    Words words = on(host);
    words.push_back(kSherdrun);
    words.insert(words.end(), flags.begin(), flags.end());
    words.insert(words.end(), command.begin(), command.end());
    ProgramOptions options;
    if (with_token) options.environment["SHERD_STORE_TOKEN"] = "a secret of both hosts";
    jobs_.push_back(std::make_unique<Program>(words, options));
    return *jobs_.back();
  }

  static Words c10d(const Words& more = {}) {
    Words flags{"--nnodes=2", "--rdzv_backend=c10d", "--rdzv_endpoint=" + address(0),
                "--rdzv_conf=keep_alive_interval=1,keep_alive_max_attempt=4"};
    flags.insert(flags.end(), more.begin(), more.end());
    return flags;
  }
  static Words numbered(int host, const Words& more = {}) {
    Words flags{"--nnodes=2", "--node_rank=" + std::to_string(host), "--master_addr=" + address(0),
                "--rdzv_conf=keep_alive_interval=1,keep_alive_max_attempt=4"};
    flags.insert(flags.end(), more.begin(), more.end());
    return flags;
  }

  // A model of a few thousand parameters, fully sharded. Rank 0 writes a line a step into `log`.
  Words training(const Words& more = {}, const std::string& log = "log") {
    Words words{kBigModel,
                "--layers=2",
                "--dim=32",
                "--ff_dim=64",
                "--vocab_size=97",
                "--seq_len=16",
                "--batch_size=4",
                "--eval_interval=0",
                "--max_new_tokens=0",
                "--save_interval=0",
                "--data=tests/goldens/bigmodel_tiny/tokens.bin",
                "--log_jsonl=" + folder_ + "/" + log};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
  std::string log(const std::string& name = "log") { return read_file(folder_ + "/" + name); }

  const std::string folder_ = new_folder();

 private:
  static std::string name(int host) {
    return "sherd" + std::to_string(getpid()) + "_" + std::to_string(host);
  }
  // Runs what follows there. (`ip netns exec` and `ip -n` mount /sys anew, and cannot under chroot.)
  static Words on(int host) { return {"/usr/bin/nsenter", "--net=/var/run/netns/" + name(host)}; }
  static Result ip(const Words& words, Words before = {}) {
    before.push_back(access("/bin/ip", X_OK) == 0 ? "/bin/ip" : "/usr/sbin/ip");
    before.insert(before.end(), words.begin(), words.end());
    return run(before);
  }
  static void ip_in(int host, const Words& words) {
    const Result r = ip(words, on(host));
    EXPECT_EQ(r.exit_code, 0) << r.err;
  }

  int made_ = 0;
  std::vector<std::unique_ptr<Program>> jobs_;
};

std::string last_loss(const std::string& log) {
  const size_t at = log.rfind("\"loss\":");
  return at == std::string::npos ? "none" : log.substr(at, log.find(',', at) - at);
}

TEST_F(Hosts, R_015_train_over_two_hosts) {
  for (const bool is_c10d : {false, true}) {
    const Words steps = training({"--steps=6"});
    Program& a = start(
        0, is_c10d ? c10d({"--nproc_per_node=2"}) : numbered(0, {"--nproc_per_node=2"}), steps);
    Program& b = start(
        1, is_c10d ? c10d({"--nproc_per_node=2"}) : numbered(1, {"--nproc_per_node=2"}), steps);
    const Result first = a.wait(), second = b.wait();
    EXPECT_EQ(first.exit_code, 0) << first.out << first.err;
    EXPECT_EQ(second.exit_code, 0) << second.out << second.err;
    EXPECT_FALSE(has(first.err + second.err, "warning")) << first.err << second.err;
  }
}

TEST_F(Hosts, HybridShardingWithinAHostAndCopiesAcross) {
  std::string losses[2];
  for (const char* strategy : {"full_shard", "hybrid_shard"}) {
    const std::string name = std::string(strategy) + ".log";
    const Words steps = training({"--steps=5", std::string("--strategy=") + strategy}, name);
    Program &a = start(0, c10d({"--nproc_per_node=2"}), steps),
            &b = start(1, c10d({"--nproc_per_node=2"}), steps);
    const Result first = a.wait(), second = b.wait();
    EXPECT_EQ(first.exit_code + second.exit_code, 0) << first.err << second.err;
    losses[strategy[0] == 'h'] = last_loss(log(name));
  }
  EXPECT_NE(losses[0], "none");
  EXPECT_EQ(losses[0], losses[1]);  // the same tree of sums
}

TEST_F(Hosts, SharedMemoryWithinAndTcpAcrossGiveTheBitsOfTcp) {
  std::string losses[2];
  for (const char* backend : {"auto", "gloo"}) {
    const std::string name = std::string(backend) + ".log";
    const Words steps = training({"--steps=5", std::string("--backend=") + backend}, name);
    Program &a = start(0, c10d({"--nproc_per_node=2"}), steps),
            &b = start(1, c10d({"--nproc_per_node=2"}), steps);
    const Result first = a.wait(), second = b.wait();
    EXPECT_EQ(first.exit_code + second.exit_code, 0) << first.err << second.err;
    const bool is_auto = backend[0] == 'a';
    EXPECT_HAS(log(name), is_auto ? "\"backend\":\"shm+gloo\"" : "\"backend\":\"gloo\"");
    losses[is_auto] = last_loss(log(name));
  }
  EXPECT_NE(losses[0], "none");
  EXPECT_EQ(losses[0], losses[1]);  // all digits
}

TEST_F(Hosts, WithoutATokenTheyWarnAndMeetAllTheSame) {
  const Words steps = training({"--steps=2"});
  Program &a = start(0, c10d(), steps, false), &b = start(1, c10d(), steps, false);
  const Result first = a.wait(), second = b.wait();
  EXPECT_EQ(first.exit_code + second.exit_code, 0) << first.err << second.err;
  EXPECT_HAS(first.err, "SHERD_STORE_TOKEN is not set");
}

TEST_F(Hosts, CutCableEndsBothWithAClearError) {
  const Words endless = training({"--steps=1000000"});
  Program &a = start(0, numbered(0, {"--nproc_per_node=2"}), endless),
          &b = start(1, numbered(1, {"--nproc_per_node=2"}), endless);
  ASSERT_TRUE(soon([&] { return has(log(), "\"step\":5,"); }, 40)) << a.out();
  cut_the_cable();
  const auto cut = std::chrono::steady_clock::now();
  const Result first = a.wait(), second = b.wait();
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - cut).count();
  EXPECT_EQ(first.exit_code, 1);
  EXPECT_EQ(second.exit_code, 1);
  EXPECT_HAS(first.err, "node 1 (");
  EXPECT_HAS(first.err, "has not been heard of");
  EXPECT_HAS(second.err, "lost node 0 at 10.77.0.1:29500");
  EXPECT_LT(seconds, 25);  // silent for 4 s, and what ending takes
  std::printf("both ended %.1f s after the cut\n", seconds);
}

TEST_F(Hosts, NodeThatComesLate) {
  const Words steps = training({"--steps=3"});
  Program& b = start(1, c10d(), steps);
  EXPECT_FALSE(soon([&] { return !is_running(b.pid()); }, 1.5));  // waits for host 0
  Program& a = start(0, c10d(), steps);
  const Result first = a.wait(), second = b.wait();
  EXPECT_EQ(first.exit_code, 0) << first.err;
  EXPECT_EQ(second.exit_code, 0) << second.err;
}

TEST_F(Hosts, KilledNodeGoesOnFromTheCheckpoint) {
  const auto command = [&](const std::string& run) {
    return training(
        {"--steps=30", "--save_interval=3", "--resume", "--checkpoint_dir=" + folder_ + "/" + run},
        run + ".log");
  };
  Program &a = start(0, c10d(), command("whole")), &b = start(1, c10d(), command("whole"));
  const Result whole = a.wait();
  EXPECT_EQ(whole.exit_code + b.wait().exit_code, 0) << whole.err;

  Program& c = start(0, c10d({"--max_restarts=1"}), command("cut"));
  Program& d = start(1, c10d({"--max_restarts=1"}), command("cut"));
  ASSERT_TRUE(soon([&] { return has(log("cut.log"), "\"step\":8,"); }, 40));
  kill(d.pid(), SIGKILL);
  d.wait();
  Program& e = start(1, c10d({"--max_restarts=1"}), command("cut"));
  const Result cut = c.wait();
  EXPECT_EQ(cut.exit_code, 0) << cut.err;
  EXPECT_EQ(e.wait().exit_code, 0);
  EXPECT_HAS(cut.err, "restart 1 of 1");
  EXPECT_HAS(cut.out + cut.err, "resumed from");
  EXPECT_NE(last_loss(log("whole.log")), "none");
  EXPECT_EQ(last_loss(log("whole.log")), last_loss(log("cut.log"))) << cut.out << cut.err;
}

}  // namespace
}  // namespace sherd::dist
