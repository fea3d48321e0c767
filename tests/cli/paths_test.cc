#include "cli/paths.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/errors.h"

namespace sherd::cli {
namespace {

namespace fs = std::filesystem;

class Paths : public testing::Test {
 protected:
  Paths() {
    std::string name = (fs::path(testing::TempDir()) / "paths-XXXXXX").lexically_normal();
    folder_ = ::mkdtemp(name.data());
    std::ofstream(at("file")) << "text";
    fs::create_symlink("file", at("link"));
    fs::create_symlink("later", at("dangling"));
    fs::create_symlink("loop", at("loop"));
    ::mkfifo(at("pipe").c_str(), 0600);
  }
  ~Paths() override { fs::remove_all(folder_); }
  std::string at(const std::string& name) const { return folder_ + "/" + name; }
  std::vector<std::string> names() const {
    std::vector<std::string> found;
    for (auto& entry : fs::directory_iterator(folder_)) found.push_back(entry.path().filename());
    std::sort(found.begin(), found.end());
    return found;
  }

  std::string folder_;
};

TEST_F(Paths, Inputs) {
  for (const char* name : {"file", "link", "."}) need_input("--in", at(name));
  need_input("--in", "");
  EXPECT_HAS(error_of([&] { need_input("--in", at("none")); }), "there is no such file or folder");
  EXPECT_HAS(error_of([&] { need_input("--in", at("pipe")); }), "neither a regular file");
  EXPECT_HAS(error_of([&] { need_input("--in", at("loop")); }), "--in=" + at("loop"));
}

TEST_F(Paths, OutputsThatCanBeAreLeftUntouched) {
  const auto before = names();
  for (const char* name : {"file", "link", "dangling", "new"}) need_output_file("--out", at(name));
  need_folder("--dir", at("deep/er"));
  need_log("--log", at("file"));
  EXPECT_EQ(names(), before);
}

TEST_F(Paths, NamesOfPickles) {
  for (const char* name : {"", "x", "x.safetensors", "x.pt.safetensors", "pt", "x.weights"})
    need_safetensors_name("--out", name);
  for (const char* name : {"x.pt", "x.pth", "x.bin", "x.pkl", "a/x.ckpt"})
    EXPECT_HAS(error_of([&] { need_safetensors_name("--out", name); }),
               concat("--out=", name, ": weights are written as .safetensors"));
}

TEST_F(Paths, OutputsThatCannotBe) {
  const auto why = [&](const char* name) {
    return error_of([&] { need_output_file("--out", at(name)); });
  };
  for (const char* name : {"pipe", "."})
    EXPECT_EQ(why(name), "cannot write --out=" + at(name) + ": it is not a regular file");
  EXPECT_HAS(why("none/file"), "there is no folder " + at("none"));
  EXPECT_HAS(why("file/below"), "Not a directory");
  EXPECT_HAS(why("loop"), "Too many levels");
  EXPECT_HAS(error_of([&] { need_folder("--dir", at("file/x")); }), "--dir=" + at("file/x"));
  EXPECT_HAS(error_of([&] { need_folder("--dir", at("dangling/x")); }), "is a link to nothing");
  EXPECT_HAS(error_of([&] { need_log("--log", at("pipe")); }), "it is not a regular file");
}

TEST_F(Paths, OneFileUnderTwoNames) {
  const auto check = [&](const std::string& in, const std::string& out) {
    return error_of([&] { need_different({{"--in", at(in)}}, {{"--out", at(out)}}); });
  };
  EXPECT_HAS(check("file", "link"), "are the same file");
  EXPECT_HAS(check("later", "dangling"), "are the same file");
  EXPECT_EQ(check("file", "other"), "no error");
  EXPECT_TRUE(lies_in(at("a/b"), at("a")));
  EXPECT_FALSE(lies_in(at("ab"), at("a")));
  EXPECT_TRUE(lies_in(at("link"), folder_));
}

TEST_F(Paths, RelativeOnesAreTheUsers) {
  ::setenv("SHERD_WORKING_DIRECTORY", folder_.c_str(), 1);
  EXPECT_EQ(from_user("./x//file"), at("x/file"));
  EXPECT_EQ(from_user("x/../file"), at("x/../file")) << "x may be a link";
  EXPECT_EQ(from_user("x/"), at("x"));
  EXPECT_EQ(from_user("/x/"), "/x");
  EXPECT_EQ(from_user("/"), "/");
  EXPECT_EQ(from_user("/x"), "/x");
  EXPECT_EQ(from_user(""), "");
  ::unsetenv("SHERD_WORKING_DIRECTORY");
}

}  // namespace
}  // namespace sherd::cli
