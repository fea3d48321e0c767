// What the launcher asks of the machine it runs on: cores, accelerators, a port for the store.
#pragma once
#include <string>

#include "distributed/fd.h"

namespace sherd::dist {

std::string host_name();
int core_count();         // that this process may run on (its affinity mask)
int accelerator_count();  // NVIDIA devices, as CUDA_VISIBLE_DEVICES leaves them

struct StoreSocket {
  Fd fd;  // listens; close-on-exec
  int port;
};

// Listens on `address` (a host name or an IP address of this machine) or, if it is empty, on all of
// this machine's; port 0 takes a free one. Throws Error if the port is in use, or the address is
// not this machine's.
StoreSocket listen_for_store(const std::string& address, int port);
// The same, and none (-1) if the port is in use.
StoreSocket listen_if_free(const std::string& address, int port);

}  // namespace sherd::dist
