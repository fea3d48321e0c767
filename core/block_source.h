// BlockSource: memory that the CPU's allocator may take its larger blocks from instead of the
// system's own, such as memory that other processes can map (distributed/shm).
//
//     set_block_source(Context::current(), std::make_shared<Arena>());
//     Tensor x = zeros({1 << 20});                     // lies in the arena
#pragma once
#include <cstdint>
#include <memory>

namespace sherd {

class Context;

class BlockSource {
 public:
  static constexpr int64_t kLeast = 64 << 10;  // smaller blocks are the system's in any case

  virtual ~BlockSource() = default;
  // Called under the allocator's lock. Whole pages, all zero; null, with errno, if there are none.
  virtual char* take(int64_t bytes) = 0;
  virtual void give_back(char* data, int64_t bytes) = 0;
  virtual bool owns(const char* data) const = 0;
};

// From now on, the context's blocks of kLeast bytes and more come from `source`, which the
// allocator keeps. Older ones go back to the system as they become free.
void set_block_source(Context& context, std::shared_ptr<BlockSource> source);

}  // namespace sherd
