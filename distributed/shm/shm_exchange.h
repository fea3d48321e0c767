// ShmExchange: an Exchange in the peers' memory. A rank shows where its data lie, and each peer
// takes what it needs straight from there into its own tensors, or sums it from there: nothing is
// copied on the way. An all-reduce puts its sums straight into the peers' tensors too, and a
// broadcast's root a share of what they get; see [Note: writing].
//
// [Note: phases] Each phase of a collective is a turn, counted alike by all ranks. In its turn a
// rank posts, in its control block, the collective's tag and a table that says where its parts for
// each peer lie. A reader (a partner in the greeting, or who gets parts) waits for the post,
// compares tags, reads, and says "done". Posts alternate between two places: one is written again
// only when its readers of two turns ago are done. A collective ends when the readers of all its
// turns are done; so after one that ended well nobody reads what this rank had shown.
//
// [Note: writing] A rank that gives up (a deadline, a lost peer) goes on with its memory at once,
// and must not find a slower peer writing there. So who writes says so in the owner's control
// block, before it looks whether the owner gave up, a slice at a time; and who gave up waits for
// those who had begun. Should one have been stopped in the midst of a slice, the bytes move to
// pages that nobody else maps.
//
// Parts that lie outside the arena (small tensors, memory that the user wrapped, tensors older than
// the process group), and those that this rank itself writes in the same phase, are copied to where
// peers can see them first, and back if peers write there.
#pragma once
#include <functional>
#include <memory>

#include "distributed/exchange.h"
#include "distributed/shm/shm_group.h"

namespace sherd::dist {

class ShmExchange : public Exchange {
 public:
  static constexpr int64_t kScratchBytes = 128 << 10;  // in two halves
  // Up to here each rank sums all elements itself: so few are copied for the peers to read, and
  // sums would have to be copied back.
  static constexpr int64_t kSumAlone = 32 << 10;
  // From here on a broadcast's root copies its share of the bytes, while the others do theirs.
  static constexpr int64_t kRootHelps = 256 << 10;

  explicit ShmExchange(std::shared_ptr<ShmGroup> group);
  ~ShmExchange() override;

  void open() override;
  void begin(const CollectiveTag& tag, std::vector<int> partners, TimePoint deadline) override;
  void transfer(const PartsOfRanks& out, const PartsOfRanks& in) override;
  void reduce(const PartsOfRanks& out, const Parts& mine, const Parts& to, ReduceOp op) override;
  void broadcast(const Part& part, int root) override;
  void all_reduce(const Parts& parts, ReduceOp op) override;
  void end() override;
  void say_goodbye(uint64_t sequence, TimePoint deadline) override;
  void await_goodbyes() override;
  std::optional<CollectiveTag> goodbye_of(int peer) override;
  void drop() override;

 private:
  struct Row {                           // of the table: for one peer
    int64_t to_peer = 0, from_peer = 0;  // elements, as in a tag
    int64_t first = 0, count = 0;        // of its entries
  };
  struct Entry {
    Place place;
    int64_t bytes;
  };
  struct Turn {  // a post, as its writer remembers it
    uint64_t number = 0;
    std::vector<int> readers;
  };

  // Posts this rank's part of the next phase; true if it is the greeting. `written`: what this rank
  // writes while peers read. `writable`: peers write into `out`.
  bool post(const PartsOfRanks& out, const std::function<int64_t(int)>& expected,
            const Parts& written, bool writable = false);
  void await_readers(const Turn& turn);
  bool is_partner(int peer) const;
  // Waits for p's post of this turn, and finds its parts for this rank: as many as `parts`, of the
  // same sizes. `greeting`: compares tags first.
  std::vector<char*> await_parts(int peer, bool greeting, const Parts& parts);
  // The same for all who show something for this rank, which `parts` tells, or greet; in the order
  // in which f is called.
  void for_each_shown(bool greeting, const std::function<const Parts&(int peer)>& parts,
                      const std::function<void(int peer, const std::vector<char*>& places)>& f);
  // A reduction; `everywhere`: the sums also go to where the peers show what goes into them.
  void reduce_into(const PartsOfRanks& out, const Parts& mine, const Parts& to, ReduceOp op,
                   bool everywhere);
  // To all of these, or to none if one of them gave up.
  void say_done(const std::vector<int>& peers);
  // Once all peers are done with this turn: what they wrote into copies is put where it belongs.
  void take_back();

  std::shared_ptr<ShmGroup> group_;
  int rank_, size_;
  Patience patience_;
  char* scratch_ = nullptr;
  bool may_be_read_ = false;          // scratch_, by peers of a collective that failed
  std::vector<Place> peers_scratch_;  // where this rank has looked

  CollectiveTag tag_;
  std::vector<int> partners_;
  TimePoint deadline_;
  bool greeting_due_ = false;
  std::vector<Row> rows_;  // of this turn
  struct Copy {
    Part part;
    const char* data;
  };
  std::vector<Copy> copies_;  // which this turn shows instead of the parts themselves
  Parts writable_;            // by peers of this collective
  uint64_t turn_ = 0;
  Turn turns_[2];            // the latest in each of the two places
  std::vector<Turn> shown_;  // of this collective
};

}  // namespace sherd::dist
