#include "distributed/shm/shm_mesh.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <list>

#include "core/storage.h"
#include "distributed/copy_bytes.h"
#include "distributed/shm/shm_exchange.h"
#include "distributed/shm/shm_group.h"

namespace sherd::dist {
namespace {

using Letter = ShmGroup::Letter;
using Lane = ShmGroup::Lane;

class ShmBuffer;

class ShmMesh : public Mesh {
 public:
  explicit ShmMesh(std::shared_ptr<ShmGroup> group)
      : group_(std::move(group)), peers_(group_->size()), patience_(group_->patience()) {}

  std::unique_ptr<Buffer> buffer(void* data, int64_t bytes) override;
  std::vector<int> lost_peers() override {
    std::vector<int> list;
    for (int p = 0; p < group_->size(); ++p)
      if (group_->is_lost(p)) list.push_back(p);
    return list;
  }
  void close() override { group_->close(); }

  ShmGroup& group() { return *group_; }
  void send(ShmBuffer& buffer, int peer, uint64_t channel, const char* data, int64_t bytes);
  void recv(ShmBuffer& buffer, int peer, uint64_t channel, char* data, int64_t bytes);
  void forget(ShmBuffer& buffer);
  // Moves letters on as far as they go.
  void progress();
  // Sleeps until there is something to move on, or `ready()`, or a peer was lost.
  template <class F>
  void await_news(TimePoint deadline, const F& ready) {
    group_->await(patience_, ShmGroup::kMail, -1, deadline, [&] { return ready() || has_news(); });
  }

 private:
  struct Outgoing {
    Letter letter;
    ShmBuffer* buffer;  // told when it is done; null: nobody
    Ref<Storage> copy;
  };
  struct Receive {
    ShmBuffer* buffer;
    int peer;  // -1: any
    uint64_t channel;
    char* data;
    int64_t bytes;
  };
  struct Peer {
    uint64_t next_id = 0;
    std::deque<Outgoing> unsent;  // the lane is full
    std::list<Outgoing> sent;     // not yet taken
    std::list<Letter> arrived;    // no receive was posted yet
    bool known_as_lost = false;
  };

  bool has_news();
  bool has_room(int peer) {
    const Lane& lane = group_->lane(group_->rank(), peer);
    return lane.sent.load() - lane.taken.load() < Lane::kLetters;
  }
  void flush(int peer);
  void arrive(int peer, const Letter& letter);
  void take(const Receive& receive, int peer, const Letter& letter);

  std::shared_ptr<ShmGroup> group_;
  std::vector<Peer> peers_;
  std::list<Receive> receives_;
  Patience patience_;
};

class ShmBuffer : public Mesh::Buffer {
 public:
  ShmBuffer(ShmMesh& mesh, char* data) : mesh_(mesh), data_(data) {}
  ~ShmBuffer() override { mesh_.forget(*this); }

  void send(int peer, uint64_t channel, int64_t offset, int64_t bytes) override {
    sending_.push_back(peer);
    mesh_.send(*this, peer, channel, data_ + offset, bytes);
  }
  void recv(int peer, uint64_t channel, int64_t offset, int64_t bytes) override {
    receiving_.push_back(peer);
    mesh_.recv(*this, peer, channel, data_ + offset, bytes);
  }
  void recv_any(uint64_t channel, int64_t offset, int64_t bytes) override {
    mesh_.recv(*this, -1, channel, data_ + offset, bytes);
  }
  void wait_send(TimePoint deadline) override {
    await(deadline, sending_, [&] { return sent_ > 0; });
    --sent_;
  }
  int wait_recv(TimePoint deadline) override {
    await(deadline, receiving_, [&] { return !received_.empty() || woken_.load(); });
    if (received_.empty()) {
      woken_ = false;
      return -1;
    }
    const int peer = received_.front();
    received_.pop_front();
    return peer;
  }
  void wake() override {
    woken_ = true;
    mesh_.group().wake(ShmGroup::kMail);
  }

  // ---- the mesh's
  void sent_to(int peer) {
    ++sent_;
    drop_one(sending_, peer);
  }
  void received_from(int peer) {
    received_.push_back(peer);
    drop_one(receiving_, peer);
  }

 private:
  static void drop_one(std::vector<int>& peers, int peer) {
    if (const auto it = std::find(peers.begin(), peers.end(), peer); it != peers.end())
      peers.erase(it);
  }
  template <class F>
  void await(TimePoint deadline, const std::vector<int>& peers, const F& ready) {
    for (;;) {
      mesh_.progress();
      if (ready()) return;
      for (int p : peers)
        if (mesh_.group().is_gone(p)) throw ConnectionLost(concat("rank ", p, " is gone"));
      mesh_.await_news(deadline, ready);
    }
  }

