// Text that a model made up, for a terminal.
//
//     printable("a\xff" "b\x1b")        // "a\uFFFDb\uFFFD"
#pragma once
#include <string>

namespace examples {

// With U+FFFD for what is no UTF-8 and for control characters other than newline and tab.
std::string printable(const std::string& text);

}  // namespace examples
