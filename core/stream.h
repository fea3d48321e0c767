// Stream and Event: the order of work on a device. On the CPU the host thread is the compute
// stream: a kernel has run when its call returns, so an event recorded there is done at once; but
// an event of a collective is done only when a progress thread has signalled it, and then
// `stream.wait(event)` blocks the host. On CUDA (later) it makes the device's stream wait and the
// host goes on. Nothing outside core/ may assume that a kernel has ended when its call returns:
// what depends on it waits for an event.
#pragma once
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>

#include "core/device.h"

namespace sherd {

// Copies share one state. A default-constructed Event is done.
class Event {
 public:
  Event() = default;
  static Event pending();                    // not done until set() or set_error()
  bool is_done() const;                      // done, with or without an error
  void set() const;                          // marks it done and wakes the waiters
  void set_error(std::exception_ptr) const;  // done; wait() throws it
  void wait() const;                         // blocks the host; throws the error, if one was set

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    std::exception_ptr error;
  };
  std::shared_ptr<State> state_;
};

class Stream {
 public:
  explicit Stream(Device device = kCPU) : device_(device) {}
  Device device() const { return device_; }
  void wait(const Event& event) const {
    event.wait();
  }                                    // later work on this stream runs after the event
  Event record() const { return {}; }  // done when all work so far on this stream is

 private:
  Device device_;
};

// The stream that kernels called by this thread run on.
Stream current_stream(Device device);

}  // namespace sherd
