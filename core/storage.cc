#include "core/storage.h"

#include "core/context.h"
#include "core/error.h"

namespace sherd {

Storage::Storage(int64_t bytes, Device device, MemoryCategory category)
    : bytes_(bytes), device_(device), category_(category) {
  if (device.is_cuda())
    fail("[allocate] this build has no CUDA: tensors live on the cpu or the meta device");
  if (device.is_cpu()) allocator_ = Context::current().cpu_allocator();
}

Storage::Storage(int64_t bytes, Device device) : Storage(bytes, device, MemoryScope::current()) {
  if (!device.is_meta()) reallocate();
}

Storage::Storage(char* data, int64_t bytes, Device device, std::shared_ptr<void> owner)
    : bytes_(bytes), device_(device), owner_(std::move(owner)) {
  block_.data = data;
  block_.bytes = bytes;
}

Ref<Storage> Storage::without_bytes(int64_t bytes, Device device, MemoryCategory category) {
  return Ref<Storage>(new Storage(bytes, device, category));
}

Storage::~Storage() { release(); }

void Storage::release(const Event& event) {
  if (allocator_ && block_.data) allocator_->deallocate(block_, event);
  block_ = {};
  owner_.reset();
}

void Storage::reallocate(const Stream& stream) {
  if (block_.data || bytes_ == 0 || device_.is_meta()) return;
  if (!allocator_) fail("[reallocate] this Storage wraps memory that it does not own");
  block_ = allocator_->allocate(bytes_, category_, stream);
}

void Storage::set_category(MemoryCategory category) {
  category_ = category;
  if (allocator_ && block_.data) allocator_->recategorize(block_, category);
}

}  // namespace sherd
