#include "data/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <ctime>
#include <filesystem>
#include <random>
#include <set>
#include <thread>

#include "core/atomic_file.h"
#include "core/error.h"
#include "data/files.h"
#include "data/text.h"
#include "tests/data/temp_folder.h"

namespace sherd::data {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// Some words, in lines: enough for a small vocabulary.
std::string sample_text(uint32_t seed = 1) {
  const char* words[] = {"the",       "of",      "beginning", "water",     "And", "said,",
                         "earth",     "über",    "light",     "darkness.", "was", "and",
                         "firmament", "evening", "morning",   "day:"};
  std::mt19937 random(seed);
  std::string text;
  for (int i = 0; i < 5000; ++i) {
    text += words[random() % std::size(words)];
    text += random() % 10 == 0 ? '\n' : ' ';
  }
  return text;
}

const BpeTokenizer& sample_bpe() {
  static const auto bpe = BpeTokenizer::train(sample_text(), {.vocab_size = 360});
  return *bpe;
}

void expect_round_trip(const Tokenizer& tokenizer, std::string_view text) {
  const auto ids = tokenizer.encode(text);
  for (const auto id : ids) ASSERT_LT(id, tokenizer.vocab_size());
  ASSERT_EQ(tokenizer.decode(ids), text);
}

TEST(ByteTokenizer, IsTheBytes) {
  const ByteTokenizer bytes;
  EXPECT_EQ(bytes.vocab_size(), 256);
  EXPECT_THAT(bytes.encode("a\n\xFF"), testing::ElementsAre(97, 10, 255));
  expect_round_trip(bytes, std::string_view("\0ü\xC3 x", 6));
  EXPECT_THAT(message_of<Error>([&] { bytes.decode(std::vector<uint16_t>{256}); }),
              HasSubstr("256"));
}

TEST(BpeTokenizer, LearnsWords) {
  const auto& bpe = sample_bpe();
  EXPECT_EQ(bpe.vocab_size(), 360);
  const std::string text = sample_text(2);
  EXPECT_LT(bpe.encode(text).size(), text.size() / 2);
  EXPECT_EQ(bpe.encode(" of").size(), 1u);
}

TEST(BpeTokenizer, RoundTripsText) {
  using namespace std::string_view_literals;
  for (const auto text :
       {""sv, " "sv, "\n"sv, "a"sv, "  leading and trailing  "sv, "tabs\tand  two   spaces"sv,
        "lines\n\n\n of\r\n all kinds\r"sv, "NUL \0 inside"sv, "<unk> <0x0A> <s> </s>"sv,
        "\xE2\x96\x81marks of SentencePiece \xE2\x96\x85\xE2\x81\x87\xE2\x96\x81"sv,
        "naïve café, Ångström, ﬁ ½ ２ 漢字 कि 🙂👩‍👩‍👧 e\xCC\x81"sv,
        "\xEF\xBB\xBF byte order mark"sv, "no-break\xC2\xA0space\xE3\x80\x80wide\xE2\x80\x89thin"sv,
        "\xEF\xBF\xBD \xEF\xBF\xBE"sv,
        "\xC3 \xE2\x96 \xF0\x9F\x99 \xFF\xFE \x80 cut short or no UTF-8"sv,
        "\xC0\x80 overlong, \xED\xA0\x80 surrogate, \xF4\x90\x80\x80 too high"sv})
    expect_round_trip(sample_bpe(), text);
  expect_round_trip(sample_bpe(), sample_text(3));
}

// Bytes at random, characters at random, and words.
std::string random_text(std::mt19937& random, int max_pieces) {
  const auto put_utf8 = [](std::string& s, uint32_t c) {
    if (c < 0x80) {
      s += char(c);
    } else if (c < 0x800) {
      s += {char(0xC0 | c >> 6), char(0x80 | (c & 63))};
    } else if (c < 0x10000) {
      s += {char(0xE0 | c >> 12), char(0x80 | (c >> 6 & 63)), char(0x80 | (c & 63))};
    } else {
      s += {char(0xF0 | c >> 18), char(0x80 | (c >> 12 & 63)), char(0x80 | (c >> 6 & 63)),
            char(0x80 | (c & 63))};
    }
  };
  std::string text;
  for (int n = int(random() % uint32_t(max_pieces)); n > 0; --n) switch (random() % 5) {
      case 0:
        text += char(random());
        break;
      case 1:
        text += ' ';
        break;
      case 2:
        put_utf8(text, 0x2580 + random() % 8);  // SentencePiece's marks among them
        break;
      case 3:
        put_utf8(text, random() % 0x110000);  // surrogates, which are not valid, among them
        break;
      default:
        text += "earth ";
    }
  return text;
}

TEST(BpeTokenizer, RoundTripsAnything) {
  std::mt19937 random(5);
  for (int round = 0; round < 2000; ++round)
    expect_round_trip(sample_bpe(), random_text(random, 40));
}

// Whatever it is trained on: a tokenizer that loses nothing, or an error.
TEST(BpeTokenizer, TrainsOnAnything) {
  std::mt19937 random(6);
  int trained = 0;
  for (int round = 0; round < 100; ++round) {
    const std::string text = random_text(random, 200), other = random_text(random, 200);
    int64_t vocab_size = 258 + random() % 200;
    for (int attempt = 0; attempt < 2; ++attempt) try {
        const auto bpe = BpeTokenizer::train(text, {.vocab_size = vocab_size});
        expect_round_trip(*bpe, text);
        expect_round_trip(*bpe, other);
        ++trained;
        break;
      } catch (const Error& error) {  // with the size that the message asks for, it works
        const std::string message = error.what();
        const size_t at = std::min(message.rfind("at most "), message.rfind("at least "));
        if (at == std::string::npos) {
          EXPECT_THAT(message, HasSubstr("no text"));
          break;
        }
        vocab_size = std::stoll(message.substr(message.find_last_of(' ')));
        EXPECT_EQ(attempt, 0) << message;
      }
  }
  EXPECT_GT(trained, 80);
}

// Lines longer than what SentencePiece is given at once: the ids are those of the pieces.
TEST(BpeTokenizer, CutsLongLinesBetweenWords) {
  std::string line;
  while (line.size() < 100'000) line += "the firmament, and über the darkness ";
  const auto& bpe = sample_bpe();
  std::vector<uint16_t> by_word;
  for (size_t begin = 0; begin < line.size();) {
    const size_t end = std::min(line.find(' ', begin + 1), line.size());
    const auto ids = bpe.encode(std::string_view(line).substr(begin, end - begin));
    by_word.insert(by_word.end(), ids.begin(), ids.end());
    begin = end;
  }
  EXPECT_EQ(bpe.encode(line), by_word);
  std::string no_spaces;
  while (no_spaces.size() < 100'000) no_spaces += "ü🙂xy";
  expect_round_trip(bpe, no_spaces);
  expect_round_trip(*BpeTokenizer::train(no_spaces, {.vocab_size = 262}), " a b ");
}

TEST(BpeTokenizer, TrainingIsReproducible) {
  const TempFolder folder;
  const auto train = [&](const std::string& name) {
    BpeTokenizer::train(sample_text(), {.vocab_size = 360})->save(folder.path(name));
  };
  train("a");
  // In another process, where addresses differ.
  const pid_t child = ::fork();
  if (child == 0) {
    train("b");
    ::_exit(0);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  EXPECT_EQ(read_file(folder.path("a")), read_file(folder.path("b")));
}

TEST(BpeTokenizer, ThinsOutLongText) {
  const std::string text = sample_text();
  const BpeOptions options = {.vocab_size = 300, .max_training_bytes = int64_t(text.size()) / 4};
  const auto bpe = BpeTokenizer::train(text, options);
  EXPECT_EQ(bpe->vocab_size(), 300);
  expect_round_trip(*bpe, text);
}

TEST(BpeTokenizer, RefusesVocabulariesThatDoNotFit) {
  const auto refused = [](std::string_view text, int64_t vocab_size) {
    return message_of<Error>([&] { BpeTokenizer::train(text, {.vocab_size = vocab_size}); });
  };
  EXPECT_THAT(refused(sample_text(), 60'000),
              AllOf(HasSubstr("60000"), HasSubstr("more than this text supports: at most ")));
  EXPECT_THAT(refused("abcdefghijklmnopqrstuvwxyz", 260),
              AllOf(HasSubstr("too small"), HasSubstr("at least 283")));
  EXPECT_THAT(refused("ab", 261), HasSubstr("at most 260"));
  EXPECT_EQ(BpeTokenizer::train("ab", {.vocab_size = 260})->encode("ab").size(), 1u);
  for (int64_t size : {-1, 0, 257, 65'537})
    EXPECT_THAT(refused("some text", size), HasSubstr("258 to 65536"));
  for (std::string_view text : {"", "\n\n\t\n", "\xFF\xFE"})
    EXPECT_THAT(refused(text, 300), HasSubstr("no text to train on"));
}

TEST(BpeTokenizer, RefusesUnknownIds) {
  EXPECT_THAT(message_of<Error>([] {
                sample_bpe().decode(std::vector<uint16_t>{0, 360});
              }),
              AllOf(HasSubstr("360"), HasSubstr("0 to 359")));
}

TEST(Tokenizer, SavesAndLoads) {
  const TempFolder folder;
  const std::string text = sample_text(4), path = folder.path("new/folder/tokenizer.model");
  sample_bpe().save(path);
  const auto bpe = Tokenizer::load(path);
  EXPECT_EQ(bpe->name(), "bpe");
  EXPECT_EQ(bpe->encode(text), sample_bpe().encode(text));
  ByteTokenizer().save(path);
  EXPECT_EQ(Tokenizer::load(path)->name(), "bytes");
}

TEST(Tokenizer, RefusesDamagedFiles) {
  const TempFolder folder;
  const std::string path = folder.path("tokenizer.model");
  sample_bpe().save(path);
  const std::string whole = read_file(path);
  const auto refused = [&](std::string_view bytes) {
    folder.write("tokenizer.model", bytes);
    return message_of<Error>([&] { Tokenizer::load(path); });
  };
  for (size_t size = 1; size < whole.size(); size += 97)
    EXPECT_THAT(refused(whole.substr(0, size)), HasSubstr("tokenizer.model"));
  std::string flipped = whole;
  flipped[whole.size() / 2] ^= 1;
  EXPECT_THAT(refused(flipped), HasSubstr("damaged"));
  EXPECT_THAT(refused(""), HasSubstr("empty"));
  EXPECT_THAT(refused("some text of the user's"), HasSubstr("no SentencePiece model"));
  EXPECT_THAT(message_of<Error>([&] { Tokenizer::load(folder.path("none")); }),
              HasSubstr("No such file"));
}

TEST(TrainOrLoad, KeepsUsesAndRenews) {
  const TempFolder folder;
  const std::string path = folder.path("run/tokenizer.model"), text = sample_text();
  const BpeOptions options = {.vocab_size = 300};
  const auto made_at = [&] { return std::filesystem::last_write_time(path); };
  BpeTokenizer::train_or_load(text, options, path);
  const std::string whole = read_file(path);
  const auto long_ago = made_at() - std::chrono::hours(1);
  const auto expect = [&](bool cached, std::string_view its_text, const BpeOptions& its_options) {
    std::filesystem::last_write_time(path, long_ago);
    const auto bpe = BpeTokenizer::train_or_load(its_text, its_options, path);
    EXPECT_EQ(made_at() == long_ago, cached);
    EXPECT_EQ(bpe->encode(text), BpeTokenizer::train(its_text, its_options)->encode(text));
  };
  expect(true, text, options);
  expect(false, text, {.vocab_size = 310});
  expect(false, sample_text(9), {.vocab_size = 310});
  for (const std::string& broken :
       {std::string(), whole.substr(0, 40), whole.substr(0, 2000), std::string("something else")}) {
    folder.write("run/tokenizer.model", broken);
    expect(false, text, options);
    EXPECT_EQ(read_file(path), whole);
  }
  // Nothing is left beside it.
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path("run")), {}), 1);
}

TEST(TrainOrLoad, RanksMayDoItAtOnce) {
  const TempFolder folder;
  const std::string text = sample_text();
  std::vector<std::shared_ptr<BpeTokenizer>> made(4);
  std::vector<std::thread> ranks;
  for (auto& mine : made)
    ranks.emplace_back([&] {
      mine = BpeTokenizer::train_or_load(text, {.vocab_size = 300}, folder.path("tokenizer.model"));
    });
  for (auto& rank : ranks) rank.join();
  for (const auto& mine : made) EXPECT_EQ(mine->encode(text), made[0]->encode(text));
  EXPECT_EQ(Tokenizer::load(folder.path("tokenizer.model"))->encode(text), made[0]->encode(text));
}

TEST(TrainOrLoad, SaysWhereItCannotWrite) {
  const TempFolder folder;
  folder.write("file", "x");
  EXPECT_THAT(message_of<Error>([&] {
                BpeTokenizer::train_or_load(sample_text(), {.vocab_size = 300},
                                            folder.path("file/tokenizer.model"));
              }),
              HasSubstr("file"));
}

// The main job's text and vocabulary: seconds, on one core.
TEST(BpeTokenizer, IsFastOnTheBible) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "times say nothing under a sanitizer";
#endif
  const std::string text = bible_text();
  const std::clock_t start = std::clock();  // processor time: the machine may be busy
  const auto bpe = BpeTokenizer::train(text, {.vocab_size = 2048});
  const auto ids = bpe->encode(text);
  const double seconds = double(std::clock() - start) / CLOCKS_PER_SEC;
  EXPECT_LT(seconds, 20);
  EXPECT_EQ(bpe->decode(ids), text);
  EXPECT_GT(double(text.size()) / double(ids.size()), 3.3);            // bytes a token
  EXPECT_EQ(std::set<uint16_t>(ids.begin(), ids.end()).count(0), 0u);  // "unknown" is never used
  std::cout << seconds << " s, " << double(text.size()) / double(ids.size()) << " bytes a token\n";
}

}  // namespace
}  // namespace sherd::data
