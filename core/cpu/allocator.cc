// The CPU's caching allocator. Small blocks have size classes, four to a power of two, each with a
// free list. Those of BlockSource::kLeast bytes and more are pieces of segments.
#include "core/allocator.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "core/block_source.h"
#include "core/context.h"
#include "core/cpu/segments.h"
#include "core/error.h"

namespace sherd {
namespace {

constexpr int64_t kAlign = 64, kMost = int64_t(1) << 62;

int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Four classes to a power of two: 64, 80, 96, 112, 128, 160, ... rounded up to kAlign.
int64_t class_bytes(int64_t n) {
  if (n <= kAlign) return kAlign;
  return round_up(n, std::max<int64_t>(kAlign, int64_t(std::bit_floor(uint64_t(n - 1))) / 4));
}

class CpuAllocator : public Allocator {
 public:
  ~CpuAllocator() override { release_cached(); }

  MemoryBlock allocate(int64_t bytes, MemoryCategory category, const Stream&) override {
    if (bytes > kMost) fail("[allocate] no system has ", bytes, " bytes for a tensor");
    MemoryBlock b;
    b.bytes = round_up(bytes, kAlign);
    b.category = category;
    if (bytes == 0) return b;
    std::lock_guard lock(mutex_);
    collect();
    b.data = take(b.bytes);
    if (!b.data) {  // of the other kind, too, what is cached goes back
      release_free();
      b.data = take(b.bytes);
    }
    if (!b.data)
      fail("[allocate] the system has no ", b.bytes, " bytes more (", std::strerror(errno), "); ",
           stats_.allocated, " are in use and ", reserved(), " reserved on the cpu");
    count(b, +1);
    return b;
  }

  void deallocate(const MemoryBlock& b, const Event& event) override {
    if (!b.data) return;
    std::lock_guard lock(mutex_);
    count(b, -1);
    if (event.is_done())
      keep(b);
    else
      waiting_.push_back({b, event});
  }

  void recategorize(MemoryBlock& b, MemoryCategory category) override {
    std::lock_guard lock(mutex_);
    stats_.by_category[int(b.category)] -= b.data ? b.bytes : 0;
    b.category = category;
    stats_.by_category[int(b.category)] += b.data ? b.bytes : 0;
    note_peak();
  }

  MemoryStats stats() const override {
    std::lock_guard lock(mutex_);
    MemoryStats s = stats_;
    s.reserved = reserved();
    s.system_calls += segments_.system_calls();
    return s;
  }

  void reset_peak() override {
    std::lock_guard lock(mutex_);
    stats_.peak = stats_.allocated;
    stats_.at_peak = stats_.peak_by_category = stats_.by_category;
  }

  void release_cached() override {
    std::lock_guard lock(mutex_);
    collect();
    release_free();
  }

  void set_source(std::shared_ptr<BlockSource> source) {
    std::lock_guard lock(mutex_);
    collect();
    segments_.set_source(std::move(source));
  }

 private:
  struct Waiting {
    MemoryBlock block;
    Event event;
  };

  // A free small block: the list of its class lies in the blocks, so that freeing takes no memory.
  struct FreeBlock {
    FreeBlock* next;
  };

  char* take(int64_t bytes) {
    return is_small(bytes) ? take_small(class_bytes(bytes)) : segments_.take(bytes);
  }
  char* take_small(int64_t capacity) {
    FreeBlock*& first = small_[capacity];
    if (first) return reinterpret_cast<char*>(std::exchange(first, first->next));
    ++stats_.system_calls;
    void* p = std::aligned_alloc(kAlign, capacity);
    if (p) stats_.reserved += capacity;
    return static_cast<char*>(p);
  }
  void release_free() {
    segments_.release_free();
    for (auto& [capacity, first] : small_)
      while (first) {
        ++stats_.system_calls;
        stats_.reserved -= capacity;
        std::free(std::exchange(first, first->next));
      }
  }
  void collect() {
    std::erase_if(waiting_, [&](const Waiting& w) {
      if (!w.event.is_done()) return false;
      keep(w.block);
      return true;
    });
  }
  static bool is_small(int64_t bytes) { return bytes < BlockSource::kLeast; }
  void keep(const MemoryBlock& b) {
    if (!is_small(b.bytes)) return segments_.put(b.data);
    FreeBlock*& first = small_.find(class_bytes(b.bytes))->second;
    first = new (b.data) FreeBlock{first};
  }
  int64_t reserved() const { return stats_.reserved + segments_.reserved(); }
  void count(const MemoryBlock& b, int sign) {
    stats_.allocated += sign * b.bytes;
    stats_.by_category[int(b.category)] += sign * b.bytes;
    if (sign > 0) note_peak();
  }
  void note_peak() {
    for (int i = 0; i < kMemoryCategories; ++i)
      stats_.peak_by_category[i] = std::max(stats_.peak_by_category[i], stats_.by_category[i]);
    if (stats_.allocated > stats_.peak) {
      stats_.peak = stats_.allocated;
      stats_.at_peak = stats_.by_category;
    }
  }

  mutable std::mutex mutex_;
  std::map<int64_t, FreeBlock*> small_;  // free ones, by capacity
  cpu::Segments segments_;
  std::vector<Waiting> waiting_;
  MemoryStats stats_;  // `reserved` and `system_calls`: of the small blocks
};

}  // namespace

std::shared_ptr<Allocator> make_cpu_allocator() { return std::make_shared<CpuAllocator>(); }

void set_block_source(Context& context, std::shared_ptr<BlockSource> source) {
  static_cast<CpuAllocator&>(*context.cpu_allocator()).set_source(std::move(source));
}

}  // namespace sherd
