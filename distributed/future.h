// Future: a tensor that will be there, such as what a communication hook makes of a bucket.
//
//     Work work = group->all_reduce(half);
//     return Future(work, half).then([buffer](const Tensor& sum) { copy_raw(buffer, sum);
//                                                                  return buffer; });
#pragma once
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "core/tensor.h"
#include "distributed/work.h"

namespace sherd::dist {

// Copies share the work and the value, and may be waited for by several threads. What then() chains
// runs once, in the first wait(), on the thread that waits; if it throws, each wait() does.
class Future {
 public:
  Future() = default;                                         // of nothing
  Future(Tensor value) : Future(Work(), std::move(value)) {}  // there already
  Future(Work work, Tensor value)
      : state_(std::make_shared<State>(std::move(work), std::move(value))) {}

  // What f makes of the value.
  Future then(std::function<Tensor(const Tensor& value)> f) const {
    Future next{Work(), Tensor()};
    next.state_->make = [before = *this, f = std::move(f)] { return f(before.wait()); };
    return next;
  }
  // Throws what the work, or a function given to then(), threw.
  Tensor wait() const {
    if (!state_) return {};
    state_->work.wait();
    std::lock_guard lock(state_->mutex);
    if (const auto make = std::exchange(state_->make, nullptr)) {
      try {
        state_->value = make();
      } catch (...) {
        state_->error = std::current_exception();
      }
    }
    if (state_->error) std::rethrow_exception(state_->error);
    return state_->value;
  }

 private:
  struct State {
    State(Work w, Tensor v) : work(std::move(w)), value(std::move(v)) {}
    Work work;
    Tensor value;
    std::mutex mutex;
    std::function<Tensor()> make;  // the value, once
    std::exception_ptr error;
  };
  std::shared_ptr<State> state_;
};

}  // namespace sherd::dist
