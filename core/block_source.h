// BlockSource: memory that the CPU's allocator may cut its larger blocks from instead of the
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
  // Called under the allocator's lock. `bytes` are a multiple of 4 KiB, and so is the address;
  // null, with errno, if there are none. What was taken in one call is given back in one.
  virtual char* take(int64_t bytes) = 0;
  virtual void give_back(char* data, int64_t bytes) = 0;
};

// From now on, the context's blocks of kLeast bytes and more are cut from what `source` gives,
// which the allocator keeps. Where older ones come from serves no more, and goes back when nothing
// of it is used.
void set_block_source(Context& context, std::shared_ptr<BlockSource> source);

}  // namespace sherd
