// ShmGroup: what the ranks of one group share on a host: a control block a rank, in that rank's
// arena, which the others map. shm_exchange.h (collectives) and shm_mesh.h (send and recv) work on
// it; this file says who writes what, and how a rank waits for another.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "core/storage.h"
#include "distributed/collective_tag.h"
#include "distributed/mesh.h"
#include "distributed/shm/bell.h"
#include "distributed/shm/node.h"

namespace sherd::dist {

inline int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }  // to cache lines

class ShmGroup : public Node::Listener {
 public:
  // What a rank shows of one phase of a collective. See [Note: phases] in shm_exchange.h.
  struct Post {
    std::atomic<uint64_t> turn;  // of the phase; written last
    CollectiveTag tag;
    Place table;
    int64_t table_bytes;
  };

  // What a peer does with what this rank shows; written by the peer.
  struct Visit {
    std::atomic<uint64_t> done;        // with turns up to this one
    std::atomic<uint64_t> is_writing;  // at this moment
  };

  struct Letter {  // from one rank to another
    enum Kind : int64_t { kMessage, kTaken } kind;
    uint64_t channel, id;  // of a message; kTaken: the message of that id was received
    int64_t bytes;
    Place place;       // where they lie in the sender's arena, unless they are
    char inside[256];  // few enough to lie here
  };
  struct Lane {  // letters to one peer; a ring
    static constexpr uint64_t kLetters = 16;
    alignas(64) std::atomic<uint64_t> sent;   // so many, by the owner
    alignas(64) std::atomic<uint64_t> taken;  // so many, by the peer
    Letter letters[kLetters];
  };

  enum Purpose { kCollectives, kMail };  // each has a thread that waits, and so a bell
  struct Control {
    std::atomic<uint32_t> closed;  // by the owner
    std::atomic<uint32_t> alarms;  // by whoever closed, and of who died: look who it was
    Place scratch;                 // of the exchange, before its first post
    Bell bells[2];
    Post posts[2];  // of odd and even turns
  };

  // A collective of the group's ranks, all of which are in the node. `ranks`: of the job, by group
  // rank. `store`: of this group alone.
  ShmGroup(std::shared_ptr<Node> node, int rank, std::vector<int> ranks, Store& store,
           Milliseconds timeout);
  ~ShmGroup() override;

  int rank() const { return rank_; }
  int size() const { return int(ranks_.size()); }

  Control& control(int rank) { return *reinterpret_cast<Control*>(blocks_[rank]); }
  Visit& visit(int owner, int visitor);
  Lane& lane(int from, int to);

  // While it lives, this rank writes into what `owner` shows. ConnectionLost: that one gave up, and
  // may use its memory for something else.
  class Writing {
   public:
    Writing(ShmGroup& group, int owner);
    ~Writing() { is_writing_.store(0); }
    Writing(const Writing&) = delete;
    Writing& operator=(const Writing&) = delete;

   private:
    std::atomic<uint64_t>& is_writing_;
  };
  // After close(): waits until nobody writes into what this rank shows. False: a peer still does,
  // one that was stopped in the middle of it.
  bool await_writers(Milliseconds timeout);

  // Bytes of this rank's that a peer can be told of, and a peer's.
  Place find(const char* data, int64_t bytes) const { return node_->arena().find(data, bytes); }
  // See Node.
  char* at(int peer, const Place& place, int64_t bytes) {
    return node_->at(ranks_[peer], place, bytes);
  }
  PeerPages& pages() { return node_->pages(); }
  std::shared_lock<std::shared_mutex> reading() { return node_->reading(); }
  void trim() { node_->trim(); }
  // Bytes to copy something to that find() knows.
  Ref<Storage> room(int64_t bytes);
  // Whole pages of the arena, zero, for this group alone. What is not given back lives on in the
  // arena, for peers that may still look.
  char* take(int64_t bytes);
  void give_back(char* data, int64_t bytes) { node_->arena().give_back(data, bytes); }
  // See Arena.
  void detach(char* data, int64_t bytes) { node_->arena().detach(data, bytes); }
  // Unmaps a peer's block that only this group reads.
  void forget(int peer, const Place& place) { node_->forget(ranks_[peer], place); }

  // Whose end ends a wait. While data are missing: that of any rank that died or gave up, for the
  // peer may wait for it in turn. Once they are there: the peer's alone, for who has all may leave.
  enum class Losses : uint8_t { kAny, kOfPeer };
  // For a thread that waits in this group.
  Patience patience() const;
  // Returns once `ready()`. ConnectionLost if it can't come any more (peer -1: this group was
  // closed), DeadlinePassed.
  template <class F>
  void await(Patience& patience, Purpose purpose, int peer, TimePoint deadline, const F& ready,
             Losses losses = Losses::kAny) {
    const bool in_time = patience.wait(control(rank_).bells[purpose], peer, deadline, [&] {
      if (ready()) return true;
      if (peer < 0) return closed_.load();
      return is_gone(peer) || (losses == Losses::kAny && is_broken());
    });
    if (ready()) return;
    in_time ? throw_lost(peer) : throw_late();
  }
  void tell(int peer, Purpose purpose) { ring(control(peer).bells[purpose], rank_); }
  void wake(Purpose purpose) { ring_all(control(rank_).bells[purpose]); }

  bool is_gone(int peer) { return closed_ || is_lost(peer); }
  bool is_lost(int peer);
  // Is any rank lost that did not take its leave?
  bool is_broken();
  bool has_left(int peer);  // destroy_process_group: the tag of one of its posts
  void close();
  // Did the peer give up? It may have reused what it had shown since: what was read of it last is
  // worth nothing. (Of a peer that was killed all stays as it was.)
  bool gave_up(int peer) { return control(peer).closed.load() != 0; }
  // All peers have ended in good order: nobody reads this rank's control block again.
  void forget_control() { forgotten_ = true; }

  void on_lost(int rank) override;

 private:
  void forget_controls();
  void alarm(int peer);  // wakes it, so that it looks who is lost
  [[noreturn]] void throw_lost(int peer);
  [[noreturn]] void throw_late();
  int64_t lanes_at() const;

  std::shared_ptr<Node> node_;
  int rank_;
  std::vector<int> ranks_;
  std::vector<char*> blocks_;  // by group rank
  std::vector<Place> places_;  // of them, in their owners' arenas
  int64_t block_bytes_ = 0;
  std::atomic<bool> closed_ = false;
  bool forgotten_ = false;
};

}  // namespace sherd::dist
