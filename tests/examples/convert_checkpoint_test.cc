// The converter as a program: what it refuses, in one line, with exit code 2 where flags or paths
// are wrong and 1 where a file is.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "data/tokenizer.h"
#include "tests/launcher/program.h"

namespace examples {
namespace {

using sherd::dist::Result;
namespace fs = std::filesystem;

const std::string kModel = "tests/goldens/checkpoint/model.safetensors",
                  kOptimizer = "tests/goldens/checkpoint/optimizer.safetensors";

class ConvertCheckpoint : public testing::Test {
 protected:
  Result convert(std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(), "tools/convert_checkpoint");
    return sherd::dist::run(arguments);
  }
  void expect_refused(const std::vector<std::string>& arguments, const std::string& why,
                      int exit_code = 2) const {
    const Result r = convert(arguments);
    EXPECT_EQ(r.exit_code, exit_code) << why;
    EXPECT_EQ(r.err.find("--help") != std::string::npos, exit_code == 2) << r.err;
    EXPECT_EQ(r.out, "") << why;
    EXPECT_EQ(sherd::dist::lines_of(r.err).size(), 1u) << r.err;
    EXPECT_NE(r.err.find(why), std::string::npos) << r.err;
  }
  std::string at(const std::string& name) const { return folder_ + "/" + name; }

