// Arena: a rank's shareable memory. Its blocks lie in one memfd, a file without a name that ends
// with the last process that holds it: nothing is left after SIGKILL, and the size of /dev/shm is
// no limit. Other ranks map the blocks that they are told of. Those of tensors are the allocator's
// segments, with many tensors in one.
//
//     auto arena = std::make_shared<Arena>();
//     set_block_source(Context::current(), arena);             // tensors of 64 KiB and more
//     Place place = arena->find(tensor.bytes(), tensor.nbytes());
//     ...                                                      // to a peer: arena->fd(), place
//     ArenaView view(std::move(fd));
//     const char* bytes = view.at(place, n);                   // the same memory
#pragma once
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <utility>
#include <vector>

#include "core/block_source.h"
#include "distributed/fd.h"
#include "distributed/shm/peer_pages.h"

namespace sherd::dist {

int64_t page_bytes();  // of the system
// What one entry of a higher page table maps, on x86-64. Blocks lie at multiples of it in the file
// and are mapped at such, so that pages of this size can serve them.
inline constexpr int64_t kHugePage = int64_t(2) << 20;

// Where bytes lie in a rank's arena. Plain bytes: it travels as it is.
struct Place {
  int64_t block = -1;  // the block's offset in the file; -1: in no arena
  int64_t block_bytes = 0;
  int64_t offset = 0;  // in the block
};

class Arena : public BlockSource {
 public:
  Arena();  // Error, with the system's reason, if it can't be made
  ~Arena() override;

  // All zero. The pages are there then, not only promised: where memory runs out this returns null,
  // and no later write is a SIGBUS. As many of them as the system has are huge ones.
  char* take(int64_t bytes) override;
  void give_back(char* data, int64_t bytes) override;

  // These bytes of a block, with the rest of their pages, go on in pages that no peer sees: what
  // peers write from now on is lost. Nobody may write to these pages meanwhile.
  void detach(char* data, int64_t bytes);

  // All of [data, data + bytes), which lies in one block, and is not detached; block is -1 if it
  // doesn't.
  Place find(const char* data, int64_t bytes) const;
  int fd() const { return file_.fd(); }

 private:
  struct Block {
    int64_t offset, bytes;
    std::vector<std::pair<char*, char*>> detached;  // from begin to end; apart
  };
  Fd file_;
  mutable std::shared_mutex mutex_;
  std::map<const char*, Block> blocks_;  // by address
  int64_t end_ = 0;                      // of the file: offsets are not used twice
};

// A peer's arena. Blocks are mapped when they are first asked for, and stay so until they are let
// go: the peer may have given them back since, but only whoever reads knows when nobody does.
class ArenaView {
 public:
  // `pages`: is told of all blocks.
  explicit ArenaView(Fd file, PeerPages* pages = nullptr) : file_(std::move(file)), pages_(pages) {}
  ~ArenaView();
  // The bytes at `place`, of which there must be `bytes`. Error if the file has no such place.
  // `stays` where a block is first asked for decides for good.
  char* at(const Place& place, int64_t bytes, bool stays = false);
  void forget(const Place& place);            // unmaps its block
  void forget_most();                         // unmaps all blocks that do not stay
  int64_t mapped() const { return mapped_; }  // blocks

 private:
  struct Mapping {
    char* data;
    int64_t bytes;
    bool stays;
  };
  void unmap(const Mapping& mapping);

  Fd file_;
  PeerPages* pages_;
  std::mutex mutex_;
  std::map<int64_t, Mapping> mappings_;  // by the block's offset
  std::atomic<int64_t> mapped_ = 0;
};

}  // namespace sherd::dist
