#include "data/files.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "core/atomic_file.h"
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

// [Note: files cut short] The system has nothing to show for pages beyond the end that a mapped
// file has got: it sends SIGBUS, wherever the program happens to read. The handler looks the
// address up among what is mapped, so that the last words name the file, and leaves the rest to who
// would have had the signal: the same read is tried again and faults again. Nothing that it reads
// is ever freed.
struct Mapping {
  std::atomic<bool> is_taken;
  std::atomic<const char*> begin, end;  // null: not to be read
  std::array<char, 512> path;           // a longer one has its end here
};
std::array<Mapping, 256> mappings;  // of more files, some stay unnamed
struct sigaction bus_action_before;

void on_bus_error(int, siginfo_t* info, void*) {
  const char* at = static_cast<const char*>(info->si_addr);
  ::sigaction(SIGBUS, &bus_action_before, nullptr);
  if (info->si_code <= 0 || info->si_code == BUS_MCEERR_AO) {  // sent: no read will fault again
    ::raise(SIGBUS);
    return;
  }
  for (const Mapping& m : mappings) {
    const char* end = m.end.load();
    if (!end || at < m.begin.load() || at >= end) continue;
    static constexpr std::string_view kText = ": the file was cut short while it was read\n";
    const std::array<iovec, 2> line{
        iovec{const_cast<char*>(m.path.data()), ::strnlen(m.path.data(), m.path.size())},
        iovec{const_cast<char*>(kText.data()), kText.size()}};
    [[maybe_unused]] const ssize_t n = ::writev(2, line.data(), int(line.size()));
    return;
  }
}

void remember(std::string_view bytes, const std::string& path) {
  [[maybe_unused]] static const int once = [] {
    struct sigaction action {};
    action.sa_sigaction = on_bus_error;
    action.sa_flags = SA_SIGINFO;
    return ::sigaction(SIGBUS, &action, &bus_action_before);
  }();
  for (Mapping& m : mappings) {
    if (m.is_taken.exchange(true)) continue;
    const size_t n = std::min(path.size(), m.path.size());
    m.path.fill(0);
    path.copy(m.path.data(), n, path.size() - n);
    m.begin = bytes.data();
    m.end = bytes.data() + bytes.size();
    return;
  }
}

void forget(std::string_view bytes) {
  for (Mapping& m : mappings) {
    if (!m.end.load() || m.begin.load() != bytes.data()) continue;
    m.end = nullptr;
    m.is_taken = false;
    return;
  }
}

}  // namespace

MappedFile::MappedFile(const std::string& path) {
  const Descriptor file{::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC)};
  if (file.fd < 0) fail_on("open", path);
  struct stat info;
  if (::fstat(file.fd, &info) != 0) fail_on("stat", path);
  if (!S_ISREG(info.st_mode)) fail("[open] '", path, "' is not a regular file");
  if (info.st_size == 0) return;  // the system refuses to map nothing
  void* start = ::mmap(nullptr, size_t(info.st_size), PROT_READ, MAP_SHARED, file.fd, 0);
  if (start == MAP_FAILED) fail_on("mmap", path);
  bytes_ = {static_cast<const char*>(start), size_t(info.st_size)};
  remember(bytes_, path);
}

MappedFile::~MappedFile() {
  if (bytes_.empty()) return;
  forget(bytes_);
  ::munmap(const_cast<char*>(bytes_.data()), bytes_.size());
}

void replace_file(const std::string& path, std::string_view bytes) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  if (!folder.empty()) {
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    if (error) fail("[replace_file] folder '", folder.string(), "': ", error.message());
  }
  AtomicFile file(path);
  file.write(bytes.data(), int64_t(bytes.size()));
  file.commit();
}

}  // namespace sherd::data