  const std::string folder_ = sherd::dist::new_folder();
};

TEST_F(ConvertCheckpoint, ThereAndBack) {
  ASSERT_EQ(convert({kModel, at("run"), "--step=2"}).exit_code, 0);
  const Result made = convert({kModel, at("run"), "--optimizer=" + kOptimizer, "--step=3"});
  ASSERT_EQ(made.exit_code, 0) << made.err;
  const std::string checkpoint = at("run/step-000003");
  EXPECT_NE(made.out.find(checkpoint), std::string::npos) << made.out;
  const Result back =
      convert({checkpoint, at("m.safetensors"), "--optimizer=" + at("o.safetensors")});
  ASSERT_EQ(back.exit_code, 0) << back.err;
  for (const char* name : {"m.safetensors", "o.safetensors"})
    EXPECT_TRUE(fs::is_regular_file(at(name))) << name;
  // A run's folder stands for its last checkpoint; one that is made becomes that.
  expect_refused({kModel, at("run"), "--step=2"}, "give a larger --step, or another folder");
  expect_refused({kModel, at("run")}, "holds step-000003, and a run resumes from the last one");
  const Result last = convert({at("run"), at("last.safetensors")});
  ASSERT_EQ(last.exit_code, 0) << last.err;
  EXPECT_NE(last.out.find("from " + checkpoint), std::string::npos) << last.out;
  expect_refused({checkpoint, at("x.safetensors"), "--files=10000"}, "into 10000 files", 1);

  // Of one name in two spellings, one of the two would be lost.
  fs::create_symlink("m.safetensors", at("link.safetensors"));
  const std::string before = sherd::dist::read_file(at("m.safetensors"));
  for (const char* name : {"m.safetensors", "link.safetensors"})
    expect_refused({checkpoint, at("m.safetensors"), "--optimizer=" + at(name)}, "same file");
  EXPECT_EQ(sherd::dist::read_file(at("m.safetensors")), before);
  expect_refused({checkpoint, at("x.safetensors"), "--step=4"}, "--step");
  expect_refused({checkpoint, checkpoint + "/model.safetensors"}, "in the checkpoint");
  expect_refused({checkpoint, at("x.safetensors"), "--optimizer=" + checkpoint + "/o.safetensors"},
                 "in the checkpoint");
  // Nor by the numbers of several files, nor a checkpoint in a checkpoint.
  fs::create_symlink(checkpoint + "/index.json", at("n-00001-of-00002.safetensors"));
  expect_refused({checkpoint, at("n.safetensors"), "--files=2"}, "in the checkpoint", 1);
  expect_refused({kModel, checkpoint}, "would lie in the checkpoint", 1);
}

// With another one the weights would be worth nothing.
TEST_F(ConvertCheckpoint, TheTokenizerGoesAlong) {
  using sherd::dist::read_file;
  sherd::data::ByteTokenizer().save(at("w.tokenizer.model"));
  const std::string tokenizer = read_file(at("w.tokenizer.model"));
  fs::copy(kModel, at("w.safetensors"));
  ASSERT_EQ(convert({at("w.safetensors"), at("run"), "--step=3"}).exit_code, 0);
  EXPECT_EQ(read_file(at("run/tokenizer.model")), tokenizer);
  for (const std::string& source : {at("run"), at("run/step-000003")}) {
    fs::remove(at("v.tokenizer.model"));
    ASSERT_EQ(convert({source, at("v.safetensors")}).exit_code, 0);
    EXPECT_EQ(read_file(at("v.tokenizer.model")), tokenizer);
  }
  ASSERT_EQ(convert({at("run"), at("cut.safetensors"), "--files=2"}).exit_code, 0);
  ASSERT_EQ(convert({at("cut.safetensors.index.json"), at("again"), "--step=1"}).exit_code, 0);
  EXPECT_EQ(read_file(at("again/tokenizer.model")), tokenizer);
  // One of other weights, or of nobody's, is not taken for theirs, nor lost.
  const std::string before = read_file(at("v.safetensors"));
  expect_refused({kModel, at("run"), "--step=4"}, "is of other weights", 1);
  EXPECT_FALSE(fs::exists(at("run/step-000004")));
  std::ofstream(at("v.tokenizer.model")) << "precious";
  expect_refused({at("run"), at("v.safetensors")}, "another program's", 1);
  EXPECT_EQ(read_file(at("v.tokenizer.model")), "precious");
  EXPECT_EQ(read_file(at("v.safetensors")), before);
}

TEST_F(ConvertCheckpoint, SaysAllThatItMade) {
  sherd::data::ByteTokenizer().save(at("w.tokenizer.model"));
  fs::copy(kModel, at("w.safetensors"));
  const Result made = convert({at("w.safetensors"), at("run"), "--optimizer=" + kOptimizer});
  EXPECT_EQ(made.out, "wrote " + at("run/step-000000") + ", " + at("run/tokenizer.model\n"));
  const Result cut =
      convert({at("run"), at("m.safetensors"), "--files=2", "--optimizer=" + at("o.safetensors")});
  ASSERT_EQ(cut.exit_code, 0) << cut.err;
  const std::vector<std::string> names = {
      "m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors", "m.safetensors.index.json",
      "o.safetensors", "m.tokenizer.model"};
  std::string list;
  for (const std::string& name : names) {
    EXPECT_TRUE(fs::is_regular_file(at(name))) << name;
    list += at(name) + ", ";
  }
  EXPECT_EQ(cut.out, "wrote " + list + "from " + at("run/step-000000\n"));
  const Result three = convert({at("run"), at("m.safetensors"), "--files=3"});
  EXPECT_NE(three.out.find("m-00001-of-00003.safetensors ... "), std::string::npos) << three.out;
  const Result help = convert({"--help"});
  EXPECT_NE(help.out.find("the optimizer's stays one"), std::string::npos) << help.out;
}

TEST_F(ConvertCheckpoint, NamesThatMeanSomethingElse) {
  for (const char* name : {"b.safetensors", "b.safetensors.index.json"}) {
    expect_refused({kModel, at(name)}, "the folder in which to make a checkpoint");
    EXPECT_FALSE(fs::exists(at(name)));
  }
  ASSERT_EQ(convert({kModel, at("run.pt")}).exit_code, 0);  // a folder may be called so
  expect_refused({at("run.pt"), at("m.pt")}, "m.pt: weights are written as .safetensors");
  expect_refused({at("run.pt"), at("m.safetensors"), "--optimizer=" + at("o.bin")},
                 "--optimizer=" + at("o.bin: weights are written as .safetensors"));
}

TEST_F(ConvertCheckpoint, Mistakes) {
  expect_refused({}, "source is required");
  expect_refused({kModel}, "destination is required");
  expect_refused({kModel, at("run"), "--none"}, "--none");
  expect_refused({kModel, at("run"), "--step=-1"}, "--step: -1");
  expect_refused({kModel, at("run"), "--step=99999999999999999999"}, "too large");
  expect_refused({kModel, at("run"), "--files=4"}, "--files");
  expect_refused({kModel, at("run"), "--optimizer=" + kModel}, "no optimizer's file", 1);
  expect_refused({at("none.safetensors"), at("run")}, "there is no such file");
  expect_refused({folder_, at("m.safetensors")}, "state.json", 1);
  expect_refused({kModel, "/proc/x"}, "No such file");
  std::ofstream(at("broken.safetensors")) << "no header";
  expect_refused({at("broken.safetensors"), at("run")}, "broken.safetensors", 1);
  ASSERT_EQ(mkfifo(at("fifo").c_str(), 0600), 0);
  expect_refused({at("fifo"), at("run")}, "neither a regular file nor a folder");
}

}  // namespace
}  // namespace examples
