#include "distributed/shm/shm_exchange.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>

#include "distributed/copy_bytes.h"
#include "distributed/tree_sum.h"

namespace sherd::dist {
namespace {

bool same(const Exchange::Parts& a, const Exchange::Parts& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.data == y.data && x.bytes() == y.bytes();
  });
}

// Of sums that go to all ranks: so many bytes are read, summed and written while they lie in the
// first caches.
constexpr int64_t kBlock = 16 << 10;

// Of a rank that gave up. A slice takes a peer some milliseconds, unless it was stopped.
constexpr Milliseconds kPatienceWithWriters{2000};

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
      patience_(group_->patience()),
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
    auto& done = group_->visit(rank_, r).done;
    group_->await(
        patience_, ShmGroup::kCollectives, r, deadline_, [&] { return done.load() >= turn.number; },
        ShmGroup::Losses::kOfPeer);
  }
}

bool ShmExchange::post(const PartsOfRanks& out, const std::function<int64_t(int)>& expected,
                       const Parts& written, bool writable) {
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
    const Ref<Storage> room = group_->room(copied);
    base = room->data();
    hold(room);
  }
  const Place place = group_->find(base, copied);
  int64_t at = aligned(table_bytes);
  copies_.clear();
  for (size_t i = 0; i < entries.size(); ++i) {
    if (entries[i].place.block >= 0) {
      if (writable) writable_.push_back(*parts[i]);
      continue;
    }
    if (entries[i].bytes) std::memcpy(base + at, parts[i]->data, entries[i].bytes);
    copies_.push_back({*parts[i], base + at});
    if (writable) writable_.push_back({base + at, parts[i]->numel, parts[i]->dtype});
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

std::vector<char*> ShmExchange::await_parts(int p, bool greeting, const Parts& parts) {
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
  std::vector<char*> places;
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

void ShmExchange::say_done(const std::vector<int>& peers) {
  for (int p : peers)
    if (group_->gave_up(p)) throw ConnectionLost("a peer gave up while it was read");
  for (int p : peers) {
    group_->visit(p, rank_).done.store(turn_);
    group_->tell(p, ShmGroup::kCollectives);
  }
}

void ShmExchange::for_each_shown(bool greeting, const std::function<const Parts&(int)>& parts,
                                 const std::function<void(int, const std::vector<char*>&)>& f) {
  for (int i = 1; i < size_; ++i) {
    const int p = (rank_ + size_ - i) % size_;
    const bool partner = greeting && is_partner(p);
    if (partner || !parts(p).empty()) f(p, await_parts(p, partner, parts(p)));
  }
}

void ShmExchange::take_back() {
  await_readers(turns_[turn_ % 2]);
  for (const Copy& c : copies_)
    if (c.part.numel) std::memcpy(c.part.data, c.data, c.part.bytes());
}

void ShmExchange::transfer(const PartsOfRanks& out, const PartsOfRanks& in) {
  static const Parts none;
  auto from = [&](int p) -> const Parts& { return in.empty() ? none : in[p]; };
  const bool greeting = post(out, [&](int p) { return total_numel(from(p)); }, {});
  const auto reading = group_->reading();
  int64_t all_bytes = 0;
  for (int p = 0; p < size_; ++p) all_bytes += p == rank_ ? 0 : total_bytes(from(p));
  for_each_shown(greeting, from, [&](int p, const std::vector<char*>& places) {
    for (size_t k = 0; k < places.size(); ++k)
      group_->pages().for_each_slice({&places[k], 1}, from(p)[k].bytes(),
                                     [&](int64_t begin, int64_t end) {
                                       copy_bytes(from(p)[k].data + begin, places[k] + begin,
                                                  end - begin, all_bytes >= kStreamBytes);
                                     });
    say_done({p});
  });
}

void ShmExchange::reduce(const PartsOfRanks& out, const Parts& mine, const Parts& to, ReduceOp op) {
  reduce_into(out, mine, to, op, /*everywhere=*/false);
}

void ShmExchange::reduce_into(const PartsOfRanks& out, const Parts& mine, const Parts& to,
                              ReduceOp op, bool everywhere) {
  const bool greeting = post(
      out, [&](int) { return total_numel(to); }, to, /*writable=*/everywhere);
  const auto reading = group_->reading();
  std::vector<std::vector<char*>> places(size_);
  std::vector<int> read;
  for_each_shown(
      greeting, [&](int) -> const Parts& { return to; },
      [&](int p, std::vector<char*> shown) {
        places[p] = std::move(shown);
        read.push_back(p);
      });
  std::vector<const char*> inputs(size_);
  std::vector<char*> peers;
  for (size_t k = 0; k < to.size(); ++k) {
    if (to[k].numel == 0) continue;
    peers.clear();
    for (int p : read) peers.push_back(places[p][k]);
    const auto sum = [&](int64_t begin, int64_t end) {
      for (int p = 0; p < size_; ++p)
        inputs[p] = (p == rank_ ? mine[k].data : places[p][k]) + begin;
      tree_reduce(op, to[k].dtype, inputs, to[k].data + begin,
                  (end - begin) / size_of(to[k].dtype));
    };
    group_->pages().for_each_slice(peers, to[k].bytes(), [&](int64_t begin, int64_t end) {
      if (!everywhere) return sum(begin, end);
      std::deque<ShmGroup::Writing> writing;
      for (int p : read) writing.emplace_back(*group_, p);
      for (int64_t at = begin; at < end; at += kBlock) {
        const int64_t n = std::min(kBlock, end - at);
        sum(at, at + n);
        for (char* peer : peers) std::memcpy(peer + at, to[k].data + at, n);
      }
    });
  }
  say_done(read);
}

void ShmExchange::all_reduce(const Parts& parts, ReduceOp op) {
  PartsOfRanks out(size_);
  if (total_bytes(parts) <= kSumAlone) {
    for (auto& o : out) o = parts;
    reduce(out, parts, parts, op);
    return;
  }
  for (int r = 0; r < size_; ++r) out[r] = cut(parts, r, size_);
  const Parts mine = out[rank_];
  reduce_into(out, mine, mine, op, /*everywhere=*/true);
  take_back();
}

void ShmExchange::broadcast(const Part& part, int root) {
  PartsOfRanks out(size_), in(size_);
  if (part.bytes() < kRootHelps) {
    if (rank_ == root)
      for (auto& o : out) o = {part};
    else
      in[root] = {part};
    transfer(out, in);
    return;
  }
  // Each copies as much as any other: a rank that is not the root all but the last of `size` pieces
  // for itself, and the root that one for each.
  static const Parts none;
  const Parts whole = {part}, last = {part.cut(size_ - 1, size_)};
  const bool is_root = rank_ == root;
  const auto shown = [&](int p) -> const Parts& {
    return is_root ? last : p == root ? whole : none;
  };
  for (int p = 0; p < size_; ++p)
    if (is_root)
      out[p] = whole;
    else if (p == root)
      out[p] = last;
  const bool greeting = post(
      out, [&](int p) { return total_numel(shown(p)); }, {}, /*writable=*/!is_root);
  {
    const auto reading = group_->reading();
    const int64_t at = is_root ? part.bytes() - last[0].bytes() : 0;
    const int64_t bytes = is_root ? last[0].bytes() : part.bytes() - last[0].bytes();
    const bool stream = bytes * (is_root ? size_ - 1 : 1) >= kStreamBytes;
    for_each_shown(greeting, shown, [&](int p, const std::vector<char*>& places) {
      for (char* place : places)
        group_->pages().for_each_slice({&place, 1}, bytes, [&](int64_t begin, int64_t end) {
          if (is_root) {
            const ShmGroup::Writing writing(*group_, p);
            copy_bytes(place + begin, part.data + at + begin, end - begin, stream);
          } else {
            copy_bytes(part.data + begin, place + begin, end - begin, stream);
          }
        });
      say_done({p});
    });
  }
  if (!is_root) take_back();
}

void ShmExchange::end() {
  for (const Turn& turn : shown_) await_readers(turn);
  shown_.clear();
  writable_.clear();
  Exchange::drop();
}

void ShmExchange::drop() {
  for (const Turn& turn : shown_)
    for (int r : turn.readers)
      may_be_read_ = may_be_read_ || group_->visit(rank_, r).done.load() < turn.number;
  shown_.clear();
  for (Turn& turn : turns_) turn.readers.clear();
  if (!writable_.empty() && !group_->await_writers(kPatienceWithWriters))
    for (const Part& part : writable_) group_->detach(part.data, part.bytes());
  writable_.clear();
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
        say_done({p});
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
