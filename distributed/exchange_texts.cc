#include "distributed/exchange_texts.h"

#include <algorithm>

namespace sherd::dist {
namespace {

using Clock = std::chrono::steady_clock;

// Returns the keys of all.
std::vector<std::string> meet(Store& store, const std::string& what, const std::string& mine,
                              const Party& party) {
  std::vector<std::string> keys;
  for (size_t i = 0; i < party.ranks.size(); ++i) keys.push_back(concat(what, "/", i));
  store.set(keys[size_t(party.rank)], mine);
  const auto left = std::chrono::ceil<Milliseconds>(party.since + party.timeout - Clock::now());
  try {
    store.wait(keys, std::max(left, Milliseconds(1)));
  } catch (const StoreTimeout&) {
    std::string missing;
    for (size_t i = 0; i < keys.size(); ++i)
      if (!store.check({keys[i]})) missing += concat(missing.empty() ? "" : ", ", party.ranks[i]);
    fail("[", party.op, "] rank ", party.ranks[size_t(party.rank)], " of ", party.ranks.size(),
         " waited ", party.timeout.count(), " ms for the others to come: missing are ranks ",
         missing, " (store ", store.name(), ")");
  }
  return keys;
}

}  // namespace

std::vector<std::string> exchange_texts(Store& store, const std::string& what,
                                        const std::string& mine, const Party& party) {
  std::vector<std::string> texts;
  for (auto& key : meet(store, what, mine, party)) texts.push_back(store.get(key));
  return texts;
}

void await_all(Store& store, const std::string& what, const Party& party) {
  meet(store, what, "", party);
}

}  // namespace sherd::dist
