// Bell: a thread waits for something that a peer writes into shared memory.
//
//     waiter:  wait_for(bell, peer, [&] { return word.load() >= n; }, deadline);
//     peer:    word.store(n); ring(bell, me);
//
// [Note: waiting] A wait looks for a short while, since an answer often comes within microseconds
// and waking a thread takes tens of them, and then sleeps on a futex that any process may wake.
// Looking takes a core from whoever computes, so it is given up where it does not help: after a
// look in vain the next waits sleep at once, 1 of them, then 2, 4, up to 16, until a look is in
// time again. From its first microseconds on, or from the start where there are more ranks than
// cores, a look leaves the core to whoever else can run, which may be who is waited for. A bell
// says which peer that is, and the others' news make no system call.
#pragma once
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

#include "distributed/mesh.h"

namespace sherd::dist {

struct alignas(64) Bell {  // in memory that starts as zeros
  static constexpr int32_t kNobody = 0, kAnyone = -1;
  std::atomic<uint32_t> rings;
  std::atomic<int32_t> awaited;  // a peer + 1, or one of the above
};

// Tells the bell's owner, if it waits for news of `me`. What the news are was stored, sequentially
// consistently, before.
void ring(Bell& bell, int me);
// Tells it in any case: what it waits for may never come.
void ring_all(Bell& bell);

// Tells the processor that the thread turns in a loop.
inline void relax_processor() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

class Patience {  // of one waiting thread
 public:
  // `crowded`: there are more ranks on this host than cores.
  explicit Patience(bool crowded = false) : alone_(crowded ? 0 : 10) {}

  // Sleeps until `ready()`; false once the deadline has passed. `peer` -1: any peer's news.
  template <class F>
  bool wait(Bell& bell, int peer, TimePoint deadline, const F& ready) {
    if (ready()) return true;
    if (look(ready)) return true;
    for (;;) {
      bell.awaited.store(peer < 0 ? Bell::kAnyone : peer + 1);
      const uint32_t seen = bell.rings.load();
      const bool there = ready();
      const bool in_time = there || sleep(bell, seen, deadline);
      if (there || ready() || !in_time) {
        bell.awaited.store(Bell::kNobody);
        return there || ready();
      }
    }
  }

 private:
  static constexpr std::chrono::microseconds kLook{150};
  static constexpr int kMostSkipped = 16;  // waits

  template <class F>
  bool look(const F& ready) {
    using Clock = std::chrono::steady_clock;
    if (to_skip_ > 0) {
      --to_skip_;
      return false;
    }
    const auto start = Clock::now();
    for (auto now = start; now < start + kLook; now = Clock::now()) {
      if (now < start + alone_)
        for (int i = 0; i < 8; ++i) relax_processor();
      else
        sched_yield();
      if (ready()) {
        skipped_ = 0;
        return true;
      }
    }
    to_skip_ = skipped_ = std::clamp(2 * skipped_, 1, kMostSkipped);
    return false;
  }
  static bool sleep(Bell& bell, uint32_t seen, TimePoint deadline);  // false: too late

  const std::chrono::microseconds alone_;  // so long a look keeps its core
  int skipped_ = 0;                        // waits after the last look, which was in vain
  int to_skip_ = 0;                        // and those to come
};

}  // namespace sherd::dist
