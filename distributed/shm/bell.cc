#include "distributed/shm/bell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace sherd::dist {
namespace {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t) &&
              std::atomic<uint32_t>::is_always_lock_free);

uint32_t* word(Bell& bell) { return reinterpret_cast<uint32_t*>(&bell.rings); }

}  // namespace

void ring_all(Bell& bell) {
  bell.rings.fetch_add(1);
  syscall(SYS_futex, word(bell), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void ring(Bell& bell, int me) {
  // All of these are sequentially consistent: either this sees that it is waited for, or the waiter
  // sees what was written before.
  const int32_t awaited = bell.awaited.load();
  if (awaited == Bell::kAnyone || awaited == me + 1) ring_all(bell);
}

bool Patience::sleep(Bell& bell, uint32_t seen, TimePoint deadline) {
  using namespace std::chrono;
  const auto left = duration_cast<nanoseconds>(deadline - steady_clock::now());
  if (left.count() <= 0) return false;
  const auto most = std::min<nanoseconds>(left, seconds(60));
  const timespec t{time_t(most.count() / 1'000'000'000), long(most.count() % 1'000'000'000)};
  syscall(SYS_futex, word(bell), FUTEX_WAIT, seen, &t, nullptr, 0);
  return true;
}

}  // namespace sherd::dist
