// Bytes and numbers as hexadecimal digits, two a byte, the first byte first.
//
//     hex_of("\x01\xff") == "01ff";  hex_of(uint64_t(255)) == "00000000000000ff"
#pragma once
#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace sherd::dist {

inline std::string hex_of(std::string_view bytes) {
  std::string text;
  for (const unsigned char c : bytes)
    for (const int digit : {c >> 4, c & 15}) text += "0123456789abcdef"[digit];
  return text;
}

inline std::string hex_of(uint64_t number) {
  char bytes[8];
  for (int i = 0; i < 8; ++i) bytes[i] = char(number >> (56 - 8 * i));
  return hex_of(std::string_view(bytes, sizeof bytes));
}

// None: the text is no such number.
inline std::optional<uint64_t> number_from_hex(std::string_view text) {
  uint64_t number = 0;
  const char* last = text.data() + text.size();
  const auto end = std::from_chars(text.data(), last, number, 16);
  if (text.empty() || end.ec != std::errc() || end.ptr != last) return {};
  return number;
}

}  // namespace sherd::dist
