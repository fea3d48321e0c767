#include "distributed/shm/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>
#include <optional>
#include <string>

#include "core/error.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // since Linux 6.1, and in headers later
#endif

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

int64_t round_up(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

// Maps bytes of a file, at a multiple of kHugePage; null, with errno, if that can't be.
char* map(int file, int64_t offset, int64_t bytes) {
  // Room for it at any address, of which the rest goes.
  const int64_t room = bytes + kHugePage;
  void* p = mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  char* const begin = static_cast<char*>(p);
  char* const data = begin + (-reinterpret_cast<uintptr_t>(begin) & (kHugePage - 1));
  if (mmap(data, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, offset) ==
      MAP_FAILED) {
    const int reason = errno;
    munmap(begin, room);
    errno = reason;
    return nullptr;
  }
  if (data > begin) munmap(begin, data - begin);
  char* const end = data + round_up(bytes, page_bytes());
  if (end < begin + room) munmap(end, begin + room - end);
  // A forked child would write into its parent's tensors: it has none of them instead.
  madvise(data, bytes, MADV_DONTFORK);
  return data;
}

std::chrono::nanoseconds processor_time() {  // of this thread
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return std::chrono::seconds(t.tv_sec) + std::chrono::nanoseconds(t.tv_nsec);
}

bool allocate_pages(int file, int64_t offset, int64_t bytes) {
  int rc;
  do rc = fallocate(file, 0, offset, bytes);
  while (rc != 0 && errno == EINTR);
  return rc == 0;
}

// Pages for what is mapped at `data`. False, with errno: the system has not so many. Asked before,
// for the kernel would look for them until it kills processes.
bool reserve(int file, int64_t offset, char* data, int64_t bytes) {
  if (bytes > available_bytes(bytes)) {
    errno = ENOMEM;
    return false;
  }
  // A huge page takes the place of one that is there and of holes, which costs an eighth of as many
  // small ones. The system's defaults give shared memory none by itself, and refuse none. Where
  // free memory lies in splinters, the kernel would move what is in the way, as long as it takes.
  // Several in a call, for each call makes all processors hand in what they hold of free pages.
  constexpr int64_t kAtOnce = 16 * kHugePage;
  constexpr std::chrono::milliseconds kLongest{200};
  const int64_t huge = bytes / kHugePage * kHugePage;
  for (int64_t at = 0; at < huge; at += kAtOnce) {
    const int64_t end = std::min(huge, at + kAtOnce);
    for (int64_t page = at; page < end; page += kHugePage)
      if (!allocate_pages(file, offset + page, page_bytes())) return false;
    const auto start = processor_time();
    if (madvise(data + at, end - at, MADV_COLLAPSE) != 0 || processor_time() - start > kLongest)
      break;
  }
  return allocate_pages(file, offset, bytes);
}

bool read_file(int file, char* to, int64_t bytes, int64_t offset) {
  for (int64_t done = 0; done < bytes;) {
    const ssize_t n = pread(file, to + done, bytes - done, offset + done);
    if (n == 0 || (n < 0 && errno != EINTR)) return false;
    done += std::max<ssize_t>(n, 0);
  }
  return true;
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
  bytes = round_up(bytes, page_bytes());
  const int64_t room = round_up(bytes, kHugePage);
  int64_t offset;
  {
    std::lock_guard lock(mutex_);
    offset = end_;
    end_ += room;
  }
  // Without the lock, for it takes its time: a block's offset is nobody else's, ever.
  char* data = map(file_.fd(), offset, bytes);
  if (data && !reserve(file_.fd(), offset, data, bytes)) {
    const int reason = errno;
    munmap(data, bytes);
    release(file_.fd(), offset, bytes);
    errno = reason;
    data = nullptr;
  }
  std::lock_guard lock(mutex_);
  if (data)
    blocks_[data] = {offset, bytes, {}};
  else if (end_ == offset + room)
    end_ = offset;  // the largest offset is as far as files go
  return data;
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

void Arena::detach(char* data, int64_t bytes) {
  const auto page = page_bytes();
  char* begin = data - uintptr_t(data) % page;
  char* end = begin + round_up(data + bytes - begin, page);
  int64_t offset;
  {
    std::lock_guard lock(mutex_);
    const auto& [first, block] = *std::prev(blocks_.upper_bound(data));
    for (const auto& [b, e] : block.detached) {  // pages that such bytes share with others
      if (b <= begin && begin < e) begin = std::min(e, end);
      if (b < end && end <= e) end = std::max(b, begin);
    }
    offset = block.offset + (begin - first);
  }
  const int64_t size = end - begin;
  if (bytes == 0 || size == 0) return;
  // The contents come from the file: the rest of a page may be poisoned by a sanitizer.
  void* own = MAP_FAILED;
  errno = ENOMEM;
  if (size <= available_bytes(size))
    own = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (own != MAP_FAILED && read_file(file_.fd(), static_cast<char*>(own), size, offset) &&
      mremap(own, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, begin) != MAP_FAILED) {
    std::lock_guard lock(mutex_);
    std::prev(blocks_.upper_bound(data))->second.detached.emplace_back(begin, end);
    return;
  }
  std::fprintf(stderr, "[shm] a peer may still write into %lld bytes of a failed collective: %s\n",
               static_cast<long long>(bytes), std::strerror(errno));
  if (own != MAP_FAILED) munmap(own, size);
}

Place Arena::find(const char* data, int64_t bytes) const {
  std::shared_lock lock(mutex_);
  auto it = blocks_.upper_bound(data);
  if (it == blocks_.begin()) return {};
  --it;
  const int64_t at = data - it->first;
  if (at >= it->second.bytes || at + bytes > it->second.bytes) return {};
  for (const auto& [begin, end] : it->second.detached)
    if (data < end && begin < data + bytes) return {};
  return {it->second.offset, it->second.bytes, at};
}

ArenaView::~ArenaView() {
  for (const auto& [offset, mapping] : mappings_) unmap(mapping);
}

void ArenaView::unmap(const Mapping& mapping) {
  if (pages_) pages_->remove(mapping.data);
  munmap(mapping.data, mapping.bytes);
}

char* ArenaView::at(const Place& place, int64_t bytes, bool stays) {
  std::lock_guard lock(mutex_);
  auto it = mappings_.find(place.block);
  if (it == mappings_.end()) {
    struct stat s {};
    if (fstat(file_.fd(), &s) != 0 || place.block < 0 || place.block % page_bytes() != 0 ||
        place.block_bytes <= 0 || place.block_bytes > s.st_size - place.block)
      fail("[shm] a peer's memory has no block of ", place.block_bytes, " bytes at ", place.block);
    char* const data = map(file_.fd(), place.block, place.block_bytes);
    if (!data)
      fail("[shm] cannot map ", place.block_bytes, " bytes of a peer: ", std::strerror(errno));
    it = mappings_.emplace(place.block, Mapping{data, place.block_bytes, stays}).first;
    if (pages_) pages_->add(it->second.data, it->second.bytes);
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
  unmap(it->second);
  mappings_.erase(it);
  --mapped_;
}

void ArenaView::forget_most() {
  std::lock_guard lock(mutex_);
  mapped_ -= int64_t(std::erase_if(mappings_, [this](const auto& entry) {
    if (entry.second.stays) return false;
    unmap(entry.second);
    return true;
  }));
}

}  // namespace sherd::dist
