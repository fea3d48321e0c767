#include "distributed/debug.h"

#include <cstdlib>
#include <sstream>

namespace sherd::dist {

bool debug_option(DebugOption, Store& store) {
  const char* variable = std::getenv("SHERD_DEBUG");
  bool collectives = false;
  std::istringstream words(variable ? variable : "");
  for (std::string word; std::getline(words, word, ',');) {
    if (word != "collectives")
      fail("[init_process_group] SHERD_DEBUG has '", word, "': there is collectives");
    collectives = true;
  }
  return store.compare_set("debug/collectives", "", collectives ? "1" : "0") == "1";
}

}  // namespace sherd::dist
