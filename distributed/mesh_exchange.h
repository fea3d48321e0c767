// MeshExchange: an Exchange by messages over a Mesh.
//
// [Note: exchange] All ranks exchange directly: each sends rank p what p needs and receives what it
// needs itself, which for gathers and scattered reductions is as few bytes as any way can do. Few
// bytes travel along with the greeting's tag; no other receive is posted before the peer's tag was
// compared. Gathered data go straight to their place. Data to be reduced arrive in chunks, in two
// halves of a scratch of at most 1 MiB: while one half is summed, the other is received. Sizes of
// chunks follow from the sizes of parts and the number of ranks, so sender and receiver cut alike.
#pragma once
#include <functional>
#include <memory>

#include "distributed/exchange.h"

namespace sherd::dist {

class MeshExchange : public Exchange {
 public:
  static constexpr int64_t kEagerBytes = 16 << 10;  // as much travels with the tag
  static constexpr int64_t kScratchBytes = int64_t(1) << 20;
  // What a group of that size takes to work in, at most: it never grows with the tensors.
  static int64_t room(int size) {
    return kScratchBytes + (size - 1) * 3 * (kEagerBytes + int64_t(sizeof(CollectiveTag)) + 64);
  }

  // `mesh` may be null for a size of 1. averaged_over: see tree_sum.h.
  MeshExchange(Mesh* mesh, int rank, int size, int averaged_over = 0);
  ~MeshExchange() override;

  void open() override;  // posts the first receives of tags
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
  struct Message;  // a tag and what travels with it
  struct Peer {
    std::unique_ptr<Message> out, in[2];
    int next_in = 0;
    bool greeted = false;  // its next tag has come, and was not used yet
    bool posted[2] = {};   // the receives of in[0] and in[1]
  };

  // Begins a phase: true if it is the greeting, of which the tags say what is sent and expected.
  bool greet(const PartsOfRanks& out, const std::function<int64_t(int)>& expected);
  void send_greeting(int peer, const Parts& parts, int64_t expected);
  void await_greeting(int peer);
  void reopen();  // posts receives for the partners' next tags
  // In messages of at most `chunk` bytes.
  void send_parts(int peer, const Parts& parts, int64_t chunk);
  void reduce_chunks(const Parts& mine, const Parts& to, ReduceOp op);
  int64_t chunk_bytes() const;

  Mesh* mesh_;
  int rank_, size_, averaged_over_;
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
};

}  // namespace sherd::dist
