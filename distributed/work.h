// Work: the handle of one collective or transfer. Copies share it.
//
//     Work w = group->all_reduce(x, ReduceOp::kSum);   // issued; x may not be touched yet
//     ...                                              // compute
//     w.wait();                                        // x holds the sum for what this thread's
//                                                      // stream does next
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>

#include "core/stream.h"

namespace sherd::dist {

class Work {
 public:
  Work() = default;  // completed
  // `waited_ns`: grows by the time that callers stand in wait().
  explicit Work(Event event, std::shared_ptr<const int> source = nullptr,
                std::shared_ptr<std::atomic<int64_t>> waited_ns = nullptr)
      : event_(std::move(event)), source_(std::move(source)), waited_ns_(std::move(waited_ns)) {}

  // Makes the current stream wait: on the CPU the host blocks. Throws the collective's error
  // (deadline passed, a peer left, ranks that entered different collectives), which names op,
  // group, sequence number and ranks.
  void wait() const {
    if (!waited_ns_ || event_.is_done()) return event_.wait();
    using Clock = std::chrono::steady_clock;
    struct Stopwatch {
      ~Stopwatch() { total += std::chrono::nanoseconds(Clock::now() - start).count(); }
      std::atomic<int64_t>& total;
      Clock::time_point start = Clock::now();
    } stopwatch{*waited_ns_};
    event_.wait();
  }
  bool is_completed() const { return event_.is_done(); }
  const Event& event() const { return event_; }
  // Of a recv, after wait(): the rank that sent it. Otherwise -1.
  int source() const { return source_ ? *source_ : -1; }

 private:
  Event event_;
  std::shared_ptr<const int> source_;
  std::shared_ptr<std::atomic<int64_t>> waited_ns_;
};

}  // namespace sherd::dist
