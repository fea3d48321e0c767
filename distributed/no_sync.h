// NoSync: while it lives, backwards do not exchange gradients: they add up locally (see
// grad_bucket.h). The next backward without it exchanges the sum. Read when a backward begins.
#pragma once
#include <memory>
#include <type_traits>
#include <utility>

namespace sherd::dist {

// `Reducer` has syncs(), set_sync(what that returned) and set_sync(bool).
template <class Reducer>
class NoSync {
 public:
  explicit NoSync(std::shared_ptr<Reducer> reducer)
      : reducer_(std::move(reducer)), before_(reducer_->syncs()) {
    reducer_->require_idle("no_sync");
    reducer_->set_sync(false);
  }
  ~NoSync() { reducer_->set_sync(before_); }
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  std::shared_ptr<Reducer> reducer_;
  std::decay_t<decltype(std::declval<Reducer>().syncs())> before_;
};

}  // namespace sherd::dist
