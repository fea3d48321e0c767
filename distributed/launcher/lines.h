// LineSplitter cuts a rank's output into lines; ErrorTail keeps what a rank last said on stderr,
// for the summary of a failed job.
#pragma once
#include <cstddef>
#include <deque>
#include <string>
#include <string_view>

namespace sherd::dist {

// A line ends at \n, \r\n or \r. A \r that ends nothing (a progress bar that begins with it) gives
// no line.
class LineSplitter {
 public:
  static constexpr size_t kMaxLine = 1 << 20;  // a longer line comes in pieces of this many bytes

  // Calls line(std::string_view), without the end, for each line that `bytes` completes.
  template <class F>
  void feed(std::string_view bytes, const F& line) {
    while (!bytes.empty()) {
      if (after_return_ && bytes.front() == '\n') {
        after_return_ = false;
        bytes.remove_prefix(1);
        continue;
      }
      after_return_ = false;
      const size_t end = bytes.find_first_of("\r\n");
      partial_.append(bytes.substr(0, end));
      for (; partial_.size() > kMaxLine; partial_.erase(0, kMaxLine)) {
        line(std::string_view(partial_).substr(0, kMaxLine));
      }
      if (end == std::string_view::npos) return;
      const bool is_return = bytes[end] == '\r';
      after_return_ = is_return && !partial_.empty();
      if (!is_return || after_return_) line(std::string_view(partial_));
      partial_.clear();
      bytes.remove_prefix(end + 1);
    }
  }

  // The last line, where it has no end.
  template <class F>
  void finish(const F& line) {
    if (!partial_.empty()) line(std::string_view(partial_));
    partial_.clear();
    after_return_ = false;
  }

 private:
  std::string partial_;
  bool after_return_ = false;  // the last line ended at \r: a \n right behind belongs to it
};

class ErrorTail {
 public:
  void add(std::string_view line);

  // In one line, and cut with " ..." if it is long: the newest message that looks like an error,
  // with the indented lines below it, else, if `any`, the newest line that is not blank. Of an
  // uncaught exception it is the text alone, and all of its lines.
  std::string last_error(bool any) const;

  const std::deque<std::string>& lines() const { return lines_; }

 private:
  std::deque<std::string> lines_;  // the newest last
  std::string error_;              // the newest message that looks like one
  size_t age_ = 0;                 // lines that came after it
  bool is_open_ = false;           // the next line may belong to it
  bool is_uncaught_ = false;       // it is an uncaught exception's text
};

}  // namespace sherd::dist
