#include "core/cpu/segments.h"

#include <errno.h>
#include <sanitizer/asan_interface.h>
#include <sys/mman.h>

#include <algorithm>

namespace sherd::cpu {
namespace {

constexpr int64_t kUnit = 4096;
// The least segment: tensors of less do not get a call to the system each.
constexpr int64_t kLeastSegment = int64_t(2) << 20;
// Segments up to here serve everything. A few small tensors, here and there in a larger one, would
// make a place that large tensors come back to at each step unfit for them.
constexpr int64_t kForAll = int64_t(16) << 20;
constexpr int64_t kLeastShare = 8;
// Beside twice what is used: small programs never give anything back.
constexpr int64_t kSlack = int64_t(64) << 20;

int64_t round_up(int64_t bytes) { return (bytes + kUnit - 1) / kUnit * kUnit; }

}  // namespace

Segments::~Segments() {
  pieces_.clear();
  free_.clear();
  for (auto& [data, s] : segments_) pieces_.emplace(data, Piece{s.bytes, &s, {}});
  release_free();
}

char* Segments::take(int64_t bytes) {
  const int64_t least = round_up(bytes);
  auto fit = find(least, false);
  if (fit == free_.end()) {
    if ((reserved_ + least - kSlack) / 2 > std::max(most_used_, used_ + least)) release_free();
    fit = add_segment(std::max(least, kLeastSegment));
  }
  if (fit == free_.end()) {
    release_free();
    fit = add_segment(least);
  }
  if (fit == free_.end()) fit = find(least, true);
  if (fit == free_.end()) return nullptr;

  const auto [size, data] = *fit;
  const auto piece = pieces_.find(data);
  if (const int64_t rest = size - least; rest > 0) {
    FreePieces made{{rest, data + least}};  // before anything is changed: this may throw
    pieces_.emplace_hint(std::next(piece), data + least, Piece{rest, piece->second.segment, {}});
    free_.merge(made);
    piece->second.bytes = least;
  }
  piece->second.node = free_.extract(fit);
  used_ += least;
  most_used_ = std::max(most_used_, used_);
  ASAN_UNPOISON_MEMORY_REGION(data, size_t(bytes));
  return data;
}

void Segments::put(char* data) {
  auto piece = pieces_.find(data);
  Piece& p = piece->second;
  ASAN_POISON_MEMORY_REGION(data, size_t(p.bytes));
  used_ -= p.bytes;
  p.node.value() = {p.bytes, data};
  free_.insert(std::move(p.node));
  absorb(piece, std::next(piece));
  if (piece != pieces_.begin()) {
    const auto before = std::prev(piece);
    if (before->second.is_free() && before->second.segment == p.segment) {
      absorb(before, piece);
      piece = before;
    }
  }
  if (piece->second.is_whole() && piece->second.segment->source != source_) give_back(piece);
}

void Segments::release_free() {
  for (auto it = pieces_.begin(); it != pieces_.end();) {
    const auto piece = it++;
    if (piece->second.is_free() && piece->second.is_whole()) give_back(piece);
  }
}

void Segments::set_source(std::shared_ptr<BlockSource> source) {
  release_free();
  source_ = std::move(source);
}

// The smallest free piece of a segment of the source that may serve; `any_segment`: whatever part
// of it that is.
Segments::FreePieces::iterator Segments::find(int64_t bytes, bool any_segment) {
  return std::find_if(free_.lower_bound({bytes, nullptr}), free_.end(), [&](const auto& f) {
    const Segment& s = *pieces_.at(f.second).segment;
    return s.source == source_ &&
           (any_segment || s.bytes <= kForAll || bytes >= s.bytes / kLeastShare);
  });
}

Segments::FreePieces::iterator Segments::add_segment(int64_t bytes) {
  // Before memory is taken, for this may throw.
  std::map<char*, Segment> segment;
  segment.emplace(nullptr, Segment{nullptr, bytes, source_});
  Pieces piece;
  piece.emplace(nullptr, Piece{bytes, nullptr, {}});
  FreePieces free{{bytes, nullptr}};

  ++system_calls_;
  char* data;
  if (source_) {
    data = source_->take(bytes);
  } else {
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    data = p == MAP_FAILED ? nullptr : static_cast<char*>(p);
  }
  if (!data) {
    const int reason = errno;
    segment.clear(), piece.clear(), free.clear();  // which may change it
    errno = reason;
    return free_.end();
  }
  reserved_ += bytes;
  ASAN_POISON_MEMORY_REGION(data, size_t(bytes));
  auto segment_node = segment.extract(segment.begin());
  segment_node.key() = segment_node.mapped().data = data;
  auto piece_node = piece.extract(piece.begin());
  piece_node.key() = data;
  piece_node.mapped().segment = &segments_.insert(std::move(segment_node)).position->second;
  pieces_.insert(std::move(piece_node));
  auto free_node = free.extract(free.begin());
  free_node.value().second = data;
  return free_.insert(std::move(free_node)).position;
}

// `piece`, which is free, and `next` become one, if that is free too and of the same segment.
void Segments::absorb(Pieces::iterator piece, Pieces::iterator next) {
  if (next == pieces_.end() || !next->second.is_free() ||
      next->second.segment != piece->second.segment)
    return;
  auto node = free_.extract({piece->second.bytes, piece->first});
  free_.erase({next->second.bytes, next->first});
  piece->second.bytes += next->second.bytes;
  pieces_.erase(next);
  node.value().first = piece->second.bytes;
  free_.insert(std::move(node));
}

void Segments::give_back(Pieces::iterator whole) {
  const auto it = segments_.find(whole->first);
  const auto& [data, bytes, source] = it->second;
  ++system_calls_;
  reserved_ -= bytes;
  ASAN_UNPOISON_MEMORY_REGION(data, size_t(bytes));
  if (source)
    source->give_back(data, bytes);
  else
    munmap(data, bytes);
  free_.erase({bytes, data});
  pieces_.erase(whole);
  segments_.erase(it);
}

}  // namespace sherd::cpu
