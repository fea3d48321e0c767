#include "distributed/file_store.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <iterator>
#include <thread>
#include <utility>

#include "distributed/deadline.h"

namespace sherd::dist {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::string_view kMagic = "SHERDFS1";
constexpr Milliseconds kFarewell(5000);  // for the lock, by a handle that is closed
constexpr off_t kLife = 0, kTurn = 1;    // the bytes that are locked

// False: another has it, and did until the deadline. (F_OFD_SETLKW would wait for ever for a
// process that was stopped.)
bool lock(int fd, off_t byte, short kind, Clock::time_point deadline) {
  struct flock l {};
  l.l_type = kind;
  l.l_whence = SEEK_SET;
  l.l_start = byte;
  l.l_len = 1;
  auto pause = std::chrono::microseconds(20);
  while (fcntl(fd, F_OFD_SETLK, &l) != 0) {
    if (errno == EINTR) continue;
    if (errno != EAGAIN && errno != EACCES)
      fail("[file_store] the file cannot be locked: ", std::strerror(errno));
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds(200));
  }
  return true;
}
bool try_lock(int fd, off_t byte, short kind) { return lock(fd, byte, kind, {}); }
void unlock(int fd, off_t byte) { lock(fd, byte, F_UNLCK, {}); }

}  // namespace

class FileStore::Locked {
 public:
  explicit Locked(FileStore& store) : Locked(store, store.timeout()) {}
  Locked(FileStore& store, Milliseconds patience) : store_(store), one_(store.mutex_) {
    store.take_turn(std::min(patience, store.timeout()));
    try {
      store.read_on();
    } catch (...) {
      unlock(store.fd_, kTurn);
      throw;
    }
  }
  ~Locked() { unlock(store_.fd_, kTurn); }

 private:
  FileStore& store_;
  std::lock_guard<std::mutex> one_;
};

FileStore::FileStore(const std::string& path, Milliseconds timeout) : path_(path) {
  set_timeout(timeout);
  while (!open_file()) {
  }
}

void FileStore::take_turn(Milliseconds patience) {
  if (!lock(fd_, kTurn, F_WRLCK, deadline_after(patience)))
    throw StoreTimeout(concat("[store] waited ", patience.count(), " ms for the lock of '", name(),
                              "': a process that holds it does not go on"));
}

// False: it was removed meanwhile, once more.
bool FileStore::open_file() {
  fd_ = open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd_ < 0) fail("[file_store] cannot open ", path_, ": ", std::strerror(errno));
  try {
    take_turn(timeout());
    struct stat opened {
    }, named{};
    const bool is_there = fstat(fd_, &opened) == 0 && stat(path_.c_str(), &named) == 0 &&
                          opened.st_ino == named.st_ino && opened.st_dev == named.st_dev;
    if (!is_there) {
      close(std::exchange(fd_, -1));
      return false;
    }
    if (try_lock(fd_, kLife, F_WRLCK)) {  // nobody lives
      char magic[kMagic.size()];
      const ssize_t n = pread(fd_, magic, sizeof magic, 0);
      if (n > 0 && std::string_view(magic, size_t(n)) != kMagic.substr(0, size_t(n)))
        fail("[file_store] ", path_, " holds something else than a store: it is left alone");
      if (ftruncate(fd_, 0) != 0 ||
          pwrite(fd_, kMagic.data(), kMagic.size(), 0) != ssize_t(kMagic.size()))
        fail("[file_store] cannot write ", path_, ": ", std::strerror(errno));
    }
    // Who has it alone has the turn too, and that is this handle.
    if (!try_lock(fd_, kLife, F_RDLCK)) fail("[file_store] ", path_, " is locked by a stranger");
    read_ = kMagic.size();
    unlock(fd_, kTurn);
    return true;
  } catch (...) {
    close(std::exchange(fd_, -1));
    throw;
  }
}

FileStore::~FileStore() {
  try {
    take_turn(kFarewell);
    if (try_lock(fd_, kLife, F_WRLCK)) unlink(path_.c_str());
  } catch (const Error&) {
  }
  close(fd_);
}

