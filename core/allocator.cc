#include "core/allocator.h"

#include "core/context.h"

namespace sherd {
namespace {
thread_local MemoryCategory current_category = MemoryCategory::kActivations;
}  // namespace

const char* name_of(MemoryCategory c) {
  return std::array{"activations", "parameters", "gradients", "optimizer", "communication"}[int(c)];
}

MemoryStats memory_stats() { return Context::current().cpu_allocator()->stats(); }
void reset_peak_memory() { Context::current().cpu_allocator()->reset_peak(); }

MemoryScope::MemoryScope(MemoryCategory category) : before_(current_category) {
  current_category = category;
}
MemoryScope::~MemoryScope() { current_category = before_; }
MemoryCategory MemoryScope::current() { return current_category; }

}  // namespace sherd
