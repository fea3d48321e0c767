// What ranks tell each other around files: short texts, and whose error it was.
//
//     std::vector<std::string> all = all_gather_text(group, mine);       // by rank
//     all_or_none(group, [&] { write(); });                              // all throw, or none
//
// Collectives. A null group is one rank.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "core/error.h"
#include "distributed/process_group.h"

namespace sherd::dist {

std::vector<std::string> all_gather_text(const Group& group, const std::string& mine);

// The checkpoint's files are not what was written.
struct DamagedCheckpoint : Error {
  using Error::Error;
};

// Calls f. If it throws on any rank, an Error on every rank that lists the ranks where it did and
// what they say; a text that all ranks have is said once. DamagedCheckpoint, if any threw that.
void all_or_none(const Group& group, const std::function<void()>& f);

}  // namespace sherd::dist
