#include "examples/support/run_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "core/error.h"

namespace examples {

using sherd::concat;
using sherd::fail;

namespace {

// The kernel's list has lines as "1: FLOCK  ADVISORY  WRITE 4711 fe:00:10960903 0 EOF".
std::string holder_of(int fd) {
  struct stat info;
  std::ifstream locks("/proc/locks");
  if (::fstat(fd, &info) != 0) return "another process";
  const std::string inode = concat(":", uint64_t(info.st_ino));
  for (std::string line; std::getline(locks, line);) {
    std::istringstream words(line);
    std::string number, kind, advisory, access, pid, file;
    words >> number >> kind >> advisory >> access >> pid >> file;
    if (kind == "FLOCK" && file.ends_with(inode)) return "process " + pid;
  }
  return "another process";
}

}  // namespace

void lock_for_process(int fd, const std::string& path) {
  while (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    if (errno != EWOULDBLOCK) return;
    fail(path, " is in use by ", holder_of(fd), ": another job writes there");
  }
}

RunLock::RunLock(const std::string& folder) : path_(folder + "/.run-lock") {
  for (int tries = 0;; ++tries) {
    std::error_code error;
    made_ |= std::filesystem::create_directories(folder, error);
    if (error) fail("cannot make the folder ", folder, ": ", error.message());
    fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    // Who held it has removed the folder meanwhile; or the name is a link to nowhere.
    if (fd_ < 0 && errno == ENOENT && tries < 10) continue;
    if (fd_ < 0) fail("cannot write into ", folder, ": ", std::strerror(errno));
    try {
      lock_for_process(fd_, folder);
    } catch (...) {
      ::close(fd_);
      throw;
    }
    if (is_held()) return;  // or who had it removed the file between our open and our lock
    ::close(fd_);
  }
}

bool RunLock::is_held() const {
  struct stat mine, there;
  return ::fstat(fd_, &mine) == 0 && ::stat(path_.c_str(), &there) == 0 &&
         mine.st_dev == there.st_dev && mine.st_ino == there.st_ino;
}

void RunLock::need_held() const {
  if (!is_held())
    fail(std::filesystem::path(path_).parent_path().string(),
         " was moved or removed while this job writes there");
}

RunLock::~RunLock() {
  if (is_held()) {
    ::unlink(path_.c_str());
    if (made_) ::rmdir(std::filesystem::path(path_).parent_path().c_str());  // if nothing was saved
  }
  ::close(fd_);
}

}  // namespace examples
