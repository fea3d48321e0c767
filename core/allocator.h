// Allocator: caching, one a device and context. Freed blocks are kept and handed out again, so a
// training step in steady state asks the operating system for nothing. It counts bytes by category:
//
//     MemoryScope scope(MemoryCategory::kOptimizer);   // this thread allocates optimizer state
//     memory_stats().allocated;                        // of the current context's CPU allocator
//
// Counts are of the bytes asked for by tensors (rounded up to 64), not of the blocks that hold
// them; `reserved` is what was taken from the system.
#pragma once
#include <array>
#include <cstdint>
#include <memory>

#include "core/stream.h"

namespace sherd {

enum class MemoryCategory : uint8_t {
  kActivations,  // the default: everything not named below
  kParameters,
  kGradients,
  kOptimizer,
  kCommunication,
};
inline constexpr int kMemoryCategories = 5;
const char* name_of(MemoryCategory c);

struct MemoryStats {
  int64_t allocated = 0, peak = 0;  // bytes in use now; most at once since the last reset_peak()
  std::array<int64_t, kMemoryCategories> by_category{};       // now
  std::array<int64_t, kMemoryCategories> peak_by_category{};  // each category's own most
  std::array<int64_t, kMemoryCategories>
      at_peak{};             // each category's bytes when `peak` was reached
  int64_t reserved = 0;      // bytes held from the system, in use or cached
  int64_t system_calls = 0;  // requests to the system (allocate or give back)
  int64_t operator[](MemoryCategory c) const { return by_category[int(c)]; }
};

struct MemoryBlock {
  char* data = nullptr;  // 64-byte aligned
  int64_t bytes = 0;     // as asked for, rounded up to 64
  MemoryCategory category = MemoryCategory::kActivations;
};

class Allocator {
 public:
  virtual ~Allocator() = default;
  // Bytes that `stream` may use at once; it may be made to wait until their earlier user is done.
  virtual MemoryBlock allocate(int64_t bytes, MemoryCategory category, const Stream& stream) = 0;
  // Gives the block back; its bytes are reused only after `event`.
  virtual void deallocate(const MemoryBlock& block, const Event& event) = 0;
  // Counts the block under another category from now on.
  virtual void recategorize(MemoryBlock& block, MemoryCategory category) = 0;
  virtual MemoryStats stats() const = 0;
  virtual void reset_peak() = 0;
  // Gives free blocks back to the system, where nothing beside them is used that they came with.
  virtual void release_cached() = 0;
};

std::shared_ptr<Allocator> make_cpu_allocator();

MemoryStats memory_stats();  // of the current context, CPU
void reset_peak_memory();

// For the scope, allocations of this thread count under `category`.
class MemoryScope {
 public:
  explicit MemoryScope(MemoryCategory category);
  ~MemoryScope();
  MemoryScope(const MemoryScope&) = delete;
  MemoryScope& operator=(const MemoryScope&) = delete;
  static MemoryCategory current();

 private:
  MemoryCategory before_;
};

}  // namespace sherd
