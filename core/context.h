// Context: what would otherwise be process-wide, for one rank. A rank is a process (the normal
// case) or a thread of one (fast tests), so the generator, the allocator with its statistics, and,
// hung on by the layers above, the default process group are members of a Context.
//
//     Context& c = Context::current();       // this thread's; the process's own where none was set
//     ContextGuard guard(rank_context);      // for the scope, this thread works for that rank
//
// A thread that a rank starts (a loader's worker, a progress thread) enters its parent's context
// first.
#pragma once
#include <memory>
#include <mutex>
#include <typeindex>
#include <unordered_map>

namespace sherd {

class Allocator;
class Generator;

class Context {
 public:
  Context();
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  static Context& current();

  const std::shared_ptr<Allocator>& cpu_allocator() const { return cpu_allocator_; }
  Generator& generator() const { return *generator_; }

  // A T of this context, made by `T()` at first use: for state of the layers above core.
  template <class T>
  T& state() {
    std::lock_guard lock(mutex_);
    auto& p = states_[std::type_index(typeid(T))];
    if (!p) p = std::make_shared<T>();
    return *static_cast<T*>(p.get());
  }

 private:
  std::shared_ptr<Allocator> cpu_allocator_;
  std::unique_ptr<Generator> generator_;
  std::mutex mutex_;
  std::unordered_map<std::type_index, std::shared_ptr<void>> states_;
};

class ContextGuard {
 public:
  explicit ContextGuard(Context& context);
  ~ContextGuard();
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  Context* before_;
};

}  // namespace sherd
