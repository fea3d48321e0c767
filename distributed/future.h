// Future: a tensor that will be there, such as what a communication hook makes of a bucket.
//
//     Work work = group->all_reduce(half);
//     return Future(work, half).then([buffer](const Tensor& sum) { copy_raw(buffer, sum);
//                                                                  return buffer; });
#pragma once
#include <functional>
#include <utility>
#include <vector>

#include "core/tensor.h"
#include "distributed/work.h"

namespace sherd::dist {

// Copies share the works and the tensor; what is chained by then() belongs to the copy it returns.
class Future {
 public:
  Future() = default;                                 // of nothing
  Future(Tensor value) : value_(std::move(value)) {}  // there already
  Future(Work work, Tensor value) : value_(std::move(value)), work_(std::move(work)) {}

  bool defined() const { return value_.defined(); }
  // What f makes of the value. f runs in wait(), on the thread that waits.
  Future then(std::function<Tensor(const Tensor& value)> f) const {
    Future next = *this;
    next.then_.push_back(std::move(f));
    return next;
  }
  // Throws what the work, or a function given to then(), threw.
  Tensor wait() const {
    work_.wait();
    Tensor value = value_;
    for (auto& f : then_) value = f(value);
    return value;
  }

 private:
  Tensor value_;
  Work work_;
  std::vector<std::function<Tensor(const Tensor&)>> then_;
};

}  // namespace sherd::dist
