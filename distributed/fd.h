// Fd: owns a file descriptor; -1 is none.
//
//     Fd file(::open(path, O_RDONLY | O_CLOEXEC));
//     if (!file) fail("[load] ", path, ": ", std::strerror(errno));
#pragma once
#include <unistd.h>

#include <utility>

namespace sherd::dist {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(other.take()) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() {
    if (fd_ >= 0) close(fd_);
  }

  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int take() { return std::exchange(fd_, -1); }  // the caller's from now on

 private:
  int fd_ = -1;
};

}  // namespace sherd::dist
