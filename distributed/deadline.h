// Times at which waits end.
#pragma once
#include <chrono>

#include "core/error.h"

namespace sherd::dist {

// `timeout` after `since`, or the last time there is: timeouts may be as long as their type allows.
// Not above 0: `since` itself.
inline std::chrono::steady_clock::time_point deadline_after(
    std::chrono::milliseconds timeout,
    std::chrono::steady_clock::time_point since = std::chrono::steady_clock::now()) {
  using TimePoint = std::chrono::steady_clock::time_point;
  if (timeout.count() <= 0) return since;
  const auto most = std::chrono::floor<std::chrono::milliseconds>(TimePoint::max() - since);
  return timeout < most ? since + timeout : TimePoint::max();
}

// Error, naming `op`, for a user's timeout that leaves no time.
inline void check_timeout(const char* op, std::chrono::milliseconds timeout) {
  if (timeout.count() <= 0)
    fail("[", op, "] timeout is ", timeout.count(),
         " ms, should be above 0; for no limit give std::chrono::milliseconds::max()");
}

}  // namespace sherd::dist
