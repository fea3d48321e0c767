// The index of a sharded checkpoint: cuts, boxes, and indexes that are broken.
#include "distributed/checkpoint/shard_index.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <set>

#include "core/atomic_file.h"

namespace sherd::dist {
namespace {

using nlohmann::json;
using Random = std::mt19937_64;

int64_t below(Random& r, int64_t n) { return int64_t(r() % uint64_t(n)); }

// Cuts of [0, n), some of them empty.
std::vector<int64_t> random_cuts(Random& r, int64_t n) {
  std::vector<int64_t> cuts{0, n};
  for (int64_t i = below(r, 6); i > 0; --i) cuts.push_back(below(r, n + 1));
  std::ranges::sort(cuts);
  return cuts;
}

// A tensor of int32 0, 1, … and the files that hold it.
struct Stored {
  ShardIndex index;
  std::vector<std::vector<int32_t>> files;
};
Stored store(const Dims& shape, const std::vector<std::pair<int64_t, int64_t>>& pieces, int files,
             Random& r) {
  Stored s;
  s.files.resize(size_t(files));
  auto& t = s.index.tensors["w"] = {kInt32, shape, {}};
  for (auto [begin, end] : pieces) {
    const int f = int(below(r, files));
    auto& bytes = s.files[size_t(f)];
    for (int64_t k = below(r, 3); k > 0; --k) bytes.push_back(-1);  // of other tensors
    t.pieces.push_back({begin, end, f, int64_t(bytes.size()) * 4});
    for (int64_t i = begin; i < end; ++i) bytes.push_back(int32_t(i));
  }
  std::ranges::shuffle(t.pieces, r);
  for (int f = 0; f < files; ++f) {
    const int64_t bytes = int64_t(s.files[size_t(f)].size()) * 4;
    s.index.files.push_back(
        {concat("f", f), bytes,
         std::vector<uint64_t>(size_t((bytes + kChecksumBlock - 1) / kChecksumBlock), 7)});
  }
  s.index.finish();
  return s;
}

void expect_reads(const Stored& s, int64_t begin, int64_t end) {
  int64_t at = begin;
  for (const ShardIndex::Read& r : s.index.reads("w", begin, end)) {
    ASSERT_EQ(r.begin, at);
    ASSERT_EQ(r.bytes, 4 * (r.end - r.begin));
    for (int64_t i = r.begin; i < r.end; ++i)
      ASSERT_EQ(s.files[size_t(r.file)].at(size_t(r.offset / 4 + i - r.begin)), i);
    at = r.end;
  }
  EXPECT_EQ(at, end);
}

TEST(ShardIndex, T_32_AnyCutsAreReadUnderAnyOthers) {
  Random r(1);
  for (int run = 0; run < 300; ++run) {
    const int64_t n = below(r, 40) + 1;
    std::vector<std::pair<int64_t, int64_t>> pieces;
    const auto saved = random_cuts(r, n);
    for (size_t i = 0; i + 1 < saved.size(); ++i) pieces.emplace_back(saved[i], saved[i + 1]);
    if (below(r, 2)) pieces.emplace_back(n / 3, n);  // some elements twice
    Stored s = store({n}, pieces, 3, r);
    s.index = ShardIndex::from_json(json::parse(s.index.to_json().dump()));
    const auto loaded = random_cuts(r, n);
    for (size_t i = 0; i + 1 < loaded.size(); ++i) expect_reads(s, loaded[i], loaded[i + 1]);
  }
}

TEST(ShardIndex, NeighboursAreReadAtOnce) {
  ShardIndex index;
  index.files = {{"f", 400, {1}}};
  index.tensors["w"] = {kFloat32, {10, 10}, {{0, 30, 0, 0}, {30, 70, 0, 120}, {70, 100, 0, 280}}};
  index.finish();
  const auto reads = index.reads("w", 5, 95);
  ASSERT_EQ(reads.size(), 1u);
  EXPECT_EQ(reads[0].offset, 20);
  EXPECT_EQ(reads[0].bytes, 360);
  EXPECT_TRUE(index.reads("w", 50, 50).empty());
  EXPECT_THROW(index.reads("w", 5, 101), Error);
  EXPECT_THROW(index.reads("x", 0, 0), Error);
}

TEST(ShardIndex, C_020_BoxesAreRuns) {
  Random r(2);
  for (int run = 0; run < 300; ++run) {
    Dims shape, start, size;
    for (int64_t d = below(r, 4); d > 0; --d) {
      shape.push(below(r, 5) + 1);
      start.push(below(r, shape[shape.n - 1]));
      size.push(below(r, shape[shape.n - 1] - start[start.n - 1] + 1));
    }
    std::set<int64_t> expected, found;
    const Dims strides = contiguous_strides(shape);
    for (int64_t i = 0; i < shape.numel(); ++i) {
      bool inside = true;
      for (int d = 0; d < shape.n; ++d) {
        const int64_t at = i / strides[d] % shape[d];
        inside = inside && at >= start[d] && at < start[d] + size[d];
      }
      if (inside) expected.insert(i);
    }
    int64_t last = -1;
    for (auto [begin, end] : runs_of_box(shape, start, size)) {
      EXPECT_GT(begin, last);  // rising, and neighbours joined
      EXPECT_GT(end, begin);
      for (int64_t i = begin; i < end; ++i) found.insert(i);
      last = end;
    }
    EXPECT_EQ(found, expected) << shape.n;
  }
  EXPECT_EQ(runs_of_box({4, 6}, {1, 0}, {2, 6}),
            (std::vector<std::pair<int64_t, int64_t>>{{6, 18}}));
  EXPECT_EQ(runs_of_box({}, {}, {}), (std::vector<std::pair<int64_t, int64_t>>{{0, 1}}));
  EXPECT_THROW(runs_of_box({4, 6}, {1, 3}, {2, 4}), Error);
  EXPECT_THROW(runs_of_box({4, 6}, {1}, {2}), Error);
}

TEST(ShardIndex, WhatNobodyHasIsNamed) {
  ShardIndex index;
  index.files = {{"f", 400, {1}}};
  index.tensors["head.weight"] = {kFloat32, {10, 10}, {{0, 30, 0, 0}, {31, 100, 0, 120}}};
  try {
    index.finish();
    ADD_FAILURE();
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("element 30 of 'head.weight'"), std::string::npos)
        << e.what();
  }
  index.tensors["head.weight"].pieces = {{0, 100, 0, 4}};  // beyond the file's end
  EXPECT_THROW(index.finish(), Error);
  index.tensors["head.weight"].pieces = {{0, 100, 1, 0}};
  EXPECT_THROW(index.finish(), Error);
}

// Whatever the bytes are, an Error or an index whose reads lie inside the files.
TEST(ShardIndex, MutatedJson) {
  Random r(3);
  const Stored s = store({5, 8}, {{0, 11}, {11, 12}, {12, 40}}, 2, r);
  const std::string good = s.index.to_json().dump();
  int refused = 0;
  for (int run = 0; run < 3000; ++run) {
    std::string text = good;
    for (int64_t k = below(r, 3); k >= 0; --k) {
      const size_t at = size_t(below(r, int64_t(text.size())));
      const char* from = "0123456789-{}[],\":abe.";
      if (below(r, 3) == 0)
        text.erase(at, size_t(below(r, 4)));
      else
        text[at] = from[below(r, 22)];
    }
    try {
      const ShardIndex index = ShardIndex::from_json(json::parse(text));
      for (auto& [name, t] : index.tensors)
        for (auto& read : index.reads(name, 0, t.shape.numel())) {
          const auto& file = index.files.at(size_t(read.file));
          EXPECT_LE(read.offset + read.bytes, file.bytes);
          EXPECT_GE(read.offset, 0);
        }
    } catch (const Error&) {
      ++refused;
    } catch (const json::parse_error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 1000);
}

}  // namespace
}  // namespace sherd::dist
