#include "distributed/shm/shm_exchange.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <mutex>

#include "distributed/copy_bytes.h"
#include "distributed/tree_sum.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22  // since Linux 5.14, and in headers later
#endif

namespace sherd::dist {
namespace {

bool same(const Exchange::Parts& a, const Exchange::Parts& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.data == y.data && x.bytes() == y.bytes();
  });
}

// A peer's bytes in slices, after each of which they leave this rank's page tables: or they would
// count in its resident set as well as in the peer's. All of a slice's pages enter them in one call,
// which is cheaper than a fault for every few; a kernel before 5.14 knows no such call.
void for_each_slice(const std::vector<const char*>& peers, int64_t bytes,
                    const std::function<void(int64_t begin, int64_t end)>& f) {
  constexpr int64_t kSlice = int64_t(4) << 20;
  for (int64_t begin = 0; begin < bytes; begin += kSlice) {
    const int64_t end = std::min(bytes, begin + kSlice);
    const auto advise = [&](int advice) {
      for (const char* data : peers) {
        const auto page = uintptr_t(page_bytes()), from = uintptr_t(data + begin) / page * page;
        madvise(reinterpret_cast<void*>(from), uintptr_t(data + end) - from, advice);
      }
    };
    advise(MADV_POPULATE_READ);
    f(begin, end);
    advise(MADV_DONTNEED);
  }
}

bool overlap(const Exchange::Part& part, const Exchange::Parts& others) {
  return std::any_of(others.begin(), others.end(), [&](const auto& o) {
    return part.data < o.data + o.bytes() && o.data < part.data + part.bytes();
  });
}

}  // namespace

ShmExchange::ShmExchange(std::shared_ptr<ShmGroup> group)
    : group_(std::move(group)),
      rank_(group_->rank()),
      size_(group_->size()),
      peers_scratch_(size_) {}

ShmExchange::~ShmExchange() {
  if (scratch_ && !may_be_read_) group_->give_back(scratch_, kScratchBytes);
  for (int p = 0; p < size_; ++p)
    if (peers_scratch_[p].block >= 0) group_->forget(p, peers_scratch_[p]);
}

void ShmExchange::open() {
  scratch_ = group_->take(kScratchBytes);
  group_->control(rank_).scratch = group_->find(scratch_, kScratchBytes);
}

void ShmExchange::begin(const CollectiveTag& tag, std::vector<int> partners, TimePoint deadline) {
  tag_ = tag;
  partners_ = std::move(partners);
  deadline_ = deadline;
  greeting_due_ = true;
}

bool ShmExchange::is_partner(int peer) const {
  return std::find(partners_.begin(), partners_.end(), peer) != partners_.end();
}

void ShmExchange::await_readers(const Turn& turn) {
  for (int r : turn.readers) {
    auto& done = group_->done(rank_, r);
    group_->await(
        patience_, ShmGroup::kCollectives, r, deadline_, [&] { return done.load() >= turn.number; },
        ShmGroup::Losses::kOfPeer);
  }
}

