#include "distributed/debug.h"

#include <array>
#include <cstdlib>
#include <sstream>

namespace sherd::dist {

constexpr std::array kNames = {"collectives", "fsdp"};

bool debug_option(DebugOption option) {
  const char* variable = std::getenv("SHERD_DEBUG");
  bool is_set = false;
  std::istringstream words(variable ? variable : "");
  for (std::string word; std::getline(words, word, ',');) {
    bool known = false;
    for (const char* name : kNames) known |= word == name;
    if (!known)
      fail("[init_process_group] SHERD_DEBUG has '", word, "': there is ", kNames[0], ", ",
           kNames[1]);
    is_set |= word == kNames[int(option)];
  }
  return is_set;
}

bool debug_option(DebugOption option, Store& store) {
  const std::string mine = debug_option(option) ? "1" : "0";
  return store.compare_set(concat("debug/", kNames[int(option)]), "", mine) == "1";
}

}  // namespace sherd::dist
