#include "core/atomic_file.h"

#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "core/error.h"

namespace sherd {
namespace {

[[noreturn]] void fail_with_errno(const char* op, const std::string& path) {
  const int reason = errno;
  fail("[", op, "] ", path, ": ", std::strerror(reason));
}

std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
}

constexpr int kMaxLinks = 40;  // the kernel's own limit

void need_regular(const char* op, const std::string& path, const struct stat& info) {
  if (!S_ISREG(info.st_mode)) fail("[", op, "] ", path, ": it is not a regular file");
}

class Descriptor {
 public:
  Descriptor(const std::string& path, int flags, const char* op)
      : fd_(::open(path.c_str(), flags | O_CLOEXEC)) {
    if (fd_ < 0) fail_with_errno(op, path);
  }
  ~Descriptor() { ::close(fd_); }
  operator int() const { return fd_; }

 private:
  int fd_;
};

// f(data, bytes) for the file's content, a block at a time.
template <class F>
void for_blocks(const std::string& path, F f) {
  const Descriptor file(path, O_RDONLY | O_NONBLOCK,
                        "read_file");  // a pipe's other end may be open
  struct stat info;
  if (::fstat(file, &info) != 0) fail_with_errno("read_file", path);
  need_regular("read_file", path, info);
  std::vector<char> block(1 << 20);
  for (;;) {
    const ssize_t n = ::read(file, block.data(), block.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_with_errno("read_file", path);
    if (n == 0) return;
    f(block.data(), size_t(n));
  }
}

}  // namespace

std::string target_of(const std::string& path) {
  struct stat info;
  if (::stat(path.c_str(), &info) == 0)
    need_regular("write_file", path, info);
  else if (errno != ENOENT)
    fail_with_errno("write_file", path);
  std::string at = path;
  for (int links = 0; links <= kMaxLinks; ++links) {
    char target[PATH_MAX];
    const ssize_t n = ::readlink(at.c_str(), target, sizeof target);
    if (n < 0) return at;
    const std::string to(target, size_t(n));
    at = to.starts_with('/') ? to : folder_of(at) + "/" + to;
  }
  errno = ELOOP;
  fail_with_errno("write_file", path);
}

struct AtomicFile::Hash {
  Hash() : state(XXH3_createState()) { reset(); }
  void reset() { XXH3_64bits_reset(state); }
  ~Hash() { XXH3_freeState(state); }
  void update(const void* data, size_t bytes) { XXH3_64bits_update(state, data, bytes); }
  uint64_t digest() const { return XXH3_64bits_digest(state); }
  XXH3_state_t* state;
};

AtomicFile::AtomicFile(std::string path)
    : path_(target_of(path)),
      hash_(std::make_unique<Hash>()),
      block_hash_(std::make_unique<Hash>()) {
  static std::atomic<int> counter = 0;
  // A name may be left from a dead process that had this one's number.
  do {
    temporary_ = concat(path_, ".tmp-", int64_t(::getpid()), "-", counter++);
    descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  } while (descriptor_ < 0 && errno == EEXIST);
  if (descriptor_ < 0) fail_with_errno("write_file", path_);
}

AtomicFile::~AtomicFile() {
  if (descriptor_ < 0) return;
  ::close(descriptor_);
  ::unlink(temporary_.c_str());
}

void AtomicFile::write(const void* data, int64_t bytes) {
  const char* p = static_cast<const char*>(data);
  for (int64_t left = bytes; left > 0;) {
    const ssize_t n = ::write(descriptor_, p, size_t(left));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_with_errno("write_file", path_);
    p += n, left -= n;
  }
  hash_->update(data, size_t(bytes));
  p = static_cast<const char*>(data);
  for (int64_t left = bytes; left > 0;) {
    const int64_t n = std::min(left, kChecksumBlock - bytes_ % kChecksumBlock);
    block_hash_->update(p, size_t(n));
    p += n, left -= n, bytes_ += n;
    if (bytes_ % kChecksumBlock == 0) end_block();
  }
}

void AtomicFile::end_block() {
  block_checksums_.push_back(block_hash_->digest());
  block_hash_->reset();
}

FileSummary AtomicFile::commit() {
  if (descriptor_ < 0) fail("[write_file] ", path_, " was committed already");
  if (::fsync(descriptor_) != 0) fail_with_errno("write_file", path_);
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail_with_errno("write_file", path_);
  ::close(std::exchange(descriptor_, -1));
  sync_folder(folder_of(path_));
  if (bytes_ % kChecksumBlock != 0) end_block();
  return {bytes_, hash_->digest()};
}

FileSummary summarize_file(const std::string& path) {
  int64_t bytes = 0;
  AtomicFile::Hash hash;
  for_blocks(path, [&](const char* data, size_t n) {
    hash.update(data, n);
    bytes += int64_t(n);
  });
  return {bytes, hash.digest()};
}

uint64_t checksum_of(const void* data, int64_t bytes) { return XXH3_64bits(data, size_t(bytes)); }

std::string read_file(const std::string& path) {
  std::string text;
  for_blocks(path, [&](const char* data, size_t n) { text.append(data, n); });
  return text;
}

void sync_folder(const std::string& path) {
  const Descriptor folder(path, O_RDONLY | O_DIRECTORY, "sync_folder");
  if (::fsync(folder) != 0) fail_with_errno("sync_folder", path);
}

}  // namespace sherd
