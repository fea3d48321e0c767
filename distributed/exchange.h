// Exchange: how the data of collectives move between the ranks of a group. One object serves a
// group's collectives, one after another:
//
//     exchange.begin(tag, partners, deadline);
//     exchange.transfer(outgoing, incoming);      // or reduce(...); several phases are allowed
//     exchange.end();
//
// The first phase starts with a greeting: each partner gets this rank's tag, and no byte of a peer
// is used before its tag was found to belong to the same collective (TagMismatch otherwise).
// mesh_exchange.h sends messages over a Mesh, shm/shm_exchange.h works in the peers' memory.
#pragma once
#include <optional>
#include <vector>

#include "core/storage.h"
#include "distributed/collective_tag.h"
#include "distributed/mesh.h"
#include "distributed/reduce_op.h"

namespace sherd::dist {

// Two ranks are in different collectives.
class TagMismatch : public Error {
 public:
  TagMismatch(const CollectiveTag& mine, const CollectiveTag& theirs, int peer)
      : Error(difference(mine, theirs)), theirs(theirs), peer(peer) {}
  CollectiveTag theirs;
  int peer;
};

class Exchange {
 public:
  struct Part {  // contiguous elements of one dtype
    char* data;
    int64_t numel;
    DType dtype;
    int64_t bytes() const { return numel * size_of(dtype); }
    // Elements [at, at + n).
    Part slice(int64_t at, int64_t n) const { return {data + at * size_of(dtype), n, dtype}; }
    // The elements of rank r, where all are cut into pieces of equal size, the last ones shorter.
    Part cut(int r, int size) const {
      const int64_t step = (numel + size - 1) / size, at = std::min(numel, r * step);
      return slice(at, std::min(numel - at, step));
    }
  };
  using Parts = std::vector<Part>;
  using PartsOfRanks = std::vector<Parts>;  // by rank; the own entry is not looked at
  static int64_t total_numel(const Parts& parts) {
    int64_t n = 0;
    for (const Part& p : parts) n += p.numel;
    return n;
  }
  static int64_t total_bytes(const Parts& parts) {
    int64_t n = 0;
    for (const Part& p : parts) n += p.bytes();
    return n;
  }
  // What rank r has of each, where each is cut.
  static Parts cut(const Parts& parts, int r, int size) {
    Parts cuts;
    for (const Part& p : parts) cuts.push_back(p.cut(r, size));
    return cuts;
  }

  virtual ~Exchange() = default;

  // Before the first collective, by the thread that will run them.
  virtual void open() {}
  // `partners`: ranks with whom tags are compared, by rule of the collective (the same rule on all
  // ranks: if a is b's partner, b is a's).
  virtual void begin(const CollectiveTag& tag, std::vector<int> partners, TimePoint deadline) = 0;
  // Sends out[p] to each p, and fills in[p] from each p.
  virtual void transfer(const PartsOfRanks& out, const PartsOfRanks& in) = 0;
  // Sends out[p] to each p. Each of `to` gets the tree over ranks of `mine` and what the peers
  // send for it; to[i] may be mine[i]. Empty `to`: this rank only sends.
  virtual void reduce(const PartsOfRanks& out, const Parts& mine, const Parts& to, ReduceOp op) = 0;
  // All ranks get the root's part.
  virtual void broadcast(const Part& part, int root) = 0;
  // All ranks get the tree over all ranks' parts, in place.
  virtual void all_reduce(const Parts& parts, ReduceOp op) = 0;
  // Returns when no peer reads or writes this collective's tensors any more.
  virtual void end() = 0;

  // Leaving, in two steps that never throw: tells all peers; then waits until they leave too, or
  // entered something else, or the deadline has passed.
  virtual void say_goodbye(uint64_t sequence, TimePoint deadline) = 0;
  virtual void await_goodbyes() = 0;
  // Of a lost peer: did it say goodbye? Then the tag that it said it with.
  virtual std::optional<CollectiveTag> goodbye_of(int peer) = 0;

  // Keeps a tensor or buffer of this collective until end(), or until drop() after a failure.
  void hold(Ref<Storage> storage) { held_.push_back(std::move(storage)); }
  // Forgets what a failed collective left. The mesh must be closed, and the collective's tensors
  // still be there; afterwards no peer writes into them.
  virtual void drop() { held_.clear(); }

 private:
  std::vector<Ref<Storage>> held_;
};

}  // namespace sherd::dist
