#include "distributed/shm/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/error.h"

namespace sherd::dist {
namespace {

constexpr int64_t kPage = 4096;

}  // namespace

Arena::Arena() : file_(memfd_create("sherd", MFD_CLOEXEC)) {
  if (file_.fd() < 0) fail("[shm] memfd_create failed: ", std::strerror(errno));
}

Arena::~Arena() {
  for (const auto& [data, block] : blocks_) munmap(const_cast<char*>(data), block.bytes);
}

char* Arena::take(int64_t bytes) {
  bytes = (bytes + kPage - 1) / kPage * kPage;
  std::lock_guard lock(mutex_);
  if (ftruncate(file_.fd(), end_ + bytes) != 0) return nullptr;
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_.fd(), end_);
  if (p == MAP_FAILED) return nullptr;
  // A forked child would write into its parent's tensors: it has none of them instead.
  madvise(p, bytes, MADV_DONTFORK);
  blocks_[static_cast<char*>(p)] = {end_, bytes};
  end_ += bytes;
  return static_cast<char*>(p);
}

void Arena::give_back(char* data, int64_t) {
  std::lock_guard lock(mutex_);
  const auto it = blocks_.find(data);
  const Block block = it->second;
  blocks_.erase(it);
  munmap(data, block.bytes);
  // The pages go now, although the file and the peers' mappings stay.
  fallocate(file_.fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, block.offset, block.bytes);
}

Place Arena::find(const char* data, int64_t bytes) const {
  std::shared_lock lock(mutex_);
  auto it = blocks_.upper_bound(data);
  if (it == blocks_.begin()) return {};
  --it;
  const int64_t at = data - it->first;
  if (at >= it->second.bytes || at + bytes > it->second.bytes) return {};
  return {it->second.offset, it->second.bytes, at};
}

ArenaView::~ArenaView() {
  for (const auto& [offset, mapping] : mappings_) munmap(mapping.data, mapping.bytes);
}

char* ArenaView::at(const Place& place, int64_t bytes, bool writable) {
  std::lock_guard lock(mutex_);
  auto it = mappings_.find(place.block);
  if (it == mappings_.end()) {
    struct stat s {};
    if (fstat(file_.fd(), &s) != 0 || place.block < 0 || place.block % kPage != 0 ||
        place.block_bytes <= 0 || place.block_bytes > s.st_size - place.block)
      fail("[shm] a peer's memory has no block of ", place.block_bytes, " bytes at ", place.block);
    void* p = mmap(nullptr, place.block_bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ,
                   MAP_SHARED, file_.fd(), place.block);
    if (p == MAP_FAILED)
      fail("[shm] cannot map ", place.block_bytes, " bytes of a peer: ", std::strerror(errno));
    madvise(p, place.block_bytes, MADV_DONTFORK);
    it = mappings_.emplace(place.block, Mapping{static_cast<char*>(p), place.block_bytes}).first;
  }
  if (place.offset < 0 || bytes < 0 || place.offset > it->second.bytes - bytes)
    fail("[shm] ", bytes, " bytes at ", place.offset, " are outside a peer's block of ",
         it->second.bytes);
  return it->second.data + place.offset;
}

}  // namespace sherd::dist