  ShmMesh& mesh_;
  char* data_;
  std::vector<int> sending_, receiving_;  // peers of what is pending
  int sent_ = 0;
  std::deque<int> received_;
  std::atomic<bool> woken_ = false;
};

std::unique_ptr<Mesh::Buffer> ShmMesh::buffer(void* data, int64_t) {
  return std::make_unique<ShmBuffer>(*this, static_cast<char*>(data));
}

void ShmMesh::send(ShmBuffer& buffer, int peer, uint64_t channel, const char* data, int64_t bytes) {
  if (group_->is_gone(peer)) throw ConnectionLost(concat("rank ", peer, " is gone"));
  Outgoing o{{}, &buffer, nullptr};
  o.letter.kind = Letter::kMessage;
  o.letter.channel = channel;
  o.letter.id = ++peers_[peer].next_id;
  o.letter.bytes = bytes;
  o.letter.place = {};
  if (bytes <= int64_t(sizeof o.letter.inside)) {
    if (bytes) std::memcpy(o.letter.inside, data, bytes);
  } else {
    o.letter.place = group_->find(data, bytes);
    if (o.letter.place.block < 0) {
      o.copy = group_->room(bytes);
      std::memcpy(o.copy->data(), data, bytes);
      o.letter.place = group_->find(o.copy->data(), bytes);
    }
  }
  peers_[peer].unsent.push_back(std::move(o));
  flush(peer);
}

void ShmMesh::flush(int peer) {
  Peer& p = peers_[peer];
  Lane& lane = group_->lane(group_->rank(), peer);
  bool any = false;
  while (!p.unsent.empty() && has_room(peer)) {
    Outgoing& o = p.unsent.front();
    lane.letters[lane.sent.load() % Lane::kLetters] = o.letter;
    lane.sent.store(lane.sent.load() + 1);
    any = true;
    if (o.letter.kind == Letter::kMessage && o.letter.place.block >= 0)
      p.sent.push_back(std::move(o));
    else if (o.buffer)
      o.buffer->sent_to(peer);
    p.unsent.pop_front();
  }
  if (any) group_->tell(peer, ShmGroup::kMail);
}

void ShmMesh::recv(ShmBuffer& buffer, int peer, uint64_t channel, char* data, int64_t bytes) {
  const Receive receive{&buffer, peer, channel, data, bytes};
  for (int p = 0; p < group_->size(); ++p) {
    if (peer >= 0 && p != peer) continue;
    auto& arrived = peers_[p].arrived;
    const auto it = std::find_if(arrived.begin(), arrived.end(),
                                 [&](const Letter& l) { return l.channel == channel; });
    if (it == arrived.end()) continue;
    const Letter letter = *it;
    arrived.erase(it);
    take(receive, p, letter);
    return;
  }
  receives_.push_back(receive);
}

void ShmMesh::arrive(int peer, const Letter& letter) {
  if (letter.kind == Letter::kTaken) {
    auto& sent = peers_[peer].sent;
    const auto it = std::find_if(sent.begin(), sent.end(),
                                 [&](const Outgoing& o) { return o.letter.id == letter.id; });
    if (it == sent.end()) return;
    if (it->buffer) it->buffer->sent_to(peer);
    sent.erase(it);
    return;
  }
  const auto it = std::find_if(receives_.begin(), receives_.end(), [&](const Receive& r) {
    return (r.peer < 0 || r.peer == peer) && r.channel == letter.channel;
  });
  if (it == receives_.end()) {
    peers_[peer].arrived.push_back(letter);
    return;
  }
  const Receive receive = *it;
  receives_.erase(it);
  take(receive, peer, letter);
}

void ShmMesh::take(const Receive& receive, int peer, const Letter& letter) {
  if (letter.bytes > receive.bytes)
    fail("a message of ", letter.bytes, " bytes came where ", receive.bytes, " are expected");
  if (letter.place.block < 0) {
    if (letter.bytes > int64_t(sizeof letter.inside))
      fail("a message of ", letter.bytes, " bytes does not say where they are");
    if (letter.bytes) std::memcpy(receive.data, letter.inside, letter.bytes);
  } else {
    group_->trim();
    {
      const auto reading = group_->reading();
      const char* data = group_->at(peer, letter.place, letter.bytes);
      group_->pages().for_each_slice({&data, 1}, letter.bytes, [&](int64_t begin, int64_t end) {
        copy_bytes(receive.data + begin, data + begin, end - begin, letter.bytes >= kStreamBytes);
      });
    }
    if (group_->gave_up(peer)) throw ConnectionLost("a peer gave up while it was read");
    Outgoing taken{{}, nullptr, nullptr};
    taken.letter.kind = Letter::kTaken;
    taken.letter.id = letter.id;
    peers_[peer].unsent.push_back(std::move(taken));
    flush(peer);
  }
  receive.buffer->received_from(peer);
}

void ShmMesh::progress() {
  for (int p = 0; p < group_->size(); ++p) {
    if (p == group_->rank()) continue;
    if (!peers_[p].known_as_lost) peers_[p].known_as_lost = group_->is_lost(p);
    flush(p);
    Lane& lane = group_->lane(p, group_->rank());
    bool any = false;
    while (lane.taken.load() < lane.sent.load()) {
      const Letter letter = lane.letters[lane.taken.load() % Lane::kLetters];
      lane.taken.store(lane.taken.load() + 1);
      any = true;
      arrive(p, letter);
    }
    if (any) group_->tell(p, ShmGroup::kMail);
  }
}

bool ShmMesh::has_news() {
  for (int p = 0; p < group_->size(); ++p) {
    if (p == group_->rank()) continue;
    const Lane& lane = group_->lane(p, group_->rank());
    if (lane.taken.load() < lane.sent.load()) return true;
    if (!peers_[p].unsent.empty() && has_room(p)) return true;
    if (!peers_[p].known_as_lost && group_->is_lost(p)) return true;
  }
  return false;
}

void ShmMesh::forget(ShmBuffer& buffer) {
  std::erase_if(receives_, [&](const Receive& r) { return r.buffer == &buffer; });
  for (Peer& p : peers_) {
    for (Outgoing& o : p.unsent)
      if (o.buffer == &buffer) o.buffer = nullptr;
    for (Outgoing& o : p.sent)
      if (o.buffer == &buffer) o.buffer = nullptr;
  }
}

}  // namespace

ShmTransport connect_shm(std::shared_ptr<Node> node, int rank, std::vector<int> ranks, Store& store,
                         Milliseconds timeout) {
  auto group = std::make_shared<ShmGroup>(std::move(node), rank, std::move(ranks), store, timeout);
  return {std::make_unique<ShmMesh>(group), std::make_unique<ShmExchange>(group)};
}

}  // namespace sherd::dist
