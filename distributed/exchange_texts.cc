#include "distributed/exchange_texts.h"

namespace sherd::dist {

std::vector<std::string> exchange_texts(Store& store, const std::string& what,
                                        const std::string& mine, const Party& party) {
  std::vector<std::string> keys;
  for (size_t i = 0; i < party.ranks.size(); ++i) keys.push_back(concat(what, "/", i));
  store.set(keys[size_t(party.rank)], mine);
  try {
    store.wait(keys, party.timeout);
  } catch (const StoreTimeout&) {
    std::string missing;
    for (size_t i = 0; i < keys.size(); ++i)
      if (!store.check({keys[i]})) missing += concat(missing.empty() ? "" : ", ", party.ranks[i]);
    fail("[", party.op, "] rank ", party.ranks[size_t(party.rank)], " of ", party.ranks.size(),
         " waited ", party.timeout.count(), " ms for the others to come: missing are ranks ",
         missing, " (store ", store.name(), ")");
  }
  std::vector<std::string> texts;
  for (auto& k : keys) texts.push_back(store.get(k));
  return texts;
}

}  // namespace sherd::dist
