#include "distributed/exchange_texts.h"

#include <algorithm>
#include <cstdio>

#include "distributed/deadline.h"

namespace sherd::dist {
namespace {

using Clock = std::chrono::steady_clock;

std::vector<size_t> missing_in(Store& store, const std::vector<std::string>& keys) {
  std::vector<size_t> missing;
  for (size_t i = 0; i < keys.size(); ++i)
    if (!store.check({keys[i]})) missing.push_back(i);
  return missing;
}

// "[shm] rank 0 of 4 waited 10000 ms for the others to come: missing are ranks 1, 3"
std::string waited(const Party& party, Milliseconds time, const std::vector<size_t>& missing) {
  std::string list;
  for (size_t i : missing) list += concat(list.empty() ? "" : ", ", party.ranks[i]);
  return concat("[", party.op, "] rank ", party.ranks[size_t(party.rank)], " of ",
                party.ranks.size(), " waited ", time.count(),
                " ms for the others to come: missing are ranks ", list);
}

// True: all keys are there.
bool wait_until(Store& store, const std::vector<std::string>& keys, Clock::time_point deadline) {
  const auto left = std::chrono::ceil<Milliseconds>(deadline - Clock::now());
  try {
    store.wait(keys, std::max(left, Milliseconds(1)));
  } catch (const StoreTimeout&) {
    return false;
  }
  return true;
}

// Returns the keys of all.
std::vector<std::string> meet(Store& store, const std::string& what, const std::string& mine,
                              const Party& party) {
  std::vector<std::string> keys;
  for (size_t i = 0; i < party.ranks.size(); ++i) keys.push_back(concat(what, "/", i));
  store.set(keys[size_t(party.rank)], mine);
  const auto quiet_until = deadline_after(party.quiet_time),
             deadline = deadline_after(party.timeout, party.since);
  if (quiet_until < deadline && !wait_until(store, keys, quiet_until)) {
    const std::vector<size_t> missing = missing_in(store, keys);
    // The first that is there speaks for all.
    size_t speaker = 0;
    while (speaker < missing.size() && missing[speaker] == speaker) ++speaker;
    if (!missing.empty() && size_t(party.rank) == speaker)
      std::fprintf(stderr, "%s so far; the timeout is %ld s\n",
                   waited(party, party.quiet_time, missing).c_str(),
                   long(party.timeout.count() / 1000));
  }
  if (!wait_until(store, keys, deadline))
    fail(waited(party, party.timeout, missing_in(store, keys)), " (store ", store.name(), ")");
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
