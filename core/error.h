// Error: what Sherd throws. Its text names the op in brackets, what was wrong, what was expected
// and what to do:
//
//     if (a.dim() == 0) fail("[matmul] both inputs need at least one dimension, got ", a.sizes());
//
// Arguments of fail() are strings, numbers, or anything with a `to_string` found by
// argument-dependent lookup.
#pragma once
#include <charconv>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace sherd {

class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& text) : std::runtime_error(text) {}
  // The same with where it happened, " (in module 'layers.3.ffn')". A new one: others may hold this.
  Error at(const std::string& place) const {
    Error e(what() + place);
    e.is_located_ = true;
    return e;
  }
  bool is_located() const { return is_located_; }

 private:
  bool is_located_ = false;
};

// The arguments' texts, one after another.
template <class... A>
std::string concat(const A&... a) {
  std::string s;
  auto put = [&s](const auto& v) {
    using T = std::decay_t<decltype(v)>;
    if constexpr (std::is_same_v<T, bool>) {
      s += v ? "true" : "false";
    } else if constexpr (std::is_same_v<T, char>) {
      s += v;
    } else if constexpr (std::is_floating_point_v<T>) {
      if (v != v) return void(s += "nan");  // of either sign
      char digits[32];                      // as few as tell the number
      s.append(digits, std::to_chars(digits, digits + sizeof digits, v).ptr);
    } else if constexpr (std::is_arithmetic_v<T>) {
      s += std::to_string(v);
    } else if constexpr (std::is_convertible_v<T, std::string_view>) {
      s += std::string_view(v);
    } else {
      s += to_string(v);
    }
  };
  (put(a), ...);
  return s;
}

template <class... A>
[[noreturn]] void fail(const A&... a) {
  throw Error(concat(a...));
}

}  // namespace sherd
