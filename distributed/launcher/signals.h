// SignalGuard: while it lives, this process takes its signals from a file descriptor, and orphans
// of its descendants become its own children.
#pragma once
#include <signal.h>

namespace sherd::dist {

class SignalGuard {
 public:
  SignalGuard();
  ~SignalGuard();
  SignalGuard(const SignalGuard&) = delete;
  SignalGuard& operator=(const SignalGuard&) = delete;

  int fd() const { return fd_; }  // a signalfd, non-blocking
  int take() const;               // the next that has come, or 0
  const sigset_t& mask_before() const { return mask_before_; }

 private:
  int fd_ = -1;
  int subreaper_before_ = 0;
  sigset_t mask_before_;
  struct sigaction pipe_before_, child_before_;
};

}  // namespace sherd::dist
