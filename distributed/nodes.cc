#include "distributed/nodes.h"

#include <unistd.h>

#include <algorithm>

#include "distributed/agree.h"
#include "distributed/distributed.h"
#include "distributed/shm/node.h"

namespace sherd::dist {

std::vector<std::vector<int>> split_into_nodes(const std::vector<std::string>& host_names,
                                               const std::vector<int>& local_world_sizes) {
  const int local = local_world_sizes.at(0);
  for (size_t r = 0; r < local_world_sizes.size(); ++r)
    if (local_world_sizes[r] != local)
      fail("[fsdp] rank 0 is one of ", local, " ranks on its node (LOCAL_WORLD_SIZE), rank ", r,
           " one of ", local_world_sizes[r],
           ": nodes of as many ranks each are needed, or give shard_group and replicate_group");
  std::vector<std::vector<int>> hosts, nodes;
  for (size_t r = 0; r < host_names.size(); ++r) {
    const auto known = std::ranges::find_if(
        hosts, [&](auto& ranks) { return host_names[size_t(ranks[0])] == host_names[r]; });
    if (known == hosts.end())
      hosts.push_back({int(r)});
    else
      known->push_back(int(r));
  }
  for (auto& ranks : hosts) {
    const size_t n = std::clamp<size_t>(size_t(std::max(local, 1)), 1, ranks.size());
    if (ranks.size() % n != 0)
      fail("[fsdp] host ", host_names[size_t(ranks[0])], " has ", ranks.size(),
           " ranks, which do not make whole nodes of ", n,
           " (LOCAL_WORLD_SIZE): give shard_group and replicate_group");
    for (size_t first = 0; first < ranks.size(); first += n)
      nodes.emplace_back(ranks.begin() + int64_t(first), ranks.begin() + int64_t(first + n));
  }
  for (auto& ranks : nodes)
    if (ranks.size() != nodes[0].size())
      fail("[fsdp] rank ", nodes[0][0], " shares its node, ", host_names[size_t(nodes[0][0])],
           ", with ", nodes[0].size() - 1, " other ranks, and rank ", ranks[0], " its, ",
           host_names[size_t(ranks[0])], ", with ", ranks.size() - 1,
           ": nodes of as many ranks each are needed, or give shard_group and replicate_group");
  return nodes;
}

std::vector<std::vector<int>> ranks_by_node(const Group& group) {
  char host[256] = {};
  ::gethostname(host, sizeof host - 1);
  std::vector<std::string> hosts;
  std::vector<int> sizes;
  // The running kernel tells machines apart whose names are the same.
  const std::string mine = concat(local_world_size(), " ", host, " (boot ", boot_id(), ")");
  for (const std::string& text : all_gather_text(group, mine)) {
    const size_t space = text.find(' ');
    sizes.push_back(std::stoi(text.substr(0, space)));
    hosts.push_back(text.substr(space + 1));
  }
  return split_into_nodes(hosts, sizes);
}

}  // namespace sherd::dist
