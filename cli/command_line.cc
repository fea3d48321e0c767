#include "cli/command_line.h"

#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <vector>

#include "core/error.h"

namespace sherd::cli {
namespace {

// A flag with its value, a flag without one, or a plain word (no option).
struct Word {
  const CLI::Option* option = nullptr;
  std::string text = {};
  std::optional<std::string> value = {};
};

std::vector<Word> words_of(const CLI::App& app, int argc, char** argv) {
  std::vector<Word> words;
  bool is_ours = true;  // up to "--", or the program that a launcher is to start
  for (int i = 1; i < argc; ++i) {
    const std::string text = argv[i];
    const bool is_flag = is_ours && text.size() > 1 && text[0] == '-' && text != "--";
    if (!is_flag) {
      is_ours = is_ours && text != "--" && !app.get_prefix_command();
      words.push_back({.text = text});
      continue;
    }
    const size_t equals = text.starts_with("--") ? text.find('=') : std::string::npos;
    const std::string name = text.substr(0, equals);
    const CLI::Option* option = app.get_option_no_throw(name);
    if (option && option == app.get_help_ptr()) throw CLI::CallForHelp();
    Word word{.option = option, .text = text};
    if (option && option->get_items_expected_min() > 0) {
      if (equals != std::string::npos)
        word.text = name, word.value = text.substr(equals + 1);
      else if (i + 1 < argc)
        word.value = argv[++i];
    }
    words.push_back(std::move(word));
  }
  return words;
}

bool is_one_value(const CLI::Option& option) {
  return option.get_items_expected_max() == 1 &&
         option.get_multi_option_policy() == CLI::MultiOptionPolicy::TakeLast;
}

bool takes_words(const CLI::App& app) {
  const auto options = app.get_options();
  return app.get_prefix_command() || app.get_allow_extras() ||
         std::any_of(options.begin(), options.end(),
                     [](const CLI::Option* o) { return o->get_positional(); });
}

std::string in_one_line(std::string text) {
  while (text.ends_with('\n')) text.pop_back();
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

}  // namespace

void parse(CLI::App& app, int argc, char** argv) {
  signal(SIGXFSZ, SIG_IGN);
  if (app.get_name().empty()) app.name(std::filesystem::path(argv[0]).filename().string());
  const std::vector<Word> words = words_of(app, argc, argv);
  // CLI11 looks for its place in groups of options for ever.
  if (!takes_words(app))
    for (const Word& word : words)
      if (!word.option && word.text.empty())
        throw CLI::ParseError("an empty argument was not expected", CLI::ExitCodes::ExtrasError);
  std::vector<std::string> reversed;  // as CLI11 wants them
  for (auto word = words.rbegin(); word != words.rend(); ++word) {
    const bool has_later =
        word->value && is_one_value(*word->option) &&
        std::any_of(words.rbegin(), word, [&](auto& w) { return w.option == word->option; });
    if (has_later) continue;
    if (word->value) reversed.push_back(*word->value);
    reversed.push_back(word->text);
  }
  app.parse(reversed);
}

std::optional<int> parse(CLI::App& app, const std::string& program, int argc, char** argv) {
  try {
    parse(app, argc, argv);
    return {};
  } catch (const CLI::CallForHelp&) {
    std::fputs(app.help().c_str(), stdout);
    return finish(program, 0);
  } catch (const CLI::ParseError& e) {
    return refuse(program, e.what());
  }
}

std::string read_whole_number(std::string_view text, int64_t least, int64_t most, int64_t& n) {
  const char *begin = text.data(), *end = begin + text.size();
  const auto result = std::from_chars(begin, end, n);
  if (result.ec != std::errc::invalid_argument && result.ptr == end) {
    if (result.ec == std::errc() && n >= least && n <= most) return {};
    if (result.ec == std::errc() ? n > most : text[0] != '-')
      return concat(text, " is too large: at most ", most);
  }
  return concat(text.empty() ? "an empty value" : text, " should be a whole number from ", least);
}

CLI::Validator whole_number(int64_t least, int64_t most) {
  return CLI::Validator(
      [=](std::string& text) {
        int64_t n = 0;
        std::string mistake = read_whole_number(text, least, most, n);
        if (mistake.empty()) text = std::to_string(n);  // CLI11 would take "010" for octal
        return mistake;
      },
      "", "");
}

CLI::Validator number(double least, double below) {
  return CLI::Validator(
      [=](std::string& text) -> std::string {
        double x = 0;
        if (!text.empty() && CLI::detail::lexical_cast(text, x) && x >= least && x < below)
          return {};
        return concat(text.empty() ? "an empty value" : text, " should be a number from ",
                      CLI::detail::to_string(least),
                      std::isinf(below) ? "" : " to below " + CLI::detail::to_string(below));
      },
      "", "");
}

int refuse(const std::string& program, std::string mistake) {
  std::fprintf(stderr, "%s: %s (see --help)\n", program.c_str(),
               in_one_line(std::move(mistake)).c_str());
  return 2;
}

int finish(const std::string& program, int code) {
  if (std::fflush(stdout) == 0 && !std::ferror(stdout)) return code;
  std::fprintf(stderr, "%s: cannot write to stdout: %s\n", program.c_str(), std::strerror(errno));
  return code == 0 ? 1 : code;
}

}  // namespace sherd::cli
