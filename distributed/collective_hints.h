// What a user may have to do where ranks are in different collectives.
#pragma once
#include <string>

#include "distributed/collective_tag.h"

namespace sherd::dist {

// ". Ranks need ...": the end of an error's text, by what the collective is for; empty if there is
// nothing to say.
std::string hint_of(const CollectiveTag& tag);

}  // namespace sherd::dist
