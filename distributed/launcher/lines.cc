#include "distributed/launcher/lines.h"

#include <algorithm>
#include <cctype>

namespace sherd::dist {
namespace {

constexpr size_t kTail = 32;
constexpr size_t kLongest = 500;  // bytes of an error in a summary
constexpr std::string_view kWhat = "what():";

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
  for (const char* word : {"error", "exception", "fatal", "fail", "assert"}) {
    if (lower.find(word) != std::string::npos) return true;
  }
  return has_op_tag(line) || line.find(kWhat) != std::string_view::npos;
}

std::string trimmed(std::string_view line) {
  if (const size_t at = line.find(kWhat); at != std::string_view::npos) {
    line.remove_prefix(at + kWhat.size());
  }
  const size_t begin = line.find_first_not_of(" \t");
  if (begin == std::string_view::npos) return {};
  return std::string(line.substr(begin, line.find_last_not_of(" \t") - begin + 1));
}

std::string cut(std::string text) {
  constexpr std::string_view kCut = " ...";
  if (text.size() <= kLongest) return text;
  size_t end = kLongest - kCut.size();
  while (end > 0 && (text[end] & 0xC0) == 0x80) --end;  // not within a character
  return text.substr(0, end).append(kCut);
}

}  // namespace

void ErrorTail::add(std::string_view line) {
  const bool is_what = line.find(kWhat) != std::string_view::npos;
  const bool is_indented = line.starts_with(' ') || line.starts_with('\t');
  const bool begins = is_what || (looks_like_error(line) && !(is_open_ && is_indented));
  if (begins) {
    error_.clear();
    is_uncaught_ = is_what && !lines_.empty() && lines_.back().starts_with("terminate called");
  }
  is_open_ = begins || (is_open_ && (is_indented || is_uncaught_));
  age_ = is_open_ ? 0 : age_ + 1;
  if (is_open_ && error_.size() <= kLongest) {
    const std::string text = trimmed(line);
    error_ += (error_.empty() || text.empty() ? "" : " ") + text;
  }
  lines_.emplace_back(line);
  if (lines_.size() > kTail) lines_.pop_front();
}

std::string ErrorTail::last_error(bool any) const {
  if (!error_.empty() && age_ < kTail) return cut(error_);
  if (!any) return {};
  for (auto line = lines_.rbegin(); line != lines_.rend(); ++line) {
    if (std::string text = trimmed(*line); !text.empty()) return cut(text);
  }
  return {};
}

}  // namespace sherd::dist
