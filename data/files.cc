#include "data/files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "core/error.h"

namespace sherd::data {
namespace {

[[noreturn]] void fail_on(const char* what, const std::string& path) {
  fail("[", what, "] '", path, "': ", std::strerror(errno));
}

struct Descriptor {
  int fd;
  ~Descriptor() { ::close(fd); }
};

}  // namespace

MappedFile::MappedFile(const std::string& path) {
  const Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  if (file.fd < 0) fail_on("open", path);
  struct stat info;
  if (::fstat(file.fd, &info) != 0) fail_on("stat", path);
  if (!S_ISREG(info.st_mode)) fail("[open] '", path, "' is not a regular file");
  if (info.st_size == 0) return;  // the system refuses to map nothing
  void* start = ::mmap(nullptr, size_t(info.st_size), PROT_READ, MAP_SHARED, file.fd, 0);
  if (start == MAP_FAILED) fail_on("mmap", path);
  bytes_ = {static_cast<const char*>(start), size_t(info.st_size)};
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<char*>(bytes_.data()), bytes_.size());
}

std::string read_file(const std::string& path) { return std::string(MappedFile(path).bytes()); }

void replace_file(const std::string& path, std::string_view bytes) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  if (!folder.empty()) {
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    if (error) fail("[replace_file] folder '", folder.string(), "': ", error.message());
  }
  std::string temporary = path + ".XXXXXX";
  const int fd = ::mkostemp(temporary.data(), O_CLOEXEC);
  if (fd < 0) fail_on("replace_file", temporary);
  bool written = ::fchmod(fd, 0644) == 0;
  while (written && !bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    written = n > 0;
    if (written) bytes.remove_prefix(size_t(n));
  }
  written = written && ::fsync(fd) == 0;
  const int error = errno;
  written = ::close(fd) == 0 && written;
  if (written && ::rename(temporary.c_str(), path.c_str()) == 0) return;
  const int reason = written ? errno : error;
  ::unlink(temporary.c_str());
  errno = reason;
  fail_on("replace_file", path);
}

}  // namespace sherd::data
