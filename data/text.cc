#include "data/text.h"

#include <sys/wait.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <filesystem>
#include <memory>

#include "core/error.h"
#include "data/files.h"

namespace sherd::data {
namespace {

namespace fs = std::filesystem;

// "Ge1:1 In the" begins with a reference of 6 bytes, its space included; 0 if there is none.
size_t reference_length(std::string_view line) {
  const size_t space = line.find(' '), colon = line.find(':');
  if (space == std::string_view::npos || colon == 0 || colon >= space) return 0;
  const auto digit = [&](size_t i) { return std::isdigit(uint8_t(line[i])) != 0; };
  return digit(colon - 1) && digit(colon + 1) ? space + 1 : 0;
}

}  // namespace

bool is_text(std::string_view bytes) {
  bytes = bytes.substr(0, 64 << 10);
  size_t controls = 0;
  for (const char c : bytes) {
    if (c == '\0') return false;
    const bool space = c >= '\t' && c <= '\r';
    if ((uint8_t(c) < 0x20 && !space) || c == 0x7F) ++controls;
  }
  return controls * 100 <= bytes.size();
}

std::vector<std::string> text_files(const std::string& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::exists(status)) fail("[text_files] '", path, "' does not exist");
  if (!fs::is_directory(status)) return {path};
  std::vector<std::string> files;
  fs::recursive_directory_iterator it(path, error);
  for (; !error && it != fs::recursive_directory_iterator(); it.increment(error)) {
    const bool hidden = it->path().filename().string().starts_with('.');
    std::error_code ignored;  // a link that points nowhere is no file
    if (hidden && it->is_directory(ignored)) it.disable_recursion_pending();
    if (hidden || !it->is_regular_file(ignored)) continue;
    const MappedFile file(it->path().string());
    if (!file.bytes().empty() && is_text(file.bytes())) files.push_back(it->path().string());
  }
  if (error) fail("[text_files] folder '", path, "': ", error.message());
  if (files.empty()) fail("[text_files] folder '", path, "' holds no text files");
  std::sort(files.begin(), files.end());
  return files;
}

std::string read_text(const std::vector<std::string>& paths) {
  if (paths.empty()) fail("[read_text] no file or folder was given");
  std::string text;
  for (const auto& path : paths) {
    for (const auto& name : text_files(path)) {
      const MappedFile file(name);
      if (file.bytes().empty()) fail("[read_text] '", name, "' is empty");
      if (!is_text(file.bytes()))
        fail("[read_text] '", name, "' does not look like text: it holds NUL or control bytes");
      text += file.bytes();
      if (text.back() != '\n') text += '\n';
    }
  }
  return text;
}

std::string bible_text(const std::string& program) {
  const std::string command = "'" + program + "' -f gen1:1-rev22:21 </dev/null 2>/dev/null";
  FILE* pipe = ::popen(command.c_str(), "re");
  if (!pipe) fail("[bible_text] could not start '", program, "'");
  std::string lines;
  char buffer[1 << 16];
  for (size_t n; (n = std::fread(buffer, 1, sizeof buffer, pipe)) > 0;) lines.append(buffer, n);
  const int status = ::pclose(pipe);
  constexpr int kNotFound = 127, kNotExecutable = 126;  // the shell's
  if (WIFEXITED(status) &&
      (WEXITSTATUS(status) == kNotFound || WEXITSTATUS(status) == kNotExecutable))
    fail("[bible_text] the program '", program,
         "' is not there: install Debian's package bible-kjv (apt-get install bible-kjv), or give "
         "text of your own");
  std::string text, chapter;
  int64_t verses = 0;
  for (size_t at = 0; at < lines.size();) {
    const size_t end = std::min(lines.find('\n', at), lines.size());
    const std::string_view line(lines.data() + at, end - at);
    at = end + 1;
    const size_t length = reference_length(line);
    if (length == 0) continue;
    const std::string_view its_chapter = line.substr(0, line.find(':'));
    if (!chapter.empty() && its_chapter != chapter) text += '\n';
    chapter = its_chapter;
    text += line.substr(length);
    text += '\n';
    ++verses;
  }
  constexpr int64_t kVerses = 31102;
  if (status != 0 || verses != kVerses)
    fail("[bible_text] '", program, "' printed ", verses, " verses and ended with status ",
         WIFEXITED(status) ? WEXITSTATUS(status) : -1, "; Debian's package bible-kjv prints ",
         kVerses);
  return text;
}

std::pair<std::string_view, std::string_view> hold_out(std::string_view text, double fraction) {
  if (!(fraction >= 0 && fraction < 1))
    fail("[hold_out] fraction must be at least 0 and below 1, got ", fraction);
  if (fraction == 0) return {text, {}};
  const size_t at = std::min(size_t(double(text.size()) * (1 - fraction)), text.size());
  const size_t reach = (text.size() - at) / 2;
  const auto near = [&](size_t i) {
    return i != std::string_view::npos && i - at + reach <= 2 * reach;
  };
  const auto split = [&](size_t i) { return std::pair(text.substr(0, i), text.substr(i)); };
  for (const char mark : {'\n', ' '}) {
    for (const size_t found : {text.find(mark, at), text.rfind(mark, at)})
      if (near(found)) return split(mark == '\n' ? found + 1 : found);
  }
  size_t cut = at;
  while (cut < text.size() && (uint8_t(text[cut]) & 0xC0) == 0x80) ++cut;
  return split(cut);
}

}  // namespace sherd::data
