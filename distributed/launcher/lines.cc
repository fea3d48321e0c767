#include "distributed/launcher/lines.h"

#include <algorithm>
#include <cctype>

namespace sherd::dist {
namespace {

constexpr size_t kTail = 32;

// Sherd's own errors begin with the op: "[matmul] ...".
bool has_op_tag(std::string_view line) {
  const size_t open = line.find('[');
  if (open == std::string_view::npos) return false;
  const size_t close = line.find("] ", open);
  if (close == std::string_view::npos || close == open + 1) return false;
  return std::all_of(line.begin() + open + 1, line.begin() + close,
                     [](unsigned char c) { return std::isalnum(c) || c == '_'; }) &&
         std::isalpha(static_cast<unsigned char>(line[open + 1]));
}

bool looks_like_error(std::string_view line) {
  std::string lower(line);
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  for (const char* word : {"error", "exception", "fatal", "fail", "assert", "what():"}) {
    if (lower.find(word) != std::string::npos) return true;
  }
  return has_op_tag(line);
}

std::string trimmed(std::string_view line) {
  if (const size_t at = line.find("what():"); at != std::string_view::npos) {
    line.remove_prefix(at + std::string_view("what():").size());
  }
  const size_t begin = line.find_first_not_of(" \t");
  if (begin == std::string_view::npos) return {};
  return std::string(line.substr(begin, line.find_last_not_of(" \t") - begin + 1));
}

}  // namespace

void ErrorTail::add(std::string_view line) {
  lines_.emplace_back(line);
  if (lines_.size() > kTail) lines_.pop_front();
}

std::string ErrorTail::last_error(bool any) const {
  for (auto line = lines_.rbegin(); line != lines_.rend(); ++line) {
    if (looks_like_error(*line)) return trimmed(*line);
  }
  if (!any) return {};
  for (auto line = lines_.rbegin(); line != lines_.rend(); ++line) {
    if (std::string text = trimmed(*line); !text.empty()) return text;
  }
  return {};
}

}  // namespace sherd::dist
