// Pieces of tensors through the files of a sharded checkpoint.
#include "distributed/checkpoint/shard_files.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <numeric>

#include "core/safetensors.h"
#include "tests/distributed/spawn.h"

namespace sherd::dist {
namespace {

namespace fs = std::filesystem;
using Runs = std::vector<std::pair<int64_t, int64_t>>;

class ShardFiles : public testing::Test {
 protected:
  void SetUp() override {
    const auto* t = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = fs::path(testing::TempDir()) / concat("shards-", t->name(), "-", int(getpid()));
    fs::remove_all(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string folder() const { return folder_; }
  std::string path(int64_t step) const { return folder_ / checkpoint_name(step); }

  fs::path folder_;
};

// 0, 1, … as a tensor; the values of its elements [begin, end).
Tensor counted(int64_t begin, int64_t end, float plus = 0) {
  Tensor t = empty({end - begin}, kFloat32);
  for (int64_t i = begin; i < end; ++i) t.data<float>()[i - begin] = float(i) + plus;
  return t;
}
LocalState pieces_of(const std::string& name, const Dims& shape, const Runs& runs, float plus = 0) {
  LocalState s;
  for (auto [begin, end] : runs)
    s.pieces.push_back({name, shape, begin, end, counted(begin, end, plus)});
  return s;
}
// What each rank has of a tensor of rows, by numbers of rows.
Runs rows(std::vector<int64_t> counts, int64_t columns, int rank, int world) {
  Runs mine;
  int64_t at = 0;
  for (size_t k = 0; k < counts.size(); at += counts[k++])
    if (int(k) % world == rank) mine.emplace_back(at * columns, (at + counts[k]) * columns);
  return mine;
}
std::string error_text(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}
void expect_read(ShardReader& reader, const std::string& name, const Runs& runs, float plus = 0) {
  for (auto [begin, end] : runs) {
    const Tensor t = empty({end - begin}, kFloat32);
    reader.verify(reader.index().reads(name, begin, end));
    reader.read(name, begin, end, t.bytes());
    for (int64_t i = begin; i < end; ++i)
      ASSERT_EQ(t.data<float>()[i - begin], float(i) + plus) << name << " " << i;
  }
}

TEST_F(ShardFiles, C_014_RowsSavedUnderAnyCutLoadUnderAnyOther) {
  const Dims shape{10, 20};
  const std::vector<std::vector<int64_t>> cuts{{5, 5}, {3, 2, 4, 1}, {2, 1, 3, 3, 1}, {8, 2}, {10}};
  int64_t step = 0;
  for (auto& saved : cuts) {
    run_ranks(2, [&](int rank) {
      save_shards(default_group(), folder(), step,
                  pieces_of("w", shape, rows(saved, 20, rank, 2), float(step)));
      ShardReader reader(open_checkpoint(path(step)));
      for (auto& loaded : cuts) expect_read(reader, "w", rows(loaded, 20, rank, 2), float(step));
      // By columns.
      expect_read(reader, "w", runs_of_box(shape, {0, rank ? 13 : 0}, {10, rank ? 7 : 13}),
                  float(step));
    });
    ++step;
  }
  // Whole in one process, read in pieces, and the other way.
  save_shards(nullptr, folder(), step, pieces_of("x", {32}, {{0, 32}}));
  ShardReader whole(open_checkpoint(path(step)));
  expect_read(whole, "x", {{0, 8}, {8, 32}});
  ++step;
  run_ranks(2, [&](int rank) {
    save_shards(default_group(), folder(), step,
                pieces_of("x", {32}, rank ? Runs{{10, 32}} : Runs{{0, 10}}));
  });
  ShardReader pieces(open_checkpoint(path(step)));
  expect_read(pieces, "x", {{0, 32}});
}

TEST_F(ShardFiles, C_020_ColumnsAndRowsJoin) {
  run_ranks(2, [&](int rank) {
    LocalState s = pieces_of("columns", {4, 4}, runs_of_box({4, 4}, {0, 2 * rank}, {4, 2}));
    for (auto& p : pieces_of("rows", {4, 4}, runs_of_box({4, 4}, {2 * rank, 0}, {2, 4})).pieces)
      s.pieces.push_back(p);
    save_shards(default_group(), folder(), 0, s);
    ShardReader reader(open_checkpoint(path(0)));
    expect_read(reader, "columns", {{0, 16}});
    expect_read(reader, "rows", {{0, 16}});
  });
}

TEST_F(ShardFiles, C_015_FilesHoldEachPieceOnceAndTheIndexSaysWhere) {
  run_ranks(4, [&](int rank) {
    LocalState s;
    for (int i = 0; i < 8; ++i)  // every rank has these
      s.pieces.push_back({concat("same", i), {100}, 0, 100, counted(0, 100)});
    s.pieces.push_back({"cut", {8}, 2 * rank, 2 * rank + 2, counted(2 * rank, 2 * rank + 2)});
    s.pieces.push_back({"bytes", {3}, 0, 3, full({3}, 7, kUInt8)});
    s.pieces.push_back({"none", {0, 5}, 0, 0, empty({0}, kInt64)});
    s.pieces.push_back({"scalar", {}, 0, 1, full({}, 3, kInt64), true});
    s.aliases = {{"second name", "same3"}};
    s.own = rank * 10;
    s.common = concat("of rank ", rank);
    save_shards(default_group(), folder(), 3, s);
  });
  const Checkpoint c = open_checkpoint(path(3));
  EXPECT_EQ(c.state.at("ranks"), (nlohmann::json{0, 10, 20, 30}));
  EXPECT_EQ(c.state.at("common"), "of rank 0");
  // By a reader that knows nothing of the index.
  std::map<std::string, int> times;
  int64_t data = 0;
  for (int r = 0; r < 4; ++r) {
    const SafetensorsReader file(c.file(concat("rank-0000", r, "-of-00004.safetensors")));
    for (auto& t : file.tensors()) ++times[t.name], data += t.bytes;
    EXPECT_GE(file.tensors().size(), 3u);  // the work is spread
    EXPECT_EQ(file.read(concat("cut[", 2 * r, ":", 2 * r + 2, "]")).data<float>()[1],
              float(2 * r + 1));
  }
  for (int i = 0; i < 8; ++i) EXPECT_EQ(times[concat("same", i)], 1);
  EXPECT_EQ(times["scalar"], 1);
  EXPECT_EQ(data, 8 * 400 + 32 + 3 + 8);

  const nlohmann::json index = nlohmann::json::parse(read_file(c.file("index.json")));
  for (auto& [name, t] : index.at("tensors").items())
    for (auto& p : t.at("pieces")) {
      std::ifstream file(c.path + "/" + p.at("file").get<std::string>(), std::ios::binary);
      file.seekg(p.at("offset").get<int64_t>());
      std::string bytes(p.at("bytes").get<size_t>(), 0);
      file.read(bytes.data(), std::streamsize(bytes.size()));
      if (t.at("dtype") == "F32") {
        const Tensor v = counted(p.at("begin"), p.at("end"));
        EXPECT_EQ(bytes, std::string(v.bytes(), size_t(v.nbytes()))) << name;
      }
    }
  EXPECT_EQ(index.at("tensors").at("none").at("shape"), (nlohmann::json{0, 5}));
  ShardReader reader(c);
  expect_read(reader, "second name", {{0, 100}});
}

TEST_F(ShardFiles, C_016_OverwritingOnRequestOnly) {
  run_ranks(2, [&](int rank) {
    const Runs mine = rank ? Runs{{4, 9}} : Runs{{0, 4}};
    save_shards(default_group(), folder(), 1, pieces_of("w", {9}, mine));
    EXPECT_NE(error_text([&] {
                save_shards(default_group(), folder(), 1, pieces_of("w", {9}, mine, 50));
              }).find("is there already"),
              std::string::npos);
    ShardReader old(open_checkpoint(path(1)));
    expect_read(old, "w", {{0, 9}});
    barrier();
    save_shards(default_group(), folder(), 1, pieces_of("w", {9}, mine, 50), {.overwrite = true});
    ShardReader reader(open_checkpoint(path(1)));
    expect_read(reader, "w", {{0, 9}}, 50);
  });
}

TEST_F(ShardFiles, C_017_EveryRankGetsTheListOfThoseThatFailed) {
  struct Case {
    std::vector<int> ranks;  // that fail
    const char* stage;
  };
  for (const Case& c : {Case{{2}, "write"}, Case{{1, 3}, "write"}, Case{{0}, "begun"},
                        Case{{0}, "state written"}, Case{{0}, "synced"}}) {
    run_ranks(4, [&](int rank) {
      CheckpointOptions options;
      options.on_stage = [&](const std::string& stage) {
        if (stage == c.stage && std::ranges::count(c.ranks, rank)) fail("no room on disk ", rank);
      };
      const std::string text = error_text([&] {
        save_shards(default_group(), folder(), 5, pieces_of("w", {8}, {{2 * rank, 2 * rank + 2}}),
                    options);
      });
      for (int r = 0; r < 4; ++r)
        EXPECT_EQ(text.find(concat("rank ", r, ": no room on disk ", r)) != std::string::npos,
                  std::ranges::count(c.ranks, r) > 0)
            << c.stage << "\n"
            << text;
    });
    EXPECT_TRUE(checkpoint_steps(folder()).empty());
  }
  // Without ranks.
  CheckpointOptions options;
  options.on_stage = [](const std::string& stage) {
    if (stage == "write") fail("no room");
  };
  EXPECT_EQ(error_text([&] {
              save_shards(nullptr, folder(), 5, pieces_of("w", {2}, {{0, 2}}), options);
            }),
            "no room");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder()), fs::directory_iterator()), 0);
}

TEST_F(ShardFiles, RanksThatDisagreeAreNamed) {
  const auto error = [&](const std::function<ShardPiece(int rank)>& piece) {
    std::vector<std::string> texts(2);
    run_ranks(2, [&](int rank) {
      texts[size_t(rank)] =
          error_text([&] { save_shards(default_group(), folder(), 1, {.pieces = {piece(rank)}}); });
    });
    EXPECT_EQ(texts[0], texts[1]);
    EXPECT_NE(texts[0].find("'a.weight'"), std::string::npos) << texts[0];
    return texts[0];
  };
  EXPECT_NE(
      error([](int r) {
        return ShardPiece{"a.weight", {4}, 2 * r, 2 * r + 2, empty({2}, r ? kBFloat16 : kFloat32)};
      }).find("float32"),
      std::string::npos);
  EXPECT_NE(error([](int r) {
              return ShardPiece{"a.weight", {4 + r}, 2 * r, 2 * r + 2, zeros({2})};
            }).find("[5]"),
            std::string::npos);
  EXPECT_NE(error([](int r) {
              return ShardPiece{"a.weight", {}, 0, 1, full({}, r, kInt64), true};
            }).find("value"),
            std::string::npos);
  EXPECT_NE(error([](int) {
              return ShardPiece{"a.weight", {4}, 0, 2, zeros({2})};
            }).find("element 2"),
            std::string::npos);
  EXPECT_NE(error([](int) {
              return ShardPiece{"a.weight", {4}, 0, 2, zeros({3})};
            }).find("[3]"),
            std::string::npos);
}

TEST_F(ShardFiles, T_33_DamageIsFoundWhereItIsRead) {
  // Three blocks a rank.
  const int64_t n = 3 * kChecksumBlock / 4;
  run_ranks(2, [&](int rank) {
    save_shards(default_group(), folder(), 1, pieces_of("w", {2, n}, {{rank * n, rank * n + n}}));
  });
  const std::string file = path(1) + "/rank-00001-of-00002.safetensors";
  {
    std::fstream f(file, std::ios::in | std::ios::out | std::ios::binary);
    f.seekp(kChecksumBlock + 1000);
    f.put('x');
  }
  ShardReader reader(open_checkpoint(path(1), Verify::kSizes));
  reader.verify(reader.index().reads("w", 0, n));
  reader.verify(reader.index().reads("w", n, n + 1000));
  reader.verify(reader.index().reads("w", 2 * n - 1000, 2 * n));
  const std::string text = error_text([&] { reader.verify(reader.index().reads("w", n, 2 * n)); });
  EXPECT_NE(text.find(file), std::string::npos) << text;
  EXPECT_NE(text.find(std::to_string(kChecksumBlock)), std::string::npos) << text;
  EXPECT_THROW(open_checkpoint(path(1)), Error);  // all of it

  fs::resize_file(file, 100);
  EXPECT_THROW(reader.verify(reader.index().reads("w", n, n + 1000)), DamagedCheckpoint);
  EXPECT_THROW(open_checkpoint(path(1), Verify::kSizes), Error);
  std::ofstream(path(1) + "/index.json", std::ios::app) << " ";
  EXPECT_THROW(open_checkpoint(path(1), Verify::kSizes), Error);
}

}  // namespace
}  // namespace sherd::dist
