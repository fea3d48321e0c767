#include "examples/support/printable.h"

#include <nlohmann/json.hpp>

namespace examples {
namespace {

constexpr const char* kReplacement = "\uFFFD";

std::string to_utf8(const std::string& text) {
  using Json = nlohmann::json;
  return Json::parse(Json(text).dump(-1, ' ', false, Json::error_handler_t::replace));
}

bool is_control(char c) { return (c >= 0 && c < ' ' && c != '\n' && c != '\t') || c == '\x7f'; }
// U+0080 ... U+009F, of which terminals take some as the beginning of a command.
bool is_control(char lead, char next) { return lead == '\xC2' && (next & 0xE0) == 0x80; }

}  // namespace

std::string printable(const std::string& text) {
  const std::string utf8 = to_utf8(text);
  std::string shown;
  for (size_t i = 0; i < utf8.size(); ++i) {
    const bool is_pair = i + 1 < utf8.size() && is_control(utf8[i], utf8[i + 1]);
    if (is_pair || is_control(utf8[i]))
      shown += kReplacement;
    else
      shown += utf8[i];
    i += is_pair;
  }
  return shown;
}

}  // namespace examples
