// SHERD_DEBUG: checks that cost time, by name, separated by commas.
//
//     collectives   every collective's operation, shape, dtype and root are compared between all
//                   ranks of its group before any data are used, also where the data go to few of
//                   them
#pragma once
#include "distributed/store.h"

namespace sherd::dist {

enum class DebugOption { kCollectives };

// What the first rank to ask said, since the ranks of a group must agree. `store`: of that group.
// Error if SHERD_DEBUG holds another word.
bool debug_option(DebugOption option, Store& store);

}  // namespace sherd::dist
