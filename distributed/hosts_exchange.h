// HostsExchange: an Exchange for a group that spans hosts, each with as many of its ranks: what
// ranks of one host have for each other goes through an exchange of their own (shared memory), and
// what goes to another host travels once, not once a rank.
//
//     HostsTransport t = connect_hosts(std::move(all), std::move(within), rank, size, per_host);
//
// [Note: hosts] Rank r is number l = r mod L of host h = r / L. A reduction sums over the ranks of
// each host first, l taking the pieces of column l (the ranks of that number on all hosts), and
// then over hosts in each column. With L a power of two that is the tree over all ranks
// (tree_sum.h): the same bits as over any other backend. Gathers go the other way round. So each
// byte of a full tensor crosses the network H - 1 times, and not (H - 1) L times.
//
// All, also what has no such way (gather, scatter, all_to_all, reduce), begin with a phase within
// the host, and then one in the column, in which tags are compared: so ranks in different
// collectives meet, whatever these are. Sends and receives go over the mesh of all ranks.
#pragma once
#include <memory>

#include "distributed/mesh_exchange.h"

namespace sherd::dist {

struct HostsTransport {
  std::unique_ptr<Mesh> mesh;
  std::unique_ptr<Exchange> exchange;
};
// `all`: between all ranks of the group; `within`: of its ranks on this host, with the numbers 0 to
// per_host - 1, a power of two. Both as other groups use them.
HostsTransport connect_hosts(std::unique_ptr<Mesh> all, HostsTransport within, int rank, int size,
                             int per_host);

}  // namespace sherd::dist