bool ShmExchange::post(const PartsOfRanks& out, const std::function<int64_t(int)>& expected,
                       const Parts& written) {
  group_->trim();
  const bool greeting = std::exchange(greeting_due_, false);
  Turn& turn = turns_[++turn_ % 2];
  await_readers(turn);
  turn = {turn_, {}};

  // The table, and which parts have to be copied: all, if they are few bytes.
  rows_.assign(size_, {});
  std::vector<Entry> entries;
  std::vector<const Part*> parts;
  int last = -1;
  for (int p = 0; p < size_; ++p) {
    if (p == rank_) continue;
    rows_[p].from_peer = expected(p);
    const bool sends = !out.empty() && !out[p].empty();
    if (sends || (greeting && is_partner(p))) turn.readers.push_back(p);
    if (!sends) continue;
    rows_[p].to_peer = total_numel(out[p]);
    rows_[p].count = int64_t(out[p].size());
    if (last >= 0 && same(out[p], out[last])) {
      rows_[p].first = rows_[last].first;
      continue;
    }
    rows_[p].first = int64_t(entries.size());
    for (const Part& part : out[p]) {
      entries.push_back({{}, part.bytes()});
      parts.push_back(&part);
    }
    last = p;
  }
  const int64_t table_bytes = int64_t(rows_.size() * sizeof(Row) + entries.size() * sizeof(Entry));
  int64_t all = aligned(table_bytes), copied = all;
  for (const Entry& e : entries) all += aligned(e.bytes);
  if (all > kScratchBytes / 2) {
    for (size_t i = 0; i < entries.size(); ++i) {
      if (!overlap(*parts[i], written))
        entries[i].place = group_->find(parts[i]->data, entries[i].bytes);
      if (entries[i].place.block < 0) copied += aligned(entries[i].bytes);
    }
  } else {
    copied = all;
  }

  char* base = scratch_ + (turn_ % 2) * (kScratchBytes / 2);
  if (copied > kScratchBytes / 2) {
    const Ref<Storage> room = make_ref<Storage>(copied, kCPU);
    base = room->data();
    hold(room);
  }
  const Place place = group_->find(base, copied);
  if (place.block < 0) fail("[shm] a tensor for copies does not lie in the arena");
  int64_t at = aligned(table_bytes);
  for (size_t i = 0; i < entries.size(); ++i) {
    if (entries[i].place.block >= 0) continue;
    if (entries[i].bytes) std::memcpy(base + at, parts[i]->data, entries[i].bytes);
    entries[i].place = {place.block, place.block_bytes, place.offset + at};
    at += aligned(entries[i].bytes);
  }
  std::memcpy(base, rows_.data(), rows_.size() * sizeof(Row));
  if (!entries.empty())
    std::memcpy(base + rows_.size() * sizeof(Row), entries.data(), entries.size() * sizeof(Entry));
  shown_.push_back(turn);

  ShmGroup::Post& post = group_->control(rank_).posts[turn_ % 2];
  post.tag = tag_;
  post.table = place;
  post.table_bytes = table_bytes;
  post.turn.store(turn_);
  for (int p : turn.readers) group_->tell(p, ShmGroup::kCollectives);
  return greeting;
}

std::vector<const char*> ShmExchange::await_parts(int p, bool greeting, const Parts& parts) {
  ShmGroup::Post& post = group_->control(p).posts[turn_ % 2];
  group_->await(patience_, ShmGroup::kCollectives, p, deadline_,
                [&] { return post.turn.load() >= turn_; });
  CollectiveTag mine = tag_, theirs = post.tag;
  if (post.turn.load() != turn_ || !difference(mine, theirs).empty())
    throw TagMismatch(mine, theirs, p);
  peers_scratch_[p] = group_->control(p).scratch;
  const char* table = group_->at(p, post.table, post.table_bytes);
  Row row;
  std::memcpy(&row, table + rank_ * sizeof(Row), sizeof row);
  if (greeting) {
    mine.to_peer = rows_[p].to_peer, mine.from_peer = rows_[p].from_peer;
    theirs.to_peer = row.to_peer, theirs.from_peer = row.from_peer;
    if (!difference(mine, theirs).empty()) throw TagMismatch(mine, theirs, p);
  }
  std::vector<const char*> places;
  if (parts.empty()) return places;
  const int64_t entries_at = size_ * int64_t(sizeof(Row));
  const int64_t entries = (post.table_bytes - entries_at) / int64_t(sizeof(Entry));
  if (row.count != int64_t(parts.size()) || row.first < 0 || row.first > entries - row.count)
    fail("rank shows ", row.count, " parts where ", parts.size(), " are expected");
  for (int64_t i = 0; i < row.count; ++i) {
    Entry e;
    std::memcpy(&e, table + entries_at + (row.first + i) * sizeof(Entry), sizeof e);
    if (e.bytes != parts[i].bytes())
      fail("a part has ", e.bytes, " bytes where ", parts[i].bytes(), " are expected");
    places.push_back(e.bytes ? group_->at(p, e.place, e.bytes) : nullptr);
  }
  return places;
}

void ShmExchange::say_done(int peer) {
  if (group_->gave_up(peer)) throw ConnectionLost("a peer gave up while it was read");
  group_->done(peer, rank_).store(turn_);
  group_->tell(peer, ShmGroup::kCollectives);
}

void ShmExchange::transfer(const PartsOfRanks& out, const PartsOfRanks& in) {
  static const Parts none;
  auto from = [&](int p) -> const Parts& { return in.empty() ? none : in[p]; };
  const bool greeting = post(out, [&](int p) { return total_numel(from(p)); }, {});
  const auto reading = group_->reading();
  int64_t all_bytes = 0;
  for (int p = 0; p < size_; ++p)
    for (const Part& part : from(p)) all_bytes += p == rank_ ? 0 : part.bytes();
  for (int i = 1; i < size_; ++i) {
    const int p = (rank_ + size_ - i) % size_;
    const bool partner = greeting && is_partner(p);
    if (!partner && from(p).empty()) continue;
    const auto places = await_parts(p, partner, from(p));
    for (size_t k = 0; k < places.size(); ++k)
      if (places[k])
        for_each_slice({places[k]}, from(p)[k].bytes(), [&](int64_t begin, int64_t end) {
          copy_bytes(from(p)[k].data + begin, places[k] + begin, end - begin,
                     all_bytes >= kStreamBytes);
        });
    say_done(p);
  }
}