// Records: sizes of key and value (8 bytes each; -1: the key was deleted), and their bytes.
void FileStore::read_on() {
  struct stat s {};
  fstat(fd_, &s);
  std::string bytes(size_t(std::max<int64_t>(0, s.st_size - read_)), '\0');
  for (size_t at = 0; at < bytes.size();) {
    const ssize_t n = pread(fd_, bytes.data() + at, bytes.size() - at, read_ + int64_t(at));
    if (n <= 0) fail("[file_store] cannot read ", path_, ": ", std::strerror(errno));
    at += size_t(n);
  }
  for (std::string_view rest = bytes; rest.size() >= 16;) {
    int64_t sizes[2];
    std::memcpy(sizes, rest.data(), 16);
    const int64_t value_size = std::max<int64_t>(0, sizes[1]);
    // A rank that was killed in the middle of a write left a piece: the next one writes over it.
    if (sizes[0] < 0 || sizes[0] > int64_t(rest.size()) - 16 ||
        value_size > int64_t(rest.size()) - 16 - sizes[0])
      break;
    const std::string key(rest.substr(16, size_t(sizes[0])));
    if (sizes[1] < 0)
      values_.erase(key);
    else
      values_[key] = rest.substr(16 + size_t(sizes[0]), size_t(value_size));
    const size_t whole = 16 + size_t(sizes[0] + value_size);
    rest.remove_prefix(whole);
    read_ += int64_t(whole);
  }
}

void FileStore::append(const std::string& key, const std::string* value) {
  const int64_t sizes[2] = {int64_t(key.size()), value ? int64_t(value->size()) : -1};
  std::string record(reinterpret_cast<const char*>(sizes), sizeof sizes);
  record += key;
  if (value) record += *value;
  for (size_t at = 0; at < record.size();) {
    const ssize_t n = pwrite(fd_, record.data() + at, record.size() - at, read_ + int64_t(at));
    if (n < 0 && errno != EINTR)
      fail("[file_store] cannot write ", path_, ": ", std::strerror(errno));
    if (n > 0) at += size_t(n);
  }
  // What a killed rank left behind this record would be read as the next one.
  if (ftruncate(fd_, read_ + int64_t(record.size())) != 0)
    fail("[file_store] cannot write ", path_, ": ", std::strerror(errno));
  read_on();
}

void FileStore::set(const std::string& key, const std::string& value) {
  const Locked locked(*this);
  append(key, &value);
}

std::string FileStore::get(const std::string& key) {
  const auto deadline = deadline_after(timeout());
  for (;;) {
    wait({key},
         std::max(Milliseconds(0), std::chrono::ceil<Milliseconds>(deadline - Clock::now())));
    const Locked locked(*this);
    // It may have been deleted in between.
    if (const auto it = values_.find(key); it != values_.end()) return it->second;
  }
}

int64_t FileStore::add(const std::string& key, int64_t amount) {
  const Locked locked(*this);
  int64_t sum = 0;
  if (const auto it = values_.find(key); it != values_.end() && !it->second.empty()) {
    const std::string& value = it->second;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), sum);
    if (error != std::errc() || end != value.data() + value.size())
      fail("[store] add to key '", key, "', which holds '", value.substr(0, 40),
           "' and not a number");
  }
  sum = int64_t(uint64_t(sum) + uint64_t(amount));
  const std::string text = std::to_string(sum);
  append(key, &text);
  return sum;
}

std::string FileStore::compare_set(const std::string& key, const std::string& expected,
                                   const std::string& desired) {
  const Locked locked(*this);
  const auto it = values_.find(key);
  if (it == values_.end() && !expected.empty()) return expected;
  if (it != values_.end() && it->second != expected) return it->second;
  append(key, &desired);
  return desired;
}

bool FileStore::check(const std::vector<std::string>& keys) {
  const Locked locked(*this);
  return std::all_of(keys.begin(), keys.end(), [&](const auto& k) { return values_.contains(k); });
}

void FileStore::wait(const std::vector<std::string>& keys, Milliseconds timeout) {
  const auto deadline = deadline_after(timeout);
  auto pause = Milliseconds(1);
  for (;;) {
    std::vector<std::string> missing;
    {
      const auto left = std::chrono::ceil<Milliseconds>(deadline - Clock::now());
      // Others that wait for keys have the lock most of the time: also at the end it takes some.
      const Locked locked(*this, std::max(left, Milliseconds(1000)));
      std::copy_if(keys.begin(), keys.end(), std::back_inserter(missing),
                   [&](const auto& k) { return !values_.contains(k); });
    }
    if (missing.empty()) return;
    if (Clock::now() >= deadline)
      throw StoreTimeout(concat("[store] waited ", timeout.count(), " ms for ", quote_keys(missing),
                                " in the store '", name(), "': never set"));
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, Milliseconds(20));
  }
}

bool FileStore::delete_key(const std::string& key) {
  const Locked locked(*this);
  if (!values_.contains(key)) return false;
  append(key, nullptr);
  return true;
}

int64_t FileStore::num_keys() {
  const Locked locked(*this);
  return int64_t(values_.size());
}

}  // namespace sherd::dist
