#include "cli/command_line.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/errors.h"

namespace sherd::cli {
namespace {

struct Flags {
  int64_t steps = 1;
  double lr = 0;
  std::string name = "none";
  std::vector<std::string> words;
};

// What the program got; what was wrong is thrown.
Flags parsed(std::vector<std::string> arguments, std::string* help = nullptr) {
  Flags f;
  CLI::App app{"Counts."};
  app.add_option("--steps", f.steps)
      ->transform(whole_number(0, 100))
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.add_option("--lr", f.lr)->check(number(0, 1));
  app.add_option("--name", f.name);
  app.add_option("words", f.words);
  arguments.insert(arguments.begin(), "/some/where/count");
  std::vector<char*> argv;
  for (auto& a : arguments) argv.push_back(a.data());
  try {
    parse(app, int(argv.size()), argv.data());
  } catch (const CLI::CallForHelp&) {
    if (!help) throw;
    *help = app.help();
  }
  return f;
}
std::string mistake(const std::vector<std::string>& arguments) {
  try {
    parsed(arguments);
  } catch (const CLI::ParseError& e) {
    return e.what();
  }
  return "no mistake";
}

TEST(CommandLine, WholeNumbersAreDecimal) {
  EXPECT_EQ(parsed({"--steps=010"}).steps, 10);
  EXPECT_EQ(parsed({"--steps=08"}).steps, 8);
  EXPECT_EQ(parsed({"--steps", "0"}).steps, 0);
  for (const char* text : {"", "x", "1x", "0x10", "1.5", "-1", " 1", "-99999999999999999999"})
    EXPECT_HAS(mistake({std::string("--steps=") + text}), "should be a whole number from 0");
  for (const char* text : {"101", "99999999999999999999"})
    EXPECT_HAS(mistake({std::string("--steps=") + text}), "is too large: at most 100");
}

TEST(CommandLine, Numbers) {
  EXPECT_EQ(parsed({"--lr=1e-3"}).lr, 1e-3);
  for (const char* text : {"", "x", "-1", "1", "nan", "inf"})
    EXPECT_HAS(mistake({std::string("--lr=") + text}), "should be a number from 0 to below 1");
}

TEST(CommandLine, AnEmptyValueTakesNoWord) {
  const Flags f = parsed({"--name=", "here"});
  EXPECT_EQ(f.name, "");
  EXPECT_EQ(f.words, std::vector<std::string>{"here"});
}

TEST(CommandLine, TheLastOfSeveralCounts) {
  EXPECT_EQ(parsed({"--steps=x", "--steps", "2"}).steps, 2);
  EXPECT_HAS(mistake({"--steps=2", "--steps=x"}), "x should be");
}

TEST(CommandLine, HelpWinsAndNamesTheProgram) {
  EXPECT_THROW(parsed({"--steps=x", "--help"}), CLI::CallForHelp);
  std::string help;
  parsed({"--help"}, &help);
  EXPECT_HAS(help, "Usage: count");
}

}  // namespace
}  // namespace sherd::cli
