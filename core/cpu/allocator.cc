// The CPU's caching allocator. Small blocks (up to 1 MiB) have size classes, four to a power of
// two, each with a free list. Large ones come by mmap and are reused best-fit, where at most a
// quarter of the block would be wasted. A BlockSource, where one is set, stands in for the system.
#include "core/allocator.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "core/block_source.h"
#include "core/context.h"
#include "core/error.h"

namespace sherd {
namespace {

constexpr int64_t kAlign = 64, kLarge = int64_t(1) << 20, kPage = 4096;

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
    MemoryBlock b;
    b.bytes = round_up(bytes, kAlign);
    b.category = category;
    if (bytes == 0) return b;
    std::lock_guard lock(mutex_);
    collect();
    const bool large = b.bytes > kLarge;
    b.capacity = large ? round_up(b.bytes, kPage) : class_bytes(b.bytes);
    auto it = free_.lower_bound(b.capacity);
    if (it != free_.end() && it->first <= (large ? b.capacity + b.capacity / 4 : b.capacity)) {
      b.capacity = it->first;
      b.data = it->second.back();
      it->second.pop_back();
      if (it->second.empty()) free_.erase(it);
    } else {
      b.data = take(b.capacity);
    }
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
    return stats_;
  }

  void reset_peak() override {
    std::lock_guard lock(mutex_);
    stats_.peak = stats_.allocated;
    stats_.at_peak = stats_.peak_by_category = stats_.by_category;
  }

  void release_cached() override {
    std::lock_guard lock(mutex_);
    release_free();
  }

  void set_source(std::shared_ptr<BlockSource> source) {
    std::lock_guard lock(mutex_);
    release_free();
    source_ = std::move(source);
  }

 private:
  struct Waiting {
    MemoryBlock block;
    Event event;
  };

  char* take(int64_t capacity) {
    ++stats_.system_calls;
    void* p = nullptr;
    if (source_ && capacity >= BlockSource::kLeast) {
      p = source_->take(capacity);
    } else if (capacity > kLarge) {
      p = mmap(nullptr, capacity, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (p == MAP_FAILED) p = nullptr;
    } else {
      p = std::aligned_alloc(kAlign, capacity);
    }
    if (!p)
      fail("[allocate] the system has no ", capacity, " bytes more (", std::strerror(errno), "); ",
           stats_.allocated, " are in use and ", stats_.reserved, " reserved on the cpu");
    stats_.reserved += capacity;
    return static_cast<char*>(p);
  }
  void give_back(char* p, int64_t capacity) {
    ++stats_.system_calls;
    stats_.reserved -= capacity;
    if (source_ && capacity >= BlockSource::kLeast && source_->owns(p))
      source_->give_back(p, capacity);
    else if (capacity > kLarge)
      munmap(p, capacity);
    else
      std::free(p);
  }
  void collect() {
    std::erase_if(waiting_, [&](const Waiting& w) {
      if (!w.event.is_done()) return false;
      keep(w.block);
      return true;
    });
  }
  void keep(const MemoryBlock& b) {
    // Blocks from before set_source() are not handed out again.
    if (source_ && b.capacity >= BlockSource::kLeast && !source_->owns(b.data))
      give_back(b.data, b.capacity);
    else
      free_[b.capacity].push_back(b.data);
  }
  void release_free() {
    collect();
    for (auto& [capacity, blocks] : free_)
      for (char* p : blocks) give_back(p, capacity);
    free_.clear();
  }
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
  std::map<int64_t, std::vector<char*>> free_;  // by capacity
  std::vector<Waiting> waiting_;
  std::shared_ptr<BlockSource> source_;
  MemoryStats stats_;
};

}  // namespace

std::shared_ptr<Allocator> make_cpu_allocator() { return std::make_shared<CpuAllocator>(); }

void set_block_source(Context& context, std::shared_ptr<BlockSource> source) {
  static_cast<CpuAllocator&>(*context.cpu_allocator()).set_source(std::move(source));
}

}  // namespace sherd
