// Work: the handle of one collective or transfer. Copies share it.
//
//     Work w = group->all_reduce(x, ReduceOp::kSum);   // issued; x may not be touched yet
//     ...                                              // compute
//     w.wait();                                        // x holds the sum for what this thread's
//                                                      // stream does next
#pragma once
#include <memory>

#include "core/stream.h"

namespace sherd::dist {

class Work {
 public:
  Work() = default;  // completed
  explicit Work(Event event, std::shared_ptr<const int> source = nullptr)
      : event_(std::move(event)), source_(std::move(source)) {}

  // Makes the current stream wait: on the CPU the host blocks. Throws the collective's error
  // (deadline passed, a peer left, ranks that entered different collectives), which names op,
  // group, sequence number and ranks.
  void wait() const { event_.wait(); }
  bool is_completed() const { return event_.is_done(); }
  const Event& event() const { return event_; }
  // Of a recv, after wait(): the rank that sent it. Otherwise -1.
  int source() const { return source_ ? *source_ : -1; }

 private:
  Event event_;
  std::shared_ptr<const int> source_;
};

}  // namespace sherd::dist
