// What ranks tell each other besides tensors: numbers, short texts, and whose error it was.
//
//     std::vector<std::string> all = all_gather_text(group, mine);       // by rank
//     all_or_none(group, [&] { write(); });                              // all throw, or none
//
// [Note: errors between collectives] A rank that throws between two collectives leaves the others
// in the second one until their deadline. So whatever may fail on one rank alone, for what it was
// given or for what its machine does, runs inside all_or_none, and never holds a collective.
//
// Collectives. A null group is one rank.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "core/error.h"
#include "distributed/process_group.h"

namespace sherd::dist {

std::vector<int64_t> all_gather_number(const Group& group, int64_t mine,
                                       const CollectiveOptions& options = {.label = "number"});
std::vector<std::string> all_gather_text(const Group& group, const std::string& mine,
                                         const CollectiveOptions& options = {.label = "text"});

// What a rank has to say; an empty text: it did not fail.
struct RankError {
  std::string text = {};
  bool special = false;
};
// Of all ranks: a line each that failed, with the rank in front, or one line if all say the same;
// special, if any is. One small collective where nobody failed.
RankError join_errors(const Group& group, const RankError& mine);

// While it lives, this rank is in that call, which all ranks have to make; the outermost one is
// named where ranks turn out to be in different collectives.
class CollectiveCall {
 public:
  explicit CollectiveCall(const char* name);
  ~CollectiveCall();
  CollectiveCall(const CollectiveCall&) = delete;
  CollectiveCall& operator=(const CollectiveCall&) = delete;

 private:
  const char* before_;
};

// What f throws; empty: nothing.
std::string error_of(const std::function<void()>& f);

// Calls f. If it throws on any rank, an Error on every rank that lists the ranks where it did and
// what they say; a text that all ranks have is said once. It is a Kind if any rank threw one.
template <class Kind = Error>
void all_or_none(const Group& group, const std::function<void()>& f) {
  static_assert(std::is_base_of_v<Error, Kind>);
  RankError mine;
  mine.text = error_of([&] {
    try {
      f();
    } catch (const Kind&) {
      mine.special = true;
      throw;
    }
  });
  const RankError all = join_errors(group, mine);
  if (all.text.empty()) return;
  if (all.special) throw Kind(all.text);
  throw Error(all.text);
}

// The same of an error that is known already; an empty text: none.
inline void throw_on_all(const Group& group, const std::string& error) {
  all_or_none(group, [&] {
    if (!error.empty()) throw Error(error);
  });
}

}  // namespace sherd::dist
