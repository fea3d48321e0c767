#include "data/token_dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <set>

#include "data/data_loader.h"
#include "data/tokenizer.h"
#include "tests/data/temp_folder.h"

namespace sherd::data {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

std::vector<int64_t> values(const Tensor& x) {
  return {x.data<int64_t>(), x.data<int64_t>() + x.numel()};
}

std::vector<uint16_t> random_tokens(size_t n, int vocab_size, uint32_t seed = 1) {
  std::mt19937 random(seed);
  std::vector<uint16_t> tokens(n);
  for (auto& t : tokens) t = uint16_t(random() % uint32_t(vocab_size));
  return tokens;
}

std::string bytes_of(const std::vector<uint16_t>& tokens) {
  return {reinterpret_cast<const char*>(tokens.data()), tokens.size() * 2};
}

// In files of any lengths and in memory alike: sample i is tokens[i*T : i*T+T], labels one later.
TEST(TokenDataset, IsOneRunOfTokens) {
  const TempFolder folder;
  const auto tokens = random_tokens(1001, 97);
  std::vector<std::string> files;
  size_t begin = 0;
  for (size_t length : {1, 2, 500, 7, 1, 490}) {
    files.push_back(folder.path(std::to_string(files.size()) + ".bin"));
    write_tokens(files.back(), std::span(tokens).subspan(begin, length));
    begin += length;
  }
  ASSERT_EQ(begin, tokens.size());
  for (int64_t T : {1, 3, 16, 250, 1000}) {
    const TokenOptions options = {.sequence_length = T, .vocab_size = 97};
    for (const auto& dataset : {TokenDataset(files, options), TokenDataset(tokens, options)}) {
      ASSERT_EQ(dataset.size(), 1000 / T);
      EXPECT_EQ(dataset.token_count(), 1001);
      for (int64_t i = 0; i < dataset.size(); ++i) {
        const Sample sample = dataset.get(i);
        const auto at = tokens.begin() + i * T;
        ASSERT_EQ(values(sample.at("input_ids")), std::vector<int64_t>(at, at + T));
        ASSERT_EQ(values(sample.at("labels")), std::vector<int64_t>(at + 1, at + T + 1));
      }
    }
  }
}

// That of the run, however it is cut; of another token anywhere, another. Runs of over 2 million
// tokens are looked at in places.
TEST(TokenDataset, FingerprintIsOfTheTokens) {
  const TempFolder folder;
  const TokenOptions options = {.sequence_length = 16};
  for (int64_t n : {17, 4096, 10'001, 3'000'000}) {
    auto tokens = random_tokens(n, 97);
    const uint64_t expected = TokenDataset(tokens, options).fingerprint();
    EXPECT_NE(expected, 0u);
    const std::vector<std::string> files = {folder.path("a.bin"), folder.path("b.bin")};
    write_tokens(files[0], std::span(tokens).first(size_t(n / 3)));
    write_tokens(files[1], std::span(tokens).subspan(size_t(n / 3)));
    EXPECT_EQ(TokenDataset(files, options).fingerprint(), expected) << n;
    std::set<uint64_t> others = {expected};
    for (int64_t i : {int64_t(0), n / 2 % 4096, n - 1}) {
      ++tokens[size_t(i)];
      EXPECT_TRUE(others.insert(TokenDataset(tokens, options).fingerprint()).second)
          << n << " " << i;
    }
    tokens.push_back(0);
    EXPECT_TRUE(others.insert(TokenDataset(tokens, options).fingerprint()).second) << n;
  }
}

TEST(TokenDataset, TakesARange) {
  const TempFolder folder;
  std::vector<uint16_t> tokens(20);
  std::iota(tokens.begin(), tokens.end(), uint16_t(0));
  const std::vector<std::string> files = {folder.write("a", bytes_of({0, 1, 2, 3, 4})),
                                          folder.write("b", bytes_of({5, 6, 7})),
                                          folder.write("c", bytes_of({8, 9, 10, 11, 12}))};
  const TokenDataset middle(files, {.sequence_length = 2, .offset = 4, .length = 7});
  EXPECT_EQ(middle.token_count(), 7);
  EXPECT_EQ(middle.size(), 3);
  EXPECT_THAT(values(middle.get(0).at("input_ids")), ElementsAre(4, 5));
  EXPECT_THAT(values(middle.get(2).at("labels")), ElementsAre(9, 10));
  const TokenDataset rest(tokens, {.sequence_length = 3, .offset = 10});
  EXPECT_EQ(rest.size(), 3);
  EXPECT_THAT(values(rest.get(0).at("labels")), ElementsAre(11, 12, 13));
  // Ids outside of the range are nobody's business.
  EXPECT_EQ(TokenDataset(files, {.sequence_length = 2, .vocab_size = 8, .length = 8}).size(), 3);
  const auto refused = [&](int64_t offset, int64_t length) {
    return message_of<Error>(
        [&] { TokenDataset(tokens, {.sequence_length = 1, .offset = offset, .length = length}); });
  };
  EXPECT_THAT(refused(21, -1), HasSubstr("20 tokens"));
  EXPECT_THAT(refused(-1, -1), HasSubstr("offset -1"));
  EXPECT_THAT(refused(15, 6), HasSubstr("length 6"));
  EXPECT_THAT(refused(0, -2), HasSubstr("length -2"));
  EXPECT_THAT(refused(20, -1), HasSubstr("too few"));
  EXPECT_THAT(refused(INT64_MAX, INT64_MAX), HasSubstr("20 tokens"));
}

TEST(TokenDataset, RefusesBrokenFiles) {
  const TempFolder folder;
  const std::string good = folder.write("good.bin", bytes_of({1, 2, 3, 4}));
  const auto refused = [&](const std::string& path) {
    return message_of<Error>([&] { TokenDataset({good, path}, {.sequence_length = 1}); });
  };
  EXPECT_THAT(refused(folder.write("empty.bin", "")),
              AllOf(HasSubstr("empty.bin"), HasSubstr("is empty")));
  EXPECT_THAT(refused(folder.write("odd.bin", "abc")),
              AllOf(HasSubstr("odd.bin"), HasSubstr("3 bytes"), HasSubstr("cut short")));
  EXPECT_THAT(refused(folder.path("none.bin")),
              AllOf(HasSubstr("none.bin"), HasSubstr("No such file")));
  EXPECT_THAT(refused(folder.path()), HasSubstr("not a regular file"));
  EXPECT_THAT(message_of<Error>([&] { TokenDataset({good}, {.sequence_length = 4}); }),
              AllOf(HasSubstr("good.bin"), HasSubstr("4 tokens"), HasSubstr("= 5")));
  EXPECT_THAT(message_of<Error>([&] { TokenDataset({good}, {.sequence_length = INT64_MAX}); }),
              AllOf(HasSubstr("4 tokens"), HasSubstr("= 9223372036854775808")));
  EXPECT_EQ(TokenDataset({good}, {.sequence_length = 3}).size(), 1);
  EXPECT_THAT(message_of<Error>([&] { TokenDataset({good}, {}); }), HasSubstr("sequence_length"));
  EXPECT_THAT(
      message_of<Error>([&] { TokenDataset({good}, {.sequence_length = 1, .vocab_size = 0}); }),
      HasSubstr("vocab_size"));
  EXPECT_THAT(
      message_of<Error>([&] { TokenDataset(std::vector<std::string>(), {.sequence_length = 1}); }),
      HasSubstr("no file"));
}

TEST(TokenDataset, FindsAnIdBeyondTheVocabulary) {
  const TempFolder folder;
  const std::string first = folder.write("first.bin", bytes_of(random_tokens(100, 97)));
  for (size_t position : {0, 31, 65535, 65536, 199'998, 199'999}) {
    auto tokens = random_tokens(200'000, 97);
    tokens[position] = 97;
    tokens.back() = 98;
    const size_t found = std::min(position, tokens.size() - 1);
    const std::string file = folder.write("bad.bin", bytes_of(tokens));
    EXPECT_THAT(
        message_of<Error>([&] {
          TokenDataset({first, file}, {.sequence_length = 8, .vocab_size = 97, .offset = 50});
        }),
        AllOf(HasSubstr("bad.bin"), HasSubstr(found == 199'999 ? "token 98" : "token 97"),
              HasSubstr("position " + std::to_string(found) + ","), HasSubstr("has 97 (0 to 96)")));
    EXPECT_NO_THROW(TokenDataset({first, file}, {.sequence_length = 8, .vocab_size = 99}));
  }
  const std::string all = folder.write("all.bin", bytes_of({65535, 65535}));
  EXPECT_NO_THROW(TokenDataset({all}, {.sequence_length = 1}));
  EXPECT_THAT(
      message_of<Error>([&] { TokenDataset({all}, {.sequence_length = 1, .vocab_size = 65535}); }),
      HasSubstr("position 0"));
}

TEST(TokenDataset, KnowsBytesPerToken) {
  const auto dataset = TokenDataset::from_text("hello, world", ByteTokenizer(), 4);
  EXPECT_EQ(dataset.size(), 2);
  EXPECT_EQ(dataset.bytes_per_token(), 1);
  const TokenDataset given(random_tokens(100, 7), {.sequence_length = 4, .raw_bytes = 350});
  EXPECT_EQ(given.bytes_per_token(), 3.5);
  const TokenDataset unknown(random_tokens(100, 7), {.sequence_length = 4});
  EXPECT_THAT(message_of<Error>([&] { unknown.bytes_per_token(); }), HasSubstr("raw_bytes"));
}

// What a run on a token file reads without shuffling: global batch k of B samples holds samples
// k*B to k*B + B - 1, and rank r of W those whose index is r modulo W.
TEST(TokenDataset, SplitsGlobalBatchesOverRanks) {
  constexpr int64_t T = 16, B = 8, kBatches = 30;
  const auto tokens = random_tokens(B * kBatches * T + 1, 97, 2);
  const TempFolder folder;
  const std::string file = folder.write("tokens.bin", bytes_of(tokens));
  for (int64_t W : {1, 2, 4, 8})
    for (int64_t rank = 0; rank < W; ++rank) {
      const TokenDataset dataset({file}, {.sequence_length = T, .vocab_size = 97});
      DistributedSampler sampler(dataset.size(),
                                 {.num_replicas = W, .rank = rank, .shuffle = false});
      DataLoader loader(dataset, {.batch_size = B / W, .sampler = &sampler, .num_workers = 2});
      ASSERT_EQ(loader.size(), kBatches);
      int64_t k = 0;
      for (auto& batch : loader) {
        std::vector<int64_t> x, y;
        for (int64_t i = k * B; i < (k + 1) * B; ++i)
          if (i % W == rank) {
            x.insert(x.end(), tokens.begin() + i * T, tokens.begin() + i * T + T);
            y.insert(y.end(), tokens.begin() + i * T + 1, tokens.begin() + i * T + T + 1);
          }
        ASSERT_EQ(batch.at("input_ids").sizes(), Dims({B / W, T}));
        ASSERT_EQ(values(batch.at("input_ids")), x);
        ASSERT_EQ(values(batch.at("labels")), y);
        ++k;
      }
      EXPECT_EQ(k, kBatches);
    }
}

}  // namespace
}  // namespace sherd::data
