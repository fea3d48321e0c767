#include "distributed/launcher/signals.h"

#include <errno.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "core/error.h"

namespace sherd::dist {
namespace {

bool is_ignored(int signal) {
  struct sigaction action;
  return sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

}  // namespace

SignalGuard::SignalGuard() {
  sigset_t taken;
  sigemptyset(&taken);
  // SIGINT is taken even if it was ignored: a script's background jobs start so, and must still
  // end.
  for (int signal : {SIGCHLD, SIGINT, SIGTERM}) sigaddset(&taken, signal);
  for (int signal : {SIGHUP, SIGTSTP}) {
    if (!is_ignored(signal)) sigaddset(&taken, signal);  // nohup means it
  }
  fd_ = signalfd(-1, &taken, SFD_NONBLOCK | SFD_CLOEXEC);
  if (fd_ < 0) fail("[launch] cannot make a signalfd: ", strerror(errno));
  sigprocmask(SIG_BLOCK, &taken, &mask_before_);
  // If a parent left SIGCHLD ignored, the kernel would reap the ranks unseen.
  struct sigaction action {};
  action.sa_handler = SIG_DFL;
  sigaction(SIGCHLD, &action, &child_before_);
  action.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &action, &pipe_before_);
  prctl(PR_GET_CHILD_SUBREAPER, &subreaper_before_);
  prctl(PR_SET_CHILD_SUBREAPER, 1);
}

SignalGuard::~SignalGuard() {
  prctl(PR_SET_CHILD_SUBREAPER, subreaper_before_);
  sigaction(SIGPIPE, &pipe_before_, nullptr);
  sigaction(SIGCHLD, &child_before_, nullptr);
  sigprocmask(SIG_SETMASK, &mask_before_, nullptr);
  close(fd_);
}

int SignalGuard::take() const {
  signalfd_siginfo info;
  return read(fd_, &info, sizeof info) == sizeof info ? static_cast<int>(info.ssi_signo) : 0;
}

}  // namespace sherd::dist
