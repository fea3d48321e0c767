// GlooMesh: a Mesh over Gloo's TCP transport (Debian's libgloo). The ranks meet through a Store.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "distributed/mesh.h"
#include "distributed/store.h"

namespace sherd::dist {

// Connects `ranks` (of the job), all of which make this call; `rank` is this one's place among
// them. `address` is the numeric address of this rank's network interface ("127.0.0.1"; a name that
// does not resolve crashes Gloo). Error after `timeout`, which names the ranks that did not come.
std::unique_ptr<Mesh> connect_gloo_mesh(int rank, std::vector<int> ranks, Store& store,
                                        const std::string& address, Milliseconds timeout);

}  // namespace sherd::dist
