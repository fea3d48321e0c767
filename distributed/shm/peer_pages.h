// PeerPages: which pages of the peers' memory stay in this rank's page tables.
//
//     PeerPages pages(PeerPages::kMostKept);
//     pages.add(block, block_bytes);                          // a peer's block was mapped
//     pages.for_each_slice({&theirs, 1}, bytes, [&](int64_t begin, int64_t end) {
//       copy(mine + begin, theirs + begin, end - begin);      // theirs lies in a block
//     });
//
// What is there counts in this rank's resident set as well as in the peer's, although it is in
// memory once. To enter pages there and to take them out, however, takes calls to the system, and
// where a block has no huge pages it costs more than copying what is in them. So a bounded number
// of bytes stays, enough for calls of up to some megabytes: what came first, as long as it is used.
// Data that come round again, a step's gradients, find as much of themselves as there is room for;
// had the latest stayed, all would have been driven out before it came round.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <span>
#include <vector>

namespace sherd::dist {

class PeerPages {
 public:
  static constexpr int64_t kMostKept = int64_t(8) << 20;  // bytes
  static constexpr int64_t kChunk = int64_t(2) << 20;     // stays or goes as one

  explicit PeerPages(int64_t most_kept) : most_kept_(most_kept) {}

  // A peer's block was mapped here; it is about to be unmapped.
  void add(const char* block, int64_t bytes);
  void remove(const char* block);

  // Calls f(begin, end) for slices of [0, bytes). Meanwhile [begin, end) of each of `peers`, which
  // lie in blocks, is in the page tables, as far as the system does that ahead; the rest enters
  // them when it is touched.
  void for_each_slice(std::span<const char* const> peers, int64_t bytes,
                      const std::function<void(int64_t begin, int64_t end)>& f);
  int64_t kept() const;  // bytes

 private:
  struct Run {
    uintptr_t begin, end;
  };
  // [data + begin, data + end), part of `bytes` at `data`, enters the page tables. The chunks of it
  // that do not stay are added to `passing`.
  void enter(const char* data, int64_t begin, int64_t end, int64_t bytes,
             std::vector<Run>& passing);
  static void advise(const Run& run, int advice);
  bool keep(const Run& chunk);  // mutex_ held; false: there is no room

  struct Kept {
    uintptr_t end;
    int64_t last_used;  // clock_ then
  };
  const int64_t most_kept_;
  mutable std::mutex mutex_;
  std::map<uintptr_t, uintptr_t> blocks_;  // from begin to end
  std::map<uintptr_t, Kept> kept_;         // chunks, by begin
  int64_t kept_bytes_ = 0;
  int64_t clock_ = 0;  // bytes that were read
};

}  // namespace sherd::dist
