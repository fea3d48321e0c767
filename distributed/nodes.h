// Which ranks share a node, as all of them see it.
//
//     for (const std::vector<int>& ranks : dist::ranks_by_node(group)) ...      // {0, 1}, {2, 3}
#pragma once
#include <string>
#include <vector>

#include "distributed/process_group.h"

namespace sherd::dist {

// Ranks of the group, rising, in lists of one length: a list a node. A collective. Error on every
// rank where LOCAL_WORLD_SIZE differs between ranks, or nodes have different numbers of ranks.
std::vector<std::vector<int>> ranks_by_node(const Group& group);

// The same from what each rank says of itself. The ranks of one host are a node; where a host has
// more than local_world_size, each run of so many is (several nodes can be on one, for a try).
std::vector<std::vector<int>> split_into_nodes(const std::vector<std::string>& host_names,
                                               const std::vector<int>& local_world_sizes);

}  // namespace sherd::dist
