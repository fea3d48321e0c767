#include "distributed/checkpoint/checkpoint_folder.h"

#include <gtest/gtest.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/fs.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <barrier>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <optional>
#include <random>
#include <set>
#include <thread>

#include "core/error.h"
#include "core/safetensors.h"
#include "tests/errors.h"

namespace sherd::dist {
namespace {

namespace fs = std::filesystem;
using Lines = std::vector<std::string>;

// While it lives, this thread may read and write only what permissions allow, also as root.
class BoundByPermissions {
 public:
  BoundByPermissions() {
    EXPECT_EQ(syscall(SYS_capget, &header_, before_), 0);
    __user_cap_data_struct less[2] = {before_[0], before_[1]};
    less[0].effective &= ~(1u << CAP_DAC_OVERRIDE | 1u << CAP_DAC_READ_SEARCH);
    EXPECT_EQ(syscall(SYS_capset, &header_, less), 0);
  }
  ~BoundByPermissions() { EXPECT_EQ(syscall(SYS_capset, &header_, before_), 0); }
  BoundByPermissions(const BoundByPermissions&) = delete;

 private:
  __user_cap_header_struct header_ = {_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct before_[2] = {};
};

class CheckpointFolder : public testing::Test {
 protected:
  void SetUp() override {
    const auto* t = testing::UnitTest::GetInstance()->current_test_info();
    // In memory where possible: these tests save hundreds of times, and fsync of a disk is slow.
    folder_ = fs::path(access("/dev/shm", W_OK) == 0 ? "/dev/shm" : testing::TempDir()) /
              concat("checkpoint-", t->name(), "-", int(getpid()));
    fs::remove_all(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string run() const { return folder_ / "run"; }
  std::string step_path(int64_t step) const { return run() + "/" + checkpoint_name(step); }
  // A checkpoint whose tensors and state all hold `value`.
  void write(CheckpointWriter& writer, double value) const {
    for (const char* name : {"model.safetensors", "optimizer.safetensors"}) {
      writer.add(name, save_safetensors(writer.path(name), {{"weight", full({100}, value)}}));
    }
  }
  void save(int64_t step, double value, CheckpointOptions options = {}) const {
    CheckpointWriter writer(run(), step, options);
    write(writer, value);
    writer.commit({{"value", value}});
  }
  // The one value that a checkpoint holds.
  static double value_of(const Checkpoint& c) {
    const double value = c.state.at("value");
    for (const char* name : {"model.safetensors", "optimizer.safetensors"}) {
      const Tensor w = load_safetensors(c.file(name)).at("weight");
      for (int i = 0; i < 100; ++i) EXPECT_EQ(w.data<float>()[i], value);
    }
    return value;
  }
  double latest_value() const {
    const auto c = latest_checkpoint(run(), [](const std::string&) {});
    return c ? value_of(*c) : -1;
  }
  int hidden() const {
    int n = 0;
    for (const auto& e : fs::directory_iterator(run()))
      n += e.path().filename().string().starts_with(".");
    return n;
  }
  static void put(const std::string& path, const std::string& text) {
    std::ofstream(path, std::ios::binary) << text;
  }

  fs::path folder_;
};

// Runs f in a child process and returns how it ended: its exit code, or minus the signal.
template <class F>
int in_child(F f) {
  const pid_t pid = fork();
  if (pid == 0) {
    try {
      f();
    } catch (...) {
      _exit(99);
    }
    _exit(0);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

TEST_F(CheckpointFolder, RoundTrip) {
  EXPECT_EQ(latest_checkpoint(run()), std::nullopt) << "no folder";
  fs::create_directories(run());
  EXPECT_EQ(latest_checkpoint(run()), std::nullopt) << "an empty folder";
  {
    CheckpointWriter writer(run(), 7);
    write(writer, 7);
    EXPECT_TRUE(checkpoint_steps(run()).empty()) << "not there before commit";
    EXPECT_EQ(writer.commit({{"value", 7}, {"rng", {UINT64_MAX, 1}}, {"name", "é\n"}, {"x", 0.1}}),
              step_path(7));
  }
  save(1'234'567, 8);
  EXPECT_EQ(checkpoint_steps(run()), (std::vector<int64_t>{7, 1'234'567}));
  EXPECT_EQ(latest_checkpoint(run())->step, 1'234'567);
  EXPECT_EQ(latest_checkpoint(run())->path, run() + "/step-1234567");
  const Checkpoint c = open_checkpoint(step_path(7));
  EXPECT_EQ(c.path, run() + "/step-000007");
  EXPECT_EQ(c.step, 7);
  EXPECT_EQ(value_of(c), 7);
  EXPECT_EQ(c.state.at("rng").at(0), UINT64_MAX);
  EXPECT_EQ(c.state.at("name"), "é\n");
  EXPECT_EQ(c.state.at("x"), 0.1);
  EXPECT_EQ(c.files.size(), 2);
  EXPECT_THROW(c.file("other"), Error);
  EXPECT_EQ(hidden(), 0);
  std::set<std::string> names;
  for (const auto& e : fs::directory_iterator(step_path(7))) names.insert(e.path().filename());
  EXPECT_EQ(names,
            (std::set<std::string>{"model.safetensors", "optimizer.safetensors", "state.json"}));
}

TEST_F(CheckpointFolder, KilledAtEveryStage) {
  for (bool overwrite : {false, true}) {
    const int64_t step = overwrite ? 2 : 3;
    // With keep_last, so that an old one is removed too.
    const auto options = [&](auto on_stage) {
      return CheckpointOptions{
          .keep_last = 2, .overwrite = overwrite, .report = {}, .on_stage = on_stage};
    };
    Lines stages;
    const fs::path before = folder_ / "before";
    const auto start = [&] {
      fs::remove_all(run());
      fs::copy(before, run(), fs::copy_options::recursive);
    };
    fs::remove_all(run());
    save(1, 1);
    save(2, 2);
    if (overwrite) save(0, 0);
    fs::remove_all(before);
    fs::rename(run(), before);
    start();
    save(step, 9, options([&](const std::string& s) { stages.push_back(s); }));
    ASSERT_GE(stages.size(), 7);
    EXPECT_EQ(std::ranges::count(stages, "exchanged"), overwrite);
    EXPECT_EQ(std::ranges::count(stages, "removed one"), 1);
    const size_t published = std::ranges::find(stages, "published") - stages.begin();

    for (bool kill : {true, false})
      for (size_t at = 0; at < stages.size(); ++at) {
        start();
        size_t n = 0;
        const auto stop = [&](const std::string&) {
          if (n++ == at && kill) _exit(42);
          if (n == at + 1) throw std::runtime_error("stopped");
        };
        if (kill) {
          ASSERT_EQ(in_child([&] { save(step, 9, options(stop)); }), 42);
        } else {
          EXPECT_THROW(save(step, 9, options(stop)), std::runtime_error);
          EXPECT_EQ(hidden(), stages[at] == "exchanged" ? hidden() : 0);
        }
        const bool there = at >= published || stages[at] == "exchanged";
        EXPECT_EQ(latest_value(), there ? 9 : 2) << stages[at];
        for (int64_t s : checkpoint_steps(run()))
          EXPECT_NO_THROW(open_checkpoint(step_path(s))) << "half a checkpoint has a step's name";
        save(4, 4);
        EXPECT_EQ(hidden(), 0) << "the next writer cleans up after " << stages[at];
        EXPECT_EQ(latest_value(), 4);
      }
  }
}

// From now on this process finds file systems that cannot exchange two names.
bool refuse_exchange() {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_renameat2, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[4])),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, RENAME_EXCHANGE, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter = {.len = std::size(program), .filter = program};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

TEST_F(CheckpointFolder, KilledWhereNamesCannotBeExchanged) {
  constexpr int kNotPermitted = 77;
  const auto overwrite = [&](const std::string& stop, bool kill) {
    return in_child([&] {
      if (!refuse_exchange()) _exit(kNotPermitted);
      save(2, 9, {.overwrite = true, .on_stage = [&](const std::string& stage) {
                    if (stage == stop && kill) _exit(42);
                    if (stage == stop) throw std::runtime_error("stopped");
                  }});
    });
  };
  save(1, 1);
  for (const std::string stop : {"set aside", "put in its place", "published", ""})
    for (bool kill : {true, false}) {
      save(2, 2, {.overwrite = true});
      const int code = overwrite(stop, kill);
      if (code == kNotPermitted) GTEST_SKIP() << "seccomp is not permitted here";
      ASSERT_EQ(code, stop.empty() ? 0 : kill ? 42 : 99);
      const double expected = stop == "set aside" ? 2 : 9;
      if (kill) {
        EXPECT_EQ(latest_value(), expected) << stop;
      } else {
        EXPECT_EQ(value_of(open_checkpoint(step_path(2))), expected) << stop;
      }
      EXPECT_EQ(checkpoint_steps(run()), (std::vector<int64_t>{1, 2}));
      save(3, 3);
      EXPECT_EQ(hidden(), 0) << "the next writer cleans up after " << stop;
      EXPECT_EQ(value_of(open_checkpoint(step_path(2))), expected) << stop;
      fs::remove_all(step_path(3));
    }
  // A writer that finds it first.
  save(2, 2, {.overwrite = true});
  ASSERT_EQ(overwrite("set aside", true), 42);
  EXPECT_HAS(error_of([&] { save(2, 5); }), "is there already");
  EXPECT_EQ(latest_value(), 2);
}

TEST_F(CheckpointFolder, FoldersAreMadeWithThoseAbove) {
  const std::string deep = folder_ / "a/b/c/run";
  CheckpointWriter writer(deep + "/", 1);
  write(writer, 1);
  writer.commit({{"value", 1}});
  EXPECT_EQ(checkpoint_steps(deep), (std::vector<int64_t>{1}));
}

TEST_F(CheckpointFolder, KilledWhileAFileIsWritten) {
  save(1, 1);
  ASSERT_EQ(in_child([&] {
              CheckpointWriter writer(run(), 2);
              SafetensorsWriter file(writer.path("model.safetensors"), {{"a", kFloat32, {1000}}});
              file.append_bytes(std::string(1000, 'x').data(), 1000);
              _exit(42);
            }),
            42);
  EXPECT_EQ(hidden(), 1);
  EXPECT_EQ(latest_value(), 1);
  save(2, 2);
  EXPECT_EQ(hidden(), 0);
  EXPECT_EQ(latest_value(), 2);
}

TEST_F(CheckpointFolder, KilledAtAnyMoment) {
  std::mt19937 random(1);
  int64_t newest = 0;
  save(0, 0);
  for (int round = 0; round < 15; ++round) {
    const pid_t pid = fork();
    if (pid == 0) {
      for (int64_t step = newest + 1;; ++step)
        save(step, double(step), {.keep_last = 2, .report = {}, .on_stage = {}});
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 60'000));
    kill(pid, SIGKILL);
    int status = 0;
    waitpid(pid, &status, 0);
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    Lines lines;
    const auto c = latest_checkpoint(run(), [&](const std::string& l) { lines.push_back(l); });
    ASSERT_TRUE(c);
    EXPECT_TRUE(lines.empty()) << lines[0];
    EXPECT_EQ(value_of(*c), double(c->step));
    EXPECT_GE(c->step, newest);
    newest = c->step;
  }
  EXPECT_GT(newest, 0);
}

TEST_F(CheckpointFolder, DamageIsNamedAndTheLastWholeOneIsTaken) {
  const std::string model = step_path(2) + "/model.safetensors",
                    state = step_path(2) + "/state.json";
  const auto replaced = [](std::string text, const std::string& from, const std::string& to) {
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos);
    return text.replace(at, from.size(), to);
  };
  struct Damage {
    std::string says;
    std::function<void()> harm;
  };
  const std::vector<Damage> all = {
      {"model.safetensors has 10 bytes", [&] { fs::resize_file(model, 10); }},
      {"model.safetensors has 1000 bytes", [&] { fs::resize_file(model, 1000); }},
      {"lacks model.safetensors", [&] { fs::remove(model); }},
      {"model.safetensors was changed",
       [&] {
         std::string text = read_file(model);
         text.back() ^= 1;
         put(model, text);
       }},
      {"has no state.json", [&] { fs::remove(state); }},
      {"state.json is damaged", [&] { put(state, ""); }},
      {"state.json is damaged", [&] { fs::resize_file(state, fs::file_size(state) / 2); }},
      {"state.json is damaged", [&] { put(state, "[]"); }},
      {"state.json is damaged", [&] { put(state, R"({"checksum":3})"); }},
      {"state.json was changed",
       [&] { put(state, replaced(read_file(state), "\"value\": 2", "\"value\": 3")); }},
      {"state.json was changed",
       [&] { put(state, replaced(read_file(state), "\"step\": 2", "\"step\": 3")); }},
      {"holds step 1",
       [&] {
         fs::remove_all(step_path(2));
         fs::copy(step_path(1), step_path(2));
       }},
      {"has no state.json",
       [&] {
         fs::remove_all(step_path(2));
         fs::create_directory(step_path(2));
       }},
  };
  for (const Damage& d : all) {
    fs::remove_all(run());
    save(1, 1);
    save(2, 2);
    d.harm();
    Lines lines;
    const auto c = latest_checkpoint(run(), [&](const std::string& l) { lines.push_back(l); });
    ASSERT_TRUE(c) << d.says;
    EXPECT_EQ(c->step, 1);
    EXPECT_EQ(value_of(*c), 1);
    ASSERT_EQ(lines.size(), 1);
    EXPECT_HAS(lines[0], "passing over step-000002");
    EXPECT_HAS(lines[0], d.says);
    // Training goes on from 1 and comes to 2 again: that is no overwriting.
    save(2, 2.5);
    EXPECT_EQ(latest_value(), 2.5);
    EXPECT_EQ(hidden(), 0);
  }
}

// It may be whole, so it is neither passed over nor replaced.
TEST_F(CheckpointFolder, OneThatMayNotBeRead) {
  save(1, 1);
  save(2, 2);
  for (const char* name : {"state.json", "model.safetensors", ""}) {
    const std::string path = step_path(2) + (*name ? "/" : "") + name;
    fs::permissions(path, fs::perms::none);
    std::optional<BoundByPermissions> bound(std::in_place);
    Lines lines;
    const std::string read = error_of(
        [&] { latest_checkpoint(run(), [&](const std::string& l) { lines.push_back(l); }); });
    const std::string written = error_of([&] { save(2, 2.5); });
    bound.reset();
    EXPECT_HAS(read, path + " may not be read by this user");
    EXPECT_TRUE(lines.empty());
    EXPECT_HAS(written, "is there already");
    fs::permissions(path, fs::perms::owner_all);
    EXPECT_EQ(latest_value(), 2);
  }
}

TEST_F(CheckpointFolder, ForeignFilesAreNotRemoved) {
  save(1, 1);
  need_removable_checkpoints(run());
  put(step_path(1) + "/notes.txt", "mine");
  for (const auto& remove : {need_removable_checkpoints, remove_checkpoints})
    EXPECT_HAS(error_of([&] { remove(run()); }), "notes.txt");
  EXPECT_TRUE(fs::exists(step_path(1) + "/notes.txt"));
}

TEST_F(CheckpointFolder, NoneIsWhole) {
  save(1, 1);
  save(2, 2);
  for (int64_t step : {1, 2}) fs::remove(step_path(step) + "/model.safetensors");
  Lines lines;
  const std::string e = error_of(
      [&] { latest_checkpoint(run(), [&](const std::string& l) { lines.push_back(l); }); });
  EXPECT_HAS(e, "none of the 2 checkpoints in " + run());
  EXPECT_EQ(lines.size(), 2);
  remove_checkpoints(run());
  EXPECT_EQ(latest_checkpoint(run()), std::nullopt);
}

TEST_F(CheckpointFolder, OverwritingIsRefusedUnlessAsked) {
  save(1, 1);
  const std::string before = read_file(step_path(1) + "/model.safetensors");
  EXPECT_HAS(error_of([&] { save(1, 2); }), step_path(1) + " is there already");
  EXPECT_EQ(read_file(step_path(1) + "/model.safetensors"), before);
  EXPECT_EQ(latest_value(), 1);
  EXPECT_EQ(hidden(), 0);
  save(1, 2, {.overwrite = true});
  EXPECT_EQ(latest_value(), 2);
  EXPECT_EQ(hidden(), 0);
  EXPECT_EQ(checkpoint_steps(run()), (std::vector<int64_t>{1}));
}

TEST_F(CheckpointFolder, TwoWritersOfOneStep) {
  // Both begin before either is done: the second to commit is refused, the first stays.
  CheckpointWriter a(run(), 1), b(run(), 1);
  write(a, 1);
  write(b, 2);
  EXPECT_EQ(hidden(), 2) << "a living writer's folder is left alone";
  b.commit({{"value", 2}});
  EXPECT_HAS(error_of([&] { a.commit({{"value", 1}}); }), "by somebody else meanwhile");
  EXPECT_EQ(latest_value(), 2);

  CheckpointWriter c(run(), 1, {.overwrite = true});
  write(c, 3);
  c.commit({{"value", 3}});
  EXPECT_EQ(latest_value(), 3);
}

TEST_F(CheckpointFolder, WritersRaceInThreads) {
  for (bool overwrite : {false, true}) {
    fs::remove_all(run());
    constexpr int kThreads = 6, kRounds = 4;
    std::barrier together(kThreads);
    std::atomic<int> saved = 0, refused = 0;
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t)
      threads.emplace_back([&, t] {
        for (int round = 0; round < kRounds; ++round) {
          together.arrive_and_wait();
          // Half of them the same step, the rest each its own.
          const int64_t step = t < 3 ? 100 * round : 100 * round + t;
          try {
            save(step, t, {.overwrite = overwrite});
            ++saved;
          } catch (const Error& e) {
            EXPECT_FALSE(overwrite) << e.what();
            ++refused;
          }
        }
      });
    for (auto& t : threads) t.join();
    EXPECT_EQ(saved, overwrite ? kThreads * kRounds : 4 * kRounds);
    EXPECT_EQ(refused, kThreads * kRounds - saved);
    EXPECT_EQ(checkpoint_steps(run()).size(), size_t(4 * kRounds));
    for (int64_t step : checkpoint_steps(run())) {
      const double value = value_of(open_checkpoint(step_path(step)));
      EXPECT_TRUE(step % 100 ? value == double(step % 100) : value < 3) << step;
    }
    EXPECT_EQ(hidden(), 0);
  }
}

TEST_F(CheckpointFolder, WritersRaceInProcesses) {
  std::vector<pid_t> children;
  for (int p = 0; p < 4; ++p) {
    const pid_t pid = fork();
    if (pid == 0) {
      for (int step = 0; step < 5; ++step) {
        try {
          save(step, 10 * step + p);
        } catch (const Error&) {
        }
      }
      _exit(0);
    }
    children.push_back(pid);
  }
  for (pid_t pid : children) {
    int status = 0;
    waitpid(pid, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  EXPECT_EQ(checkpoint_steps(run()), (std::vector<int64_t>{0, 1, 2, 3, 4}));
  for (int64_t step : checkpoint_steps(run())) {
    const double value = value_of(open_checkpoint(step_path(step)));
    EXPECT_EQ(int(value) / 10, step);
  }
  EXPECT_EQ(hidden(), 0);
}

TEST_F(CheckpointFolder, KeepsTheLastOnes) {
  const CheckpointOptions two = {.keep_last = 2};
  for (int64_t step = 1; step <= 5; ++step) save(step, double(step), two);
  EXPECT_EQ(checkpoint_steps(run()), (std::vector<int64_t>{4, 5}));
  // One that is not whole does not count as kept.
  fs::remove(step_path(5) + "/model.safetensors");
  save(6, 6, two);
  EXPECT_EQ(checkpoint_steps(run()), (std::vector<int64_t>{4, 5, 6}));
  EXPECT_NO_THROW(open_checkpoint(step_path(4)));
  save(7, 7, two);
  EXPECT_EQ(checkpoint_steps(run()), (std::vector<int64_t>{6, 7}));
  // Never the one that was just saved, though it is older.
  save(1, 1, {.keep_last = 1});
  EXPECT_EQ(checkpoint_steps(run()), (std::vector<int64_t>{1, 7}));
  save(8, 8);
  EXPECT_EQ(checkpoint_steps(run()), (std::vector<int64_t>{1, 7, 8})) << "0 keeps all";
  EXPECT_EQ(hidden(), 0);
}

TEST_F(CheckpointFolder, OtherThingsInTheFolder) {
  save(5, 5);
  for (const char* name : {"step-", "step-abc", "step-7", "step-0000007", "step-000007x",
                           "step--00007", "best", "step-99999999999999999999"})
    fs::create_directories(run() + "/" + name);
  put(run() + "/step-000009", "a file");
  put(run() + "/notes.txt", "text");
  EXPECT_EQ(checkpoint_steps(run()), (std::vector<int64_t>{5}));
  EXPECT_EQ(latest_value(), 5);
  EXPECT_HAS(error_of([&] { save(9, 9); }), "step-000009 is not a folder");
  EXPECT_EQ(read_file(run() + "/step-000009"), "a file");
  // Folders whose names only begin as those of writers that died.
  for (const char* name : {".tmp-mine", ".set-aside-notes"})
    fs::create_directories(run() + "/" + name);
  save(6, 6);
  for (const char* name : {".tmp-mine", ".set-aside-notes"}) {
    EXPECT_TRUE(fs::exists(run() + "/" + name)) << name;
    fs::remove(run() + "/" + name);
  }
  // Somebody's file in a step's folder is not removed with it.
  put(run() + "/step-000006/results.csv", "mine");
  EXPECT_HAS(error_of([&] { remove_checkpoints(run()); }), "results.csv");
  EXPECT_EQ(checkpoint_steps(run()), (std::vector<int64_t>{5, 6}));
  fs::remove(run() + "/step-000006/results.csv");
  remove_checkpoints(run());
  EXPECT_EQ(checkpoint_steps(run()), std::vector<int64_t>{});
  EXPECT_EQ(read_file(run() + "/notes.txt"), "text");
  EXPECT_TRUE(fs::exists(run() + "/best"));
}

TEST_F(CheckpointFolder, FoldersThatCannotBe) {
  fs::create_directories(folder_);
  put(run(), "a file");
  EXPECT_HAS(error_of([&] { save(1, 1); }), run());
  EXPECT_HAS(error_of([&] { latest_checkpoint(run()); }), "is not a folder");
  EXPECT_HAS(error_of([&] { CheckpointWriter("/dev/null/run", 1); }), "/dev/null/run");
  EXPECT_HAS(error_of([&] { open_checkpoint(folder_ / "none"); }), "none has no state.json");
  EXPECT_NO_THROW(remove_checkpoints(folder_ / "none"));
  EXPECT_THROW(CheckpointWriter(folder_ / "x", -1), Error);
  EXPECT_THROW(CheckpointWriter(folder_ / "x", 1, {.keep_last = -1}), Error);
}

TEST_F(CheckpointFolder, FilesThatWereNotSaid) {
  const auto commit = [&](auto f) {
    return error_of([&] {
      CheckpointWriter writer(run(), 1);
      write(writer, 1);
      f(writer);
      writer.commit({{"value", 1}});
    });
  };
  EXPECT_HAS(commit([](CheckpointWriter& w) { put(w.path("extra"), "x"); }),
             "extra was written, but not added");
  EXPECT_HAS(commit([](CheckpointWriter& w) {
               w.add("extra", {1, 2});
             }),
             "extra was added, but is not in");
  EXPECT_HAS(commit([](CheckpointWriter& w) { fs::resize_file(w.path("model.safetensors"), 3); }),
             "has 3 bytes");
  EXPECT_HAS(commit([](CheckpointWriter& w) { w.commit({{"bad", "\xff"}}); }), "as JSON");
  EXPECT_HAS(commit([](CheckpointWriter& w) {
               w.commit({{"value", 1}});
             }),
             "is not in")
      << "a second commit";
  for (const char* name : {"", ".", "..", "a/b", "/x", ".hidden", "state.json"}) {
    CheckpointWriter writer(run(), 2);
    EXPECT_THROW(writer.path(name), Error) << name;
    EXPECT_THROW(writer.add(name, {}), Error) << name;
  }
  EXPECT_EQ(checkpoint_steps(run()), (std::vector<int64_t>{1}));
  EXPECT_EQ(hidden(), 0);
}

TEST_F(CheckpointFolder, StateWithNaNIsStillWhole) {
  CheckpointWriter writer(run(), 1);
  writer.commit({{"loss", std::nan("")}});
  EXPECT_TRUE(open_checkpoint(step_path(1)).state.at("loss").is_null());
}

}  // namespace
}  // namespace sherd::dist
