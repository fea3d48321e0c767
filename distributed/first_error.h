// FirstError: calls that are made although one of them failed, because others count on them; the
// first error is kept for the end.
//
//     FirstError errors;
//     for (auto& unit : units) errors.run([&] { unit->step(); });         // each of them
//     errors.run_if_none([&] { writer->append(values); });                // if all went well so far
//     errors.rethrow();                                                   // or, on all ranks:
//     throw_on_all(group, errors.text());
#pragma once
#include <exception>
#include <string>

#include "distributed/agree.h"

namespace sherd::dist {

class FirstError {
 public:
  template <class F>
  void run(const F& f) {
    try {
      f();
    } catch (...) {
      if (!error_) error_ = std::current_exception();
    }
  }
  template <class F>
  void run_if_none(const F& f) {
    if (!error_) run(f);
  }
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }
  // Empty: nothing failed.
  std::string text() const {
    return error_of([this] { rethrow(); });
  }

 private:
  std::exception_ptr error_;
};

}  // namespace sherd::dist
