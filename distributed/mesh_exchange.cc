#include "distributed/mesh_exchange.h"

#include <algorithm>
#include <cstring>

#include "distributed/tree_sum.h"

namespace sherd::dist {
namespace {

constexpr uint64_t kTagChannel = 1, kDataChannel = 2;

// Bytes of a part in a message: the next one is aligned for any dtype.
int64_t padded(const Exchange::Part& p) { return (p.bytes() + 15) / 16 * 16; }

int64_t padded(const Exchange::Parts& parts) {
  int64_t n = 0;
  for (const auto& p : parts) n += padded(p);
  return n;
}

}  // namespace

struct MeshExchange::Message {
  static constexpr int64_t kDataAt = (sizeof(CollectiveTag) + 63) / 64 * 64;
  static constexpr int64_t kCapacity = kDataAt + kEagerBytes;

  explicit Message(Mesh& mesh)
      : storage(make_ref<Storage>(kCapacity, kCPU)),
        buffer(mesh.buffer(storage->data(), kCapacity)) {}
  char* data() const { return storage->data() + kDataAt; }

  Ref<Storage> storage;
  std::unique_ptr<Mesh::Buffer> buffer;
};

MeshExchange::MeshExchange(Mesh* mesh, int rank, int size, int averaged_over)
    : mesh_(mesh), rank_(rank), size_(size), averaged_over_(averaged_over) {}
MeshExchange::~MeshExchange() = default;

void MeshExchange::open() {
  MemoryScope scope(MemoryCategory::kCommunication);
  peers_.resize(size_);
  for (int p = 0; p < size_; ++p) {
    if (p == rank_) continue;
    Peer& peer = peers_[p];
    peer.out = std::make_unique<Message>(*mesh_);
    for (int i : {0, 1}) {
      peer.in[i] = std::make_unique<Message>(*mesh_);
      peer.in[i]->buffer->recv(p, kTagChannel, 0, Message::kCapacity);
      peer.posted[i] = true;
    }
  }
}

void MeshExchange::begin(const CollectiveTag& tag, std::vector<int> partners, TimePoint deadline) {
  tag_ = tag;
  partners_ = std::move(partners);
  deadline_ = deadline;
  greeting_due_ = true;
}

bool MeshExchange::greet(const PartsOfRanks& out, const std::function<int64_t(int)>& expected) {
  if (!std::exchange(greeting_due_, false)) return false;
  static const Parts none;
  for (int p : partners_) send_greeting(p, out.empty() ? none : out[p], expected(p));
  return true;
}

void MeshExchange::send_greeting(int p, const Parts& parts, int64_t expected) {
  Peer& peer = peers_[p];
  CollectiveTag tag = tag_;
  tag.to_peer = total_numel(parts);
  tag.from_peer = expected;
  std::memcpy(peer.out->storage->data(), &tag, sizeof tag);
  char* end = peer.out->data();
  if (padded(parts) <= kEagerBytes) {
    for (const Part& part : parts) {
      if (part.numel) std::memcpy(end, part.data, part.bytes());
      end += padded(part);
    }
  }
  peer.out->buffer->send(p, kTagChannel, 0, end - peer.out->storage->data());
}

void MeshExchange::await_greeting(int p) {
  Peer& peer = peers_[p];
  const Message& in = *peer.in[peer.next_in];
  if (!peer.posted[peer.next_in]) throw ConnectionLost("the peer is gone");
  while (!peer.greeted) peer.greeted = in.buffer->wait_recv(deadline_) >= 0;
  CollectiveTag mine, theirs;
  std::memcpy(&mine, peer.out->storage->data(), sizeof mine);
  std::memcpy(&theirs, in.storage->data(), sizeof theirs);
  if (!difference(mine, theirs).empty()) throw TagMismatch(mine, theirs, p);
}

void MeshExchange::reopen() {
  for (int p : partners_) {
    Peer& peer = peers_[p];
    peer.greeted = peer.posted[peer.next_in] = false;
    try {
      peer.in[peer.next_in]->buffer->recv(p, kTagChannel, 0, Message::kCapacity);
      peer.posted[peer.next_in] = true;
    } catch (const ConnectionLost&) {  // a peer may end after its last collective: this one is well
    }
    peer.next_in ^= 1;
  }
}

void MeshExchange::send_parts(int peer, const Parts& parts, int64_t chunk) {
  for (const Part& part : parts) {
    if (part.numel == 0) continue;
    auto it = std::find_if(sends_.begin(), sends_.end(), [&](const Pending& s) {
      return s.data == part.data && s.bytes == part.bytes();
    });
    if (it == sends_.end())
      it = sends_.insert(it, {mesh_->buffer(part.data, part.bytes()), part.data, part.bytes(), 0});
    for (int64_t at = 0; at < part.bytes(); at += chunk, ++it->count)
      it->buffer->send(peer, kDataChannel, at, std::min(chunk, part.bytes() - at));
  }
}

void MeshExchange::transfer(const PartsOfRanks& out, const PartsOfRanks& in) {
  const bool greeting = greet(out, [&](int p) { return in.empty() ? 0 : total_numel(in[p]); });
  auto eager = [&](const Parts& parts) { return greeting && padded(parts) <= kEagerBytes; };
  for (int i = 1; i < size_ && !out.empty(); ++i) {
    const int p = (rank_ + i) % size_;
    if (!eager(out[p])) send_parts(p, out[p], INT64_MAX);
  }
  if (greeting)
    for (int p : partners_) await_greeting(p);
  for (int i = 1; i < size_ && !in.empty(); ++i) {
    const int p = (rank_ + size_ - i) % size_;
    const char* from = peers_[p].in[peers_[p].next_in]->data();
    for (const Part& part : in[p]) {
      if (part.numel == 0) continue;
      if (eager(in[p])) {
        std::memcpy(part.data, from, part.bytes());
        from += padded(part);
      } else {
        receives_.push_back({mesh_->buffer(part.data, part.bytes()), part.data, part.bytes(), 1});
        receives_.back().buffer->recv(p, kDataChannel, 0, part.bytes());
      }
    }
  }
  if (greeting) reopen();
  for (Pending& r : receives_) r.buffer->wait_recv(deadline_);
  receives_.clear();
}

int64_t MeshExchange::chunk_bytes() const {
  return std::max<int64_t>(64, kScratchBytes / 2 / std::max(1, size_ - 1) / 64 * 64);
}

void MeshExchange::reduce(const PartsOfRanks& out, const Parts& mine, const Parts& to,
                          ReduceOp op) {
  const bool greeting = greet(out, [&](int) { return total_numel(to); });
  auto eager = [&](const Parts& parts) { return greeting && padded(parts) <= kEagerBytes; };
  for (int i = 1; i < size_ && !out.empty(); ++i) {
    const int p = (rank_ + i) % size_;
    if (!eager(out[p])) send_parts(p, out[p], chunk_bytes());
  }
  if (greeting)
    for (int p : partners_) await_greeting(p);
  if (size_ > 1 && !eager(to)) {
    reduce_chunks(mine, to, op);
  } else {
    std::vector<const char*> inputs(size_);
    int64_t at = 0;
    for (size_t i = 0; i < to.size(); at += padded(to[i++])) {
      for (int p = 0; p < size_; ++p)
        inputs[p] = p == rank_ ? mine[i].data : peers_[p].in[peers_[p].next_in]->data() + at;
      tree_reduce(op, to[i].dtype, inputs, to[i].data, to[i].numel, averaged_over_);
    }
  }
  if (greeting) reopen();
}

void MeshExchange::reduce_chunks(const Parts& mine, const Parts& to, ReduceOp op) {
  struct Chunk {
    const Part *mine, *to;
    int64_t at, bytes;
  };
  std::vector<Chunk> chunks;
  const int64_t step = chunk_bytes();
  for (size_t i = 0; i < to.size(); ++i)
    for (int64_t at = 0; at < to[i].bytes(); at += step)
      chunks.push_back({&mine[i], &to[i], at, std::min(step, to[i].bytes() - at)});
  if (chunks.empty()) return;

  int64_t largest = 0;
  for (const Chunk& c : chunks) largest = std::max(largest, c.bytes);
  largest = (largest + 63) / 64 * 64;
  const int64_t half = largest * (size_ - 1);
  auto scratch = make_ref<Storage>(chunks.size() > 1 ? 2 * half : half, kCPU);
  hold(scratch);
  char* const halves[2] = {scratch->data(), scratch->data() + half};
  for (size_t h = 0; h < std::min<size_t>(2, chunks.size()); ++h)
    receives_.push_back({mesh_->buffer(halves[h], half), halves[h], half, 0});

  auto slot = [&](int p) { return (p < rank_ ? p : p - 1) * largest; };
  auto post = [&](size_t k) {
    if (k >= chunks.size()) return;
    for (int i = 1; i < size_; ++i) {
      const int p = (rank_ + size_ - i) % size_;
      receives_[k % 2].buffer->recv(p, kDataChannel, slot(p), chunks[k].bytes);
    }
  };
  post(0);
  post(1);
  std::vector<const char*> inputs(size_);
  for (size_t k = 0; k < chunks.size(); ++k) {
    for (int i = 1; i < size_; ++i) receives_[k % 2].buffer->wait_recv(deadline_);
    const Chunk& c = chunks[k];
    for (int p = 0; p < size_; ++p)
      inputs[p] = p == rank_ ? c.mine->data + c.at : halves[k % 2] + slot(p);
    tree_reduce(op, c.to->dtype, inputs, c.to->data + c.at, c.bytes / size_of(c.to->dtype),
                averaged_over_);
    post(k + 2);
  }
  receives_.clear();
}

void MeshExchange::broadcast(const Part& part, int root) {
  PartsOfRanks out(size_), in(size_);
  // Many bytes to several ranks: the root sends a piece to each, and they pass them on.
  const bool pass_on = size_ > 2 && part.bytes() > (64 << 10);
  if (rank_ == root) {
    for (int r = 0; r < size_; ++r) out[r] = {pass_on ? part.cut(r, size_) : part};
  } else {
    in[root] = {pass_on ? part.cut(rank_, size_) : part};
  }
  transfer(out, in);
  if (!pass_on) return;
  for (int r = 0; r < size_; ++r) {
    out[r] = {}, in[r] = {};
    if (r != root) out[r] = {part.cut(rank_, size_)};
    if (rank_ != root) in[r] = {part.cut(r, size_)};
  }
  transfer(out, in);
}

void MeshExchange::all_reduce(const Parts& parts, ReduceOp op) {
  PartsOfRanks out(size_), in(size_);
  if (total_bytes(parts) <= kEagerBytes) {  // each rank sums all of it
    for (auto& o : out) o = parts;
    reduce(out, parts, parts, op);
    return;
  }
  for (int r = 0; r < size_; ++r) out[r] = cut(parts, r, size_);
  const Parts mine = out[rank_];
  reduce(out, mine, mine, op);
  for (int r = 0; r < size_; ++r) in[r] = std::exchange(out[r], mine);
  transfer(out, in);
}

void MeshExchange::end() {
  for (Pending& s : sends_)
    for (int i = 0; i < s.count; ++i) s.buffer->wait_send(deadline_);
  for (int p : partners_) peers_[p].out->buffer->wait_send(deadline_);
  drop();
}

void MeshExchange::say_goodbye(uint64_t sequence, TimePoint deadline) {
  CollectiveTag tag = make_tag(CollectiveKind::kLeave, {}, true, "");
  tag.sequence = sequence;
  std::vector<int> partners;
  for (int p = 0; p < size_; ++p)
    if (p != rank_) partners.push_back(p);
  begin(tag, std::move(partners), deadline);
  greeting_due_ = false;
  std::erase_if(partners_, [&](int p) {
    try {
      send_greeting(p, {}, 0);
      return false;
    } catch (const std::exception&) {  // it is gone already
      return true;
    }
  });
}

void MeshExchange::await_goodbyes() {
  try {
    for (int p : partners_) {
      try {
        await_greeting(p);
      } catch (const TagMismatch&) {  // it will read our tag, and say there what is wrong
      }
    }
    for (int p : partners_) peers_[p].out->buffer->wait_send(deadline_);
  } catch (const std::exception&) {  // a peer is gone already, or stays: there is no more to do
  }
}

void MeshExchange::drop() {
  sends_.clear();
  receives_.clear();
  Exchange::drop();
}

std::optional<CollectiveTag> MeshExchange::goodbye_of(int p) {
  Peer& peer = peers_[p];
  if (!peer.posted[peer.next_in]) return {};
  const Message& in = *peer.in[peer.next_in];
  CollectiveTag tag;
  try {  // the connection is broken: this has come, or fails
    if (!peer.greeted) peer.greeted = in.buffer->wait_recv(TimePoint::max()) >= 0;
    if (peer.greeted) std::memcpy(&tag, in.storage->data(), sizeof tag);
  } catch (const Error&) {
  }
  if (tag.kind != CollectiveKind::kLeave) return {};
  return tag;
}

}  // namespace sherd::dist