void ShmExchange::reduce(const PartsOfRanks& out, const Parts& mine, const Parts& to, ReduceOp op) {
  const bool greeting = post(
      out, [&](int) { return total_numel(to); }, to);
  const auto reading = group_->reading();
  std::vector<std::vector<const char*>> places(size_);
  std::vector<int> read;
  for (int i = 1; i < size_; ++i) {
    const int p = (rank_ + size_ - i) % size_;
    const bool partner = greeting && is_partner(p);
    if (!partner && to.empty()) continue;
    places[p] = await_parts(p, partner, to);
    read.push_back(p);
  }
  std::vector<const char*> inputs(size_), peers;
  for (size_t k = 0; k < to.size(); ++k) {
    if (to[k].numel == 0) continue;
    peers.clear();
    for (int p : read) peers.push_back(places[p][k]);
    for_each_slice(peers, to[k].bytes(), [&](int64_t begin, int64_t end) {
      for (int p = 0; p < size_; ++p)
        inputs[p] = (p == rank_ ? mine[k].data : places[p][k]) + begin;
      tree_reduce(op, to[k].dtype, inputs, to[k].data + begin,
                  (end - begin) / size_of(to[k].dtype));
    });
  }
  for (int p : read) say_done(p);
}

void ShmExchange::broadcast(const Part& part, int root) {
  PartsOfRanks out(size_), in(size_);
  if (rank_ == root)
    for (auto& o : out) o = {part};
  else
    in[root] = {part};
  transfer(out, in);
}

void ShmExchange::all_reduce(const Part& part, ReduceOp op) {
  PartsOfRanks out(size_), in(size_);
  if (part.bytes() <= kSumAlone) {
    for (auto& o : out) o = {part};
    reduce(out, {part}, {part}, op);
    return;
  }
  const Part mine = part.cut(rank_, size_);
  for (int r = 0; r < size_; ++r) out[r] = {part.cut(r, size_)};
  reduce(out, {mine}, {mine}, op);
  for (int r = 0; r < size_; ++r) in[r] = std::exchange(out[r], {mine});
  transfer(out, in);
}

void ShmExchange::end() {
  for (const Turn& turn : shown_) await_readers(turn);
  shown_.clear();
  Exchange::drop();
}

void ShmExchange::drop() {
  for (const Turn& turn : shown_)
    for (int r : turn.readers)
      may_be_read_ = may_be_read_ || group_->done(rank_, r).load() < turn.number;
  shown_.clear();
  for (Turn& turn : turns_) turn.readers.clear();
  Exchange::drop();
}

void ShmExchange::say_goodbye(uint64_t sequence, TimePoint deadline) {
  CollectiveTag tag = make_tag(CollectiveKind::kLeave, {}, true, "");
  tag.sequence = sequence;
  std::vector<int> everyone;
  for (int p = 0; p < size_; ++p)
    if (p != rank_) everyone.push_back(p);
  begin(tag, everyone, deadline);
  try {
    post({}, [](int) { return 0; }, {});
  } catch (const std::exception&) {  // its block is gone: nobody is there to read it
  }
}

void ShmExchange::await_goodbyes() {
  try {
    bool all = true;
    for (int p = 0; p < size_; ++p) {
      if (p == rank_) continue;
      auto& turn = group_->control(p).posts[turn_ % 2].turn;
      try {
        group_->await(patience_, ShmGroup::kCollectives, p, deadline_,
                      [&] { return turn.load() >= turn_; });
        say_done(p);
      } catch (const ConnectionLost&) {
        all = false;
      }
    }
    if (!all) return;
    await_readers(turns_[turn_ % 2]);
    group_->forget_control();
  } catch (const std::exception&) {  // a peer is gone already, or stays: there is no more to do
  }
}

std::optional<CollectiveTag> ShmExchange::goodbye_of(int peer) {
  for (const ShmGroup::Post& post : group_->control(peer).posts)
    if (post.turn.load() > 0 && post.tag.kind == CollectiveKind::kLeave) return post.tag;
  return {};
}

}  // namespace sherd::dist
