// Exchange: the data movement of collectives over a Mesh. One object serves a group's collectives,
// one after another:
//
//     exchange.begin(tag, partners, deadline);
//     exchange.transfer(outgoing, incoming);      // or reduce(...); several phases are allowed
//     exchange.end();
//
// The first phase starts with a greeting: each partner gets this rank's tag, and its data along
// with it if they are few bytes; nothing that arrives is used, and no receive is posted, before the
// peer's tag was found to belong to the same collective (TagMismatch otherwise).
//
// [Note: exchange] All ranks exchange directly: each sends rank p what p needs and receives what it
// needs itself, which for gathers and scattered reductions is as few bytes as any way can do.
// Gathered data go straight to their place. Data to be reduced arrive in chunks, in two halves of a
// scratch of at most 1 MiB: while one half is summed, the other is received. Sizes of chunks follow
// from the sizes of parts and the number of ranks, so sender and receiver cut alike.
#pragma once
#include <functional>
#include <memory>
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
  };
  using Parts = std::vector<Part>;
  using PartsOfRanks = std::vector<Parts>;  // by rank; the own entry is not looked at

  static constexpr int64_t kEagerBytes = 16 << 10;  // as much travels with the tag
  static constexpr int64_t kScratchBytes = int64_t(1) << 20;
  // What a group of that size takes to work in, at most: it never grows with the tensors.
  static int64_t room(int size) {
    return kScratchBytes + (size - 1) * 3 * (kEagerBytes + int64_t(sizeof(CollectiveTag)) + 64);
  }

  // `mesh` may be null for a size of 1.
  Exchange(Mesh* mesh, int rank, int size);
  ~Exchange();

  // Posts the first receives of tags. By the thread that will run the collectives.
  void open();
  // `partners`: ranks with whom tags are compared, by rule of the collective (the same rule on all
  // ranks: if a is b's partner, b is a's).
  void begin(const CollectiveTag& tag, std::vector<int> partners, TimePoint deadline);
  // Sends out[p] to each p, and fills in[p] from each p.
  void transfer(const PartsOfRanks& out, const PartsOfRanks& in);
  // Sends out[p] to each p. Each of `to` gets the tree over ranks of `mine` and what the peers
  // send for it; to[i] may be mine[i]. Empty `to`: this rank only sends.
  void reduce(const PartsOfRanks& out, const Parts& mine, const Parts& to, ReduceOp op);
  void end();

  // Tells all peers that this rank leaves, and waits until they leave too, or entered something
  // else, or the deadline has passed. Never throws.
  void say_goodbye(uint64_t sequence, TimePoint deadline);

  // Keeps a tensor or buffer of this collective until end(), or until drop() after a failure.
  void hold(Ref<Storage> storage) { held_.push_back(std::move(storage)); }
  // Forgets what a failed collective left. The mesh must be closed.
  void drop();

  // Of a lost peer: did it say goodbye? Then the tag that it said it with.
  std::optional<CollectiveTag> goodbye_of(int peer);

 private:
  struct Message;  // a tag and what travels with it
  struct Peer {
    std::unique_ptr<Message> out, in[2];
    int next_in = 0;
    bool greeted = false;  // its next tag has come, and was not used yet
    bool posted[2] = {};   // the receives of in[0] and in[1]
  };

  // Begins a phase: true if it is the greeting, of which the tags say what is sent and expected.
  bool greet(const PartsOfRanks& out, const std::function<int64_t(int)>& expected);
  void await_greeting(int peer);
  void reopen();  // posts receives for the partners' next tags
  // In messages of at most `chunk` bytes.
  void send_parts(int peer, const Parts& parts, int64_t chunk);
  void reduce_chunks(const Parts& mine, const Parts& to, ReduceOp op);
  int64_t chunk_bytes() const;

  Mesh* mesh_;
  int rank_, size_;
  std::vector<Peer> peers_;
  CollectiveTag tag_;
  std::vector<int> partners_;
  TimePoint deadline_;
  bool greeting_due_ = false;
  struct Pending {  // operations posted on one buffer
    std::unique_ptr<Mesh::Buffer> buffer;
    char* data;
    int64_t bytes;
    int count;
  };
  std::vector<Pending> sends_, receives_;
  std::vector<Ref<Storage>> held_;
};

}  // namespace sherd::dist
