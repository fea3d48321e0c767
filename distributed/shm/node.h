// Node: the ranks of a job that share this rank's host and can map each other's memory.
//
//     auto node = Node::meet(store, rank, world_size, timeout);   // all ranks of the job
//     node->ranks();                                   // e.g. {0, 1}: those on this host
//     char* theirs = node->at(1, place, bytes);        // rank 1's memory
//
// A unix socket between every two of them, in the abstract namespace (nothing in the file system),
// carries the arenas' descriptors; afterwards nothing travels on it, but the kernel closes it when
// a rank dies, and a thread that watches them tells so at once.
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <thread>
#include <vector>

#include "distributed/shm/arena.h"
#include "distributed/socket.h"
#include "distributed/store.h"

namespace sherd::dist {

// The kernel that runs: one a machine, until it starts again. Empty: the system does not say.
std::string boot_id();
// Names the host as far as memory can be shared: the running kernel, the namespaces of network and
// processes, and the user.
std::string host_id();

class Node {
 public:
  // Told, by the node's thread, of each rank that is lost.
  class Listener {
   public:
    virtual ~Listener() = default;
    virtual void on_lost(int rank) = 0;
  };

  // A collective of all ranks of the job. From then on, where there is another rank on the host,
  // this Context's tensors come from its arena. Error if ranks do not come in time.
  static std::shared_ptr<Node> meet(Store& store, int rank, int world_size, Milliseconds timeout);
  ~Node();

  // Ranks of the job on this host, in order. Alone where memory cannot be shared: why_not() says
  // why.
  const std::vector<int>& ranks() const { return ranks_; }
  bool has(int rank) const;
  // Are all of these ranks of the job, wherever they are, on one host that lets them share memory?
  bool share_memory(const std::vector<int>& ranks) const;
  // Are these ranks of the job, in this order, those of one host after another, as many of each, a
  // power of two from 2? Then how many; else 0.
  int ranks_per_host(const std::vector<int>& ranks) const;
  const std::string& why_not() const { return why_not_; }

  Arena& arena() const { return *arena_; }
  // See ArenaView::at. `rank` is another rank of the node. What does not stay must be used under
  // reading(), for trim() may unmap it.
  char* at(int rank, const Place& place, int64_t bytes, bool stays = false);
  void forget(int rank, const Place& place);
  PeerPages& pages() { return pages_; }
  std::shared_lock<std::shared_mutex> reading() { return std::shared_lock(reads_); }
  // Not under reading(). If this rank has more than eight thousand of the peers' blocks mapped, of
  // which they gave back maybe most, and nobody reads at the moment: unmaps them.
  void trim();
  bool is_lost(int rank) const;

  void add(Listener* listener);
  void remove(Listener* listener);  // on return it is told nothing more

 private:
  struct Peer {
    Peer(Socket s, Fd file, PeerPages* pages)
        : socket(std::move(s)), view(std::move(file), pages) {}
    Socket socket;
    ArenaView view;
    std::atomic<bool> lost = false;
  };
  struct Announcement;

  void connect(const std::vector<Announcement>& all, const Socket& listener, Milliseconds timeout);
  void watch();

  int rank_ = 0;
  std::vector<int> ranks_;
  std::vector<std::string> hosts_;  // by rank of the job; empty: its memory cannot be shared
  std::string why_not_;
  std::shared_ptr<Arena> arena_;
  PeerPages pages_{PeerPages::kMostKept};
  std::map<int, std::unique_ptr<Peer>> peers_;
  std::shared_mutex reads_;
  Fd wake_;  // readable: the thread ends
  std::mutex mutex_;
  std::vector<Listener*> listeners_;
  std::thread thread_;
};

}  // namespace sherd::dist
