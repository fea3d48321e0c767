#include "data/text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "core/atomic_file.h"
#include "core/error.h"
#include "data/files.h"
#include "tests/data/temp_folder.h"

namespace sherd::data {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using namespace std::string_view_literals;

TEST(ReadText, ReadsFilesAndFolders) {
  const TempFolder folder;
  folder.write("texts/b.txt", "b\n");
  folder.write("texts/a/z.md", "z without newline");
  folder.write("texts/c", "c\n");
  folder.write("texts/picture.jpg", "\xFF\xD8\0\0"sv);
  folder.write("texts/empty.txt", "");
  folder.write("texts/.hidden", "hidden");
  folder.write("texts/.git/config", "hidden too");
  std::filesystem::create_symlink("nowhere", folder.path("texts/broken-link"));
  std::filesystem::create_directory_symlink(folder.path("texts"), folder.path("texts/a/circle"));
  const std::string single = folder.write("single", "one\n");
  EXPECT_THAT(
      text_files(folder.path("texts")),
      ElementsAre(folder.path("texts/a/z.md"), folder.path("texts/b.txt"), folder.path("texts/c")));
  EXPECT_EQ(read_text({folder.path("texts"), single}), "z without newline\nb\nc\none\n");
}

TEST(ReadText, Refuses) {
  const TempFolder folder;
  const auto refused = [](const std::string& path) {
    return message_of<Error>([&] { read_text({path}); });
  };
  EXPECT_THAT(refused(folder.path("none")), AllOf(HasSubstr("none"), HasSubstr("not exist")));
  EXPECT_THAT(refused(folder.write("empty", "")), HasSubstr("is empty"));
  EXPECT_THAT(refused(folder.write("tokens.bin", "\1\0\2\0"sv)), HasSubstr("not look like text"));
  EXPECT_THAT(refused(folder.path()), HasSubstr("no text files"));
  EXPECT_THAT(message_of<Error>([] { read_text({}); }), HasSubstr("no file"));
}

TEST(IsText, TellsTextFromBinary) {
  EXPECT_TRUE(is_text("plain\ttext\r\n"));
  EXPECT_TRUE(is_text("caf\xE9 in Latin-1"));
  EXPECT_TRUE(is_text("日本語"));
  EXPECT_FALSE(is_text("NUL\0"sv));
  EXPECT_FALSE(is_text("\1\2\3\4 binary"));
}

TEST(HoldOut, CutsNearAndLosesNothing) {
  std::string text;
  for (int i = 0; i < 1000; ++i) text += "line " + std::to_string(i) + "\n";
  const auto [train, validation] = hold_out(text);
  EXPECT_EQ(std::string(train) + std::string(validation), text);
  EXPECT_EQ(train.back(), '\n');
  EXPECT_NEAR(double(validation.size()) / double(text.size()), 0.05, 0.002);
  // Lines so long that the nearest break is far away: a space will do, or any character.
  const std::string words = "first line\n" + text.substr(0, 5) + std::string(500, 'x') + " " +
                            std::string(480, 'y') + " z\n" + std::string(20, 'w');
  for (double fraction : {0.02, 0.05, 0.3, 0.5, 0.9, 0.999})
    for (std::string_view t :
         {std::string_view(words), "ü漢🙂ü漢🙂ü漢🙂"sv, "a"sv, ""sv, "\n"sv}) {
      const auto [a, b] = hold_out(t, fraction);
      EXPECT_EQ(std::string(a) + std::string(b), t);
      if (!b.empty()) {
        EXPECT_NE(uint8_t(b[0]) & 0xC0, 0x80) << "a cut inside a character";
      }
    }
  EXPECT_EQ(hold_out(std::string(1000, 'x'), 0.1).second.size(), 100u);
  EXPECT_EQ(hold_out("a b", 0).first, "a b");
  for (double fraction : {-0.1, 1.0, std::nan("")})
    EXPECT_THAT(message_of<Error>([&] { hold_out("a", fraction); }), HasSubstr("fraction"));
}

TEST(BibleText, IsPlainText) {
  const std::string text = bible_text();
  EXPECT_TRUE(text.starts_with("In the beginning God created the heaven and the earth.\nAnd the"));
  EXPECT_TRUE(text.ends_with("\nThe grace of our Lord Jesus Christ be with you all. Amen.\n"));
  EXPECT_THAT(text, HasSubstr("God ended his work"));
  EXPECT_EQ(text.find_first_of("0123456789"), std::string::npos);
  const auto count = [&](const std::string& s) {
    size_t n = 0;
    for (size_t at = 0; (at = text.find(s, at)) != std::string::npos; at += s.size()) ++n;
    return n;
  };
  EXPECT_EQ(count("\n\n"), 1188u);  // 1189 chapters
  EXPECT_EQ(count("\n"), 31'102u + 1188u);
}

TEST(BibleText, SaysWhatToInstall) {
  EXPECT_THAT(message_of<Error>([] { bible_text("no-such-program"); }),
              AllOf(HasSubstr("bible-kjv"), HasSubstr("install")));
  EXPECT_THAT(message_of<Error>([] { bible_text("true"); }), HasSubstr("0 verses"));
  EXPECT_THAT(message_of<Error>([] { bible_text("false"); }), HasSubstr("status 1"));
}

TEST(ReplaceFile, ReplacesWhole) {
  const TempFolder folder;
  const std::string path = folder.path("new/file");
  replace_file(path, "first");
  replace_file(path, "second");
  EXPECT_EQ(read_file(path), "second");
  replace_file(path, "");
  EXPECT_EQ(read_file(path), "");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path("new")), {}), 1);
  EXPECT_THAT(message_of<Error>([&] { replace_file(folder.path(), "x"); }),
              HasSubstr(folder.path()));
}

}  // namespace
}  // namespace sherd::data
