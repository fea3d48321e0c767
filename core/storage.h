// Storage: a run of bytes with an identity that outlives them. Bytes can be released and allocated
// again, in stream order, while tensors (views that autograd saved, say) go on pointing at the
// Storage:
//
//     storage->release(stream.record());   // bytes go back to the allocator; views stay objects
//     storage->reallocate(stream);         // fresh, unset bytes for the same views
//
// FSDP frees and refills full parameters this way. Reading a released Storage is an error that says
// so.
#pragma once
#include <functional>

#include "core/allocator.h"
#include "core/ref.h"

namespace sherd {

class Storage : public Counted {
 public:
  // Allocates `bytes` on `device` under the current MemoryScope's category; the meta device has
  // none.
  Storage(int64_t bytes, Device device);
  // Wraps memory that somebody else owns: `owner` is kept until the bytes are released for good. It
  // cannot be reallocated.
  Storage(char* data, int64_t bytes, Device device, std::shared_ptr<void> owner);
  // An identity whose bytes are not there yet.
  static Ref<Storage> without_bytes(int64_t bytes, Device device, MemoryCategory category);
  ~Storage() override;

  char* data() const { return block_.data; }
  int64_t bytes() const { return bytes_; }
  Device device() const { return device_; }
  bool has_bytes() const { return block_.data || bytes_ == 0 || device_.is_meta(); }

  void release(const Event& event = {});
  void reallocate(const Stream& stream = Stream());
  MemoryCategory category() const { return category_; }
  void set_category(MemoryCategory category);

 private:
  Storage(int64_t bytes, Device device, MemoryCategory category);

  MemoryBlock block_;
  int64_t bytes_ = 0;
  Device device_;
  MemoryCategory category_ = MemoryCategory::kActivations;
  std::shared_ptr<Allocator> allocator_;
  std::shared_ptr<void> owner_;
};

}  // namespace sherd
