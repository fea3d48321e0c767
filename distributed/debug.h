// SHERD_DEBUG: checks that cost time, and talk, by name, separated by commas.
//
//     collectives   every collective's operation, shape, dtype and root are compared between all
//                   ranks of its group before any data are used, also where the data go to few of
//                   them; a call whose arguments are refused on one rank ends the group on all
//     fsdp          FSDP tells on stderr when each unit's forward and backward begin and end
#pragma once
#include "distributed/store.h"

namespace sherd::dist {

enum class DebugOption { kCollectives, kFsdp };

// Error if SHERD_DEBUG holds another word.
bool debug_option(DebugOption option);
// What the first rank to ask said, since the ranks of a group must agree. `store`: of that group.
bool debug_option(DebugOption option, Store& store);

}  // namespace sherd::dist
