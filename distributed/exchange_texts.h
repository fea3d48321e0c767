// What ranks say of themselves in the store before they can talk: addresses, sockets, places.
//
//     std::vector<std::string> all = exchange_texts(*store, "address", mine, {.ranks = {0, 2}, .rank = 1});
#pragma once
#include <string>
#include <vector>

#include "distributed/store.h"

namespace sherd::dist {

struct Party {
  const char* op = "init_process_group";  // for messages
  std::vector<int> ranks = {};            // their numbers in the job
  int rank = 0;                           // this one's place among them
  Milliseconds timeout = kDefaultTimeout;
};

// Sets "<what>/<place>" and returns the texts of all, by place. Error that names the ranks whose
// text did not come within the timeout.
std::vector<std::string> exchange_texts(Store& store, const std::string& what,
                                        const std::string& mine, const Party& party);

}  // namespace sherd::dist
