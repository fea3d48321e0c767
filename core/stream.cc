#include "core/stream.h"

namespace sherd {

Event Event::pending() {
  Event e;
  e.state_ = std::make_shared<State>();
  return e;
}

bool Event::is_done() const {
  if (!state_) return true;
  std::lock_guard lock(state_->mutex);
  return state_->done;
}

void Event::set() const { set_error(nullptr); }

void Event::set_error(std::exception_ptr error) const {
  if (!state_) return;
  {
    std::lock_guard lock(state_->mutex);
    state_->done = true;
    state_->error = error;
  }
  state_->changed.notify_all();
}

void Event::wait() const {
  if (!state_) return;
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [&] { return state_->done; });
  if (state_->error) std::rethrow_exception(state_->error);
}

Stream current_stream(Device device) { return Stream(device); }

}  // namespace sherd
