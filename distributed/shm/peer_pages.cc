#include "distributed/shm/peer_pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <vector>

#include "distributed/shm/arena.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22  // since Linux 5.14, and in headers later
#endif

namespace sherd::dist {
namespace {

// Of each peer, and for each thread that is in its memory, so much is mapped beyond what stays.
constexpr int64_t kSlice = int64_t(4) << 20;
constexpr int64_t kStale = 8;  // so many times most_kept_ was read since

}  // namespace

// With the rest of its first and last page. A kernel before 5.14 knows no MADV_POPULATE_READ: there
// each page enters when it is touched.
void PeerPages::advise(const Run& run, int advice) {
  const auto begin = run.begin / uintptr_t(page_bytes()) * uintptr_t(page_bytes());
  madvise(reinterpret_cast<void*>(begin), run.end - begin, advice);
}

void PeerPages::for_each_slice(std::span<const char* const> peers, int64_t bytes,
                               const std::function<void(int64_t, int64_t)>& f) {
  for (int64_t begin = 0; begin < bytes; begin += kSlice) {
    const int64_t end = std::min(bytes, begin + kSlice);
    struct Passing {  // goes also where f throws
      std::vector<Run> runs;
      ~Passing() {
        for (const Run& run : runs) advise(run, MADV_DONTNEED);
      }
    } passing;
    for (const char* data : peers) enter(data, begin, end, bytes, passing.runs);
    f(begin, end);
  }
}

void PeerPages::enter(const char* data, int64_t begin, int64_t end, int64_t bytes,
                      std::vector<Run>& passing) {
  const auto first = uintptr_t(data + begin), last = uintptr_t(data + end);
  std::vector<Run> missing;
  const auto add = [](std::vector<Run>& runs, const Run& run) {
    if (!runs.empty() && runs.back().end == run.begin)
      runs.back().end = run.end;
    else
      runs.push_back(run);
  };
  {
    std::lock_guard lock(mutex_);
    clock_ += end - begin;
    auto block = blocks_.upper_bound(first);
    if (block == blocks_.begin()) return;
    --block;
    for (uintptr_t at = first; at < std::min(last, block->second);) {
      const uintptr_t from = block->first + (at - block->first) / kChunk * kChunk;
      const Run chunk{from, std::min(from + kChunk, block->second)};
      at = chunk.end;
      const auto known = kept_.find(chunk.begin);
      if (known != kept_.end()) {
        known->second.last_used = clock_;
      } else if (keep(chunk)) {  // with what later slices read of it
        add(missing,
            {std::max(chunk.begin, uintptr_t(data)), std::min(chunk.end, uintptr_t(data + bytes))});
      } else {
        add(missing, {std::max(chunk.begin, first), std::min(chunk.end, last)});
        add(passing, chunk);  // whole: the kernel maps some pages around those it is asked for
      }
    }
  }
  for (const Run& run : missing) advise(run, MADV_POPULATE_READ);
}

bool PeerPages::keep(const Run& chunk) {
  const auto bytes = int64_t(chunk.end - chunk.begin);
  while (kept_bytes_ + bytes > most_kept_) {
    const auto oldest = std::min_element(
        kept_.begin(), kept_.end(),
        [](const auto& a, const auto& b) { return a.second.last_used < b.second.last_used; });
    if (oldest == kept_.end() || clock_ - oldest->second.last_used <= kStale * most_kept_)
      return false;
    advise({oldest->first, oldest->second.end}, MADV_DONTNEED);
    kept_bytes_ -= int64_t(oldest->second.end - oldest->first);
    kept_.erase(oldest);
  }
  kept_.emplace(chunk.begin, Kept{chunk.end, clock_});
  kept_bytes_ += bytes;
  return true;
}

void PeerPages::add(const char* block, int64_t bytes) {
  std::lock_guard lock(mutex_);
  blocks_[uintptr_t(block)] = uintptr_t(block + bytes);
}

void PeerPages::remove(const char* block) {
  std::lock_guard lock(mutex_);
  const auto it = blocks_.find(uintptr_t(block));
  if (it == blocks_.end()) return;
  const auto first = kept_.lower_bound(it->first), last = kept_.lower_bound(it->second);
  for (auto k = first; k != last; ++k) kept_bytes_ -= int64_t(k->second.end - k->first);
  kept_.erase(first, last);
  blocks_.erase(it);
}

int64_t PeerPages::kept() const {
  std::lock_guard lock(mutex_);
  return kept_bytes_;
}

}  // namespace sherd::dist
