#include "distributed/shm/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <optional>
#include <string>

#include "core/error.h"

namespace sherd::dist {

int64_t page_bytes() {
  static const int64_t bytes = sysconf(_SC_PAGESIZE);
  return bytes;
}

namespace {

// The number in a file of the system's, after a word if one is given; none if there is none.
std::optional<int64_t> number_in(const std::string& path, const std::string& after = "") {
  std::ifstream in(path);
  for (std::string word; !after.empty() && word != after;)
    if (!(in >> word)) return {};
  int64_t number = 0;
  if (!(in >> number)) return {};
  return number;
}

// What the system can still give, and the containers that this process is in (cgroup v2). Where it
// is `enough`, maybe less than there is.
int64_t available_bytes(int64_t enough) {
  int64_t bytes = INT64_MAX;
  if (const auto kib = number_in("/proc/meminfo", "MemAvailable:")) bytes = *kib * 1024;
  std::string group;
  std::ifstream groups("/proc/self/cgroup");
  while (std::getline(groups, group) && !group.starts_with("0::")) {
  }
  if (!group.starts_with("0::")) return bytes;
  for (std::string path = group.substr(3); path.starts_with("/");
       path.resize(path.find_last_of('/'))) {  // its limits, and those of the groups around it
    const std::string folder = "/sys/fs/cgroup" + path + "/";
    const auto most = number_in(folder + "memory.max"), used = number_in(folder + "memory.current");
    if (!most || !used) continue;
    int64_t left = *most - *used;
    if (left < enough) left += number_in(folder + "memory.stat", "inactive_file").value_or(0);
    bytes = std::min(bytes, left);
  }
  return bytes;
}

// False, with errno: the system has not so many pages. Asked before, for the kernel would look for
// them until it kills processes.
bool reserve(int file, int64_t offset, int64_t bytes) {
  if (bytes > available_bytes(bytes)) {
    errno = ENOMEM;
    return false;
  }
  int rc;
  do rc = fallocate(file, 0, offset, bytes);
  while (rc != 0 && errno == EINTR);
  return rc == 0;
}

// The pages go now, although the file and the peers' mappings stay.
void release(int file, int64_t offset, int64_t bytes) {
  int rc;
  do rc = fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes);
  while (rc != 0 && errno == EINTR);
  // Whoever gives memory back can do nothing about it, but should not wonder where it went.
  if (rc != 0)
    std::fprintf(stderr, "[shm] %lld bytes cannot be given back to the system: %s\n",
                 static_cast<long long>(bytes), std::strerror(errno));
}

}  // namespace

Arena::Arena() : file_(memfd_create("sherd", MFD_CLOEXEC)) {
  if (file_.fd() < 0) fail("[shm] memfd_create failed: ", std::strerror(errno));
}

Arena::~Arena() {
  for (const auto& [data, block] : blocks_) munmap(const_cast<char*>(data), block.bytes);
}

char* Arena::take(int64_t bytes) {
  bytes = (bytes + page_bytes() - 1) / page_bytes() * page_bytes();
  int64_t offset;
  {
    std::lock_guard lock(mutex_);
    offset = end_;
    end_ += bytes;
  }
  // Without the lock, for it takes its time: a block's offset is nobody else's, ever.
  if (!reserve(file_.fd(), offset, bytes)) {
    std::lock_guard lock(mutex_);
    if (end_ == offset + bytes) end_ = offset;  // the largest offset is as far as files go
    return nullptr;
  }
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_.fd(), offset);
  if (p == MAP_FAILED) {
    const int reason = errno;
    release(file_.fd(), offset, bytes);
    errno = reason;
    return nullptr;
  }
  // A forked child would write into its parent's tensors: it has none of them instead.
  madvise(p, bytes, MADV_DONTFORK);
  std::lock_guard lock(mutex_);
  blocks_[static_cast<char*>(p)] = {offset, bytes};
  return static_cast<char*>(p);
}

void Arena::give_back(char* data, int64_t) {
  Block block;
  {
    std::lock_guard lock(mutex_);
    const auto it = blocks_.find(data);
    block = it->second;
    blocks_.erase(it);
  }
  munmap(data, block.bytes);
  release(file_.fd(), block.offset, block.bytes);
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
    if (fstat(file_.fd(), &s) != 0 || place.block < 0 || place.block % page_bytes() != 0 ||
        place.block_bytes <= 0 || place.block_bytes > s.st_size - place.block)
      fail("[shm] a peer's memory has no block of ", place.block_bytes, " bytes at ", place.block);
    void* p = mmap(nullptr, place.block_bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ,
                   MAP_SHARED, file_.fd(), place.block);
    if (p == MAP_FAILED)
      fail("[shm] cannot map ", place.block_bytes, " bytes of a peer: ", std::strerror(errno));
    madvise(p, place.block_bytes, MADV_DONTFORK);
    it = mappings_.emplace(place.block, Mapping{static_cast<char*>(p), place.block_bytes, writable})
             .first;
    ++mapped_;
  }
  if (place.offset < 0 || bytes < 0 || place.offset > it->second.bytes - bytes)
    fail("[shm] ", bytes, " bytes at ", place.offset, " are outside a peer's block of ",
         it->second.bytes);
  return it->second.data + place.offset;
}

void ArenaView::forget(const Place& place) {
  std::lock_guard lock(mutex_);
  const auto it = mappings_.find(place.block);
  if (it == mappings_.end()) return;
  munmap(it->second.data, it->second.bytes);
  mappings_.erase(it);
  --mapped_;
}

void ArenaView::forget_read_only() {
  std::lock_guard lock(mutex_);
  mapped_ -= int64_t(std::erase_if(mappings_, [](const auto& entry) {
    if (entry.second.writable) return false;
    munmap(entry.second.data, entry.second.bytes);
    return true;
  }));
}

}  // namespace sherd::dist
