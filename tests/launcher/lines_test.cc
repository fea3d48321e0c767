#include "distributed/launcher/lines.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

namespace sherd::dist {
namespace {

using Lines = std::vector<std::string>;

Lines split(const std::vector<std::string>& pieces, bool finish = true) {
  LineSplitter splitter;
  Lines lines;
  const auto keep = [&](std::string_view line) { lines.emplace_back(line); };
  for (const std::string& piece : pieces) splitter.feed(piece, keep);
  if (finish) splitter.finish(keep);
  return lines;
}

TEST(LineSplitter, EndsLinesAtEachKindOfEnd) {
  EXPECT_EQ(split({"a\nb\r\nc\rd"}), (Lines{"a", "b", "c", "d"}));
  EXPECT_EQ(split({"a\n\n\r\nb\n"}), (Lines{"a", "", "", "b"}));
  EXPECT_EQ(split({"half"}, /*finish=*/false), Lines{});
  EXPECT_EQ(split({}), Lines{});
}

TEST(LineSplitter, AReturnIsAnEndAtOnceAndNoEmptyLine) {
  EXPECT_EQ(split({"10%\r"}, /*finish=*/false), Lines{"10%"});
  EXPECT_EQ(split({"\r10%", "\r20%", "\rdone\n"}), (Lines{"10%", "20%", "done"}));
  EXPECT_EQ(split({"a\r", "\nb\n"}), (Lines{"a", "b"}));
  EXPECT_EQ(split({"a\r", "b\n"}), (Lines{"a", "b"}));
}

TEST(LineSplitter, PiecesDoNotMatter) {
  std::mt19937 random(3);
  const std::string alphabet = "ab\n\r";
  for (int trial = 0; trial < 300; ++trial) {
    std::string text;
    for (int i = 0; i < 60; ++i) text += alphabet[random() % alphabet.size()];
    std::vector<std::string> pieces;
    for (size_t at = 0; at < text.size();) {
      const size_t size = 1 + random() % 7;
      pieces.push_back(text.substr(at, size));
      at += size;
    }
    EXPECT_EQ(split(pieces), split({text})) << "trial " << trial;
  }
}

TEST(LineSplitter, AVeryLongLineComesInPieces) {
  const size_t most = LineSplitter::kMaxLine;
  const Lines lines = split({std::string(most, 'x') + std::string(most, 'y'), "z\nend"});
  ASSERT_EQ(lines.size(), 4u);
  EXPECT_EQ(lines[0], std::string(most, 'x'));
  EXPECT_EQ(lines[1], std::string(most, 'y'));
  EXPECT_EQ(lines[2], "z");
  EXPECT_EQ(lines[3], "end");
}

std::string last_error(const Lines& lines, bool any) {
  ErrorTail tail;
  for (const std::string& line : lines) tail.add(line);
  return tail.last_error(any);
}

TEST(ErrorTail, PrefersWhatLooksLikeAnError) {
  EXPECT_EQ(last_error({"error: first", "Error: second", "bye"}, true), "Error: second");
  EXPECT_EQ(last_error({"big_model: [matmul] shapes differ", "bye"}, false),
            "big_model: [matmul] shapes differ");
  EXPECT_EQ(last_error({"terminate called after throwing an instance of 'sherd::Error'",
                        "  what():  [all_reduce] rank 1 left"},
                       false),
            "[all_reduce] rank 1 left");
  EXPECT_EQ(
      last_error({"==7==ERROR: AddressSanitizer: heap-use-after-free", "==7==ABORTING"}, false),
      "==7==ERROR: AddressSanitizer: heap-use-after-free");
}

TEST(ErrorTail, ElseTheLastLineThatIsNotBlankIfWanted) {
  EXPECT_EQ(last_error({"one", "  two  ", "", " "}, true), "two");
  EXPECT_EQ(last_error({"one", "two"}, false), "");
  EXPECT_EQ(last_error({"[0] step", "[ ] box", "no ] tag ["}, false), "");
  EXPECT_EQ(last_error({}, true), "");
}

TEST(ErrorTail, ForgetsWhatIsLongAgo) {
  Lines lines{"error: long ago"};
  for (int i = 0; i < 100; ++i) lines.push_back("step " + std::to_string(i));
  EXPECT_EQ(last_error(lines, true), "step 99");
}

}  // namespace
}  // namespace sherd::dist
