// What ranks say of themselves in the store before they can talk: addresses, sockets, places.
//
//     const Party party{.op = "shm", .ranks = {0, 2}, .rank = 1, .timeout = timeout};
//     std::vector<std::string> all = exchange_texts(*store, "address", mine, party);
//     await_all(*store, "connected", party);
#pragma once
#include <chrono>
#include <string>
#include <vector>

#include "distributed/store.h"

namespace sherd::dist {

struct Party {
  const char* op = "init_process_group";  // for messages
  std::vector<int> ranks = {};            // their numbers in the job
  int rank = 0;                           // this one's place among them
  Milliseconds timeout = kDefaultTimeout;
  Milliseconds quiet_time{10'000};  // then who waits says so on stderr
  // From which the timeout counts, for all that the party does.
  std::chrono::steady_clock::time_point since = std::chrono::steady_clock::now();
};

// Both set "<what>/<place>". Errors name the ranks that did not within the timeout.
std::vector<std::string> exchange_texts(Store& store, const std::string& what,
                                        const std::string& mine, const Party& party);  // by place
void await_all(Store& store, const std::string& what, const Party& party);

}  // namespace sherd::dist
