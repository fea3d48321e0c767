// ShmMesh: a Mesh through shared memory, for send and recv; collectives go by ShmExchange.
//
// A message is a letter in the sender's control block that says where the bytes lie: in the letter,
// if they are few, in the sender's tensor, or in a copy where that lies outside the arena. The
// receiver takes them from there, once a receive for them was posted, and says so in a letter.
// Letters are moved on whenever the one thread that uses a mesh's buffers waits.
#pragma once
#include <memory>

#include "distributed/exchange.h"
#include "distributed/mesh.h"
#include "distributed/shm/node.h"

namespace sherd::dist {

struct ShmTransport {
  std::unique_ptr<Mesh> mesh;
  std::unique_ptr<Exchange> exchange;
};

// A collective of the group's ranks, all of which are in the node. `rank`: in the group; `ranks`:
// of the job, by group rank; `store`: of this group alone. Error after `timeout`, which names the
// ranks that did not come.
ShmTransport connect_shm(std::shared_ptr<Node> node, int rank, std::vector<int> ranks, Store& store,
                         Milliseconds timeout);

}  // namespace sherd::dist
