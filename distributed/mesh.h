// Mesh: a connection between every two ranks of a group, over which buffers are sent and received.
// It is all that a backend has to bring: the collectives (exchange.h), their order, tags and errors
// (mesh_process_group.h) are written once on top of it.
//
//     auto buffer = mesh.buffer(data, bytes);
//     buffer->send(peer, channel, 0, bytes);          // returns at once
//     buffer->wait_send(deadline);                    // the bytes may be changed again
//
// Between two ranks, sends and receives of one channel match in the order in which they were
// posted; a receive must have room for what is sent. A buffer's bytes stay in place, and the Buffer
// alive, until its operations have ended or the mesh was closed; then the Buffer goes first.
#pragma once
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/error.h"

namespace sherd::dist {

using TimePoint = std::chrono::steady_clock::time_point;

// A connection broke, or was closed by another wait's deadline.
class ConnectionLost : public Error {
 public:
  using Error::Error;
};
// This wait's own deadline passed. The mesh is closed.
class DeadlinePassed : public Error {
 public:
  using Error::Error;
};

class Mesh {
 public:
  class Buffer {
   public:
    virtual ~Buffer() = default;
    virtual void send(int peer, uint64_t channel, int64_t offset, int64_t bytes) = 0;
    virtual void recv(int peer, uint64_t channel, int64_t offset, int64_t bytes) = 0;
    virtual void recv_any(uint64_t channel, int64_t offset, int64_t bytes) = 0;  // from any peer
    // Each ends one send (one receive), in order of completion. ConnectionLost where one that is
    // pending cannot end any more.
    virtual void wait_send(TimePoint deadline) = 0;
    // The peer whose bytes came; -1 if wake() was called meanwhile, or since the last wait.
    virtual int wait_recv(TimePoint deadline) = 0;
    virtual void wake() = 0;  // from any thread
  };

  virtual ~Mesh() = default;
  virtual std::unique_ptr<Buffer> buffer(void* data, int64_t bytes) = 0;
  // Ranks whose connection is broken. Never blocks.
  virtual std::vector<int> lost_peers() = 0;
  // Breaks all connections: what is pending here, and at the peers, fails.
  virtual void close() = 0;
};

}  // namespace sherd::dist
