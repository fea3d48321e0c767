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

// As Sherd's lists of what does not fit are.
TEST(ErrorTail, WhatFollowsBelongsToTheError) {
  const Lines lists{"terminate called after throwing an instance of 'sherd::Error'",
                    "  what():  [load run/step-000024] the entries do not fit the model:",
                    "  missing: error_head.weight", "x.weight: [3], not [2]"};
  EXPECT_EQ(last_error(lists, false),
            "[load run/step-000024] the entries do not fit the model: missing: error_head.weight "
            "x.weight: [3], not [2]");
  EXPECT_EQ(last_error({"Error: a", "\t\tfailed: b", "  c", "step 1", "  d"}, true),
            "Error: a failed: b c");
  // A traceback's own lines are no errors' beginnings for long.
  EXPECT_EQ(last_error({"Traceback:", "    raise ValueError('x')", "ValueError: x"}, true),
            "ValueError: x");
  EXPECT_EQ(last_error({"terminate called", "  what():  a", "sh: Aborted", "error: b"}, true),
            "error: b");
}

TEST(ErrorTail, ALongErrorIsCut) {
  Lines lines{"error: a list"};
  for (int i = 0; i < 100; ++i) lines.push_back("  entry " + std::to_string(i));
  const std::string text = last_error(lines, true);
  EXPECT_EQ(text.size(), 500u);
  EXPECT_EQ(text.find("error: a list entry 0 entry 1 "), 0u) << text;
  EXPECT_TRUE(text.ends_with(" ...")) << text;
  std::string accents = "error:";  // of two bytes each, behind an odd number or an even one
  for (int i = 0; i < 300; ++i) accents += "\xC3\xA4";
  for (const char* front : {"", "_"}) {
    const std::string cut = last_error({front + accents}, true);
    EXPECT_EQ(cut.substr(cut.size() - 6), "\xC3\xA4 ...");
  }
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
