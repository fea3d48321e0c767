#include "core/context.h"

#include "core/allocator.h"
#include "core/generator.h"

namespace sherd {
namespace {
thread_local Context* current_context = nullptr;
}  // namespace

Context::Context()
    : cpu_allocator_(make_cpu_allocator()), generator_(std::make_unique<Generator>()) {}
Context::~Context() = default;

Context& Context::current() {
  if (current_context) return *current_context;
  static Context* const process =
      new Context;  // never destroyed: tensors in statics outlive main()
  return *process;
}

ContextGuard::ContextGuard(Context& context) : before_(current_context) {
  current_context = &context;
}
ContextGuard::~ContextGuard() { current_context = before_; }

}  // namespace sherd
