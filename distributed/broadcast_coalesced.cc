#include "distributed/broadcast_coalesced.h"

#include <algorithm>
#include <cstring>

namespace sherd::dist {
namespace {

struct Chunk {
  std::vector<size_t> tensors;
  std::vector<int64_t> offsets;  // bytes
  int64_t bytes = 0;
  Tensor buffer;  // [bytes]
  Work work;
};
// So many are under way at once: what lies in buffers is bounded by it.
constexpr size_t kInFlight = 2;

// Any element lies at a multiple of its own size.
int64_t aligned(int64_t bytes) { return (bytes + 15) / 16 * 16; }

Tensor place_in(const Tensor& buffer, int64_t offset, const Tensor& like) {
  return over_storage(buffer.storage(), like.sizes(), like.dtype(), offset / size_of(like.dtype()));
}

}  // namespace

void broadcast_coalesced(const Group& group, const std::vector<Tensor>& tensors, int root,
                         const std::string& label, int64_t buffer_bytes) {
  if (group->size() == 1) return;
  std::vector<Chunk> chunks;
  Chunk open;
  auto close = [&] {
    if (!open.tensors.empty()) chunks.push_back(std::move(open));
    open = {};
  };
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t bytes = tensors[i].nbytes();
    if (bytes == 0) continue;
    if (open.bytes + bytes > buffer_bytes) close();
    open.tensors.push_back(i);
    open.offsets.push_back(open.bytes);
    open.bytes = aligned(open.bytes + bytes);
  }
  close();

  const bool is_root = group->rank() == root;
  const auto take = [&](Chunk& c) {
    c.work.wait();
    for (size_t k = 0; !is_root && k < c.tensors.size(); ++k) {
      const Tensor& t = tensors[c.tensors[k]];
      const Tensor came = place_in(c.buffer, c.offsets[k], t);
      if (std::memcmp(contiguous_raw(t).bytes(), came.bytes(), size_t(t.nbytes())) == 0) continue;
      copy_raw(t, came);
      t.bump_version();
    }
    c.buffer = {};
  };
  for (size_t i = 0; i < chunks.size(); ++i) {
    Chunk& c = chunks[i];
    if (i >= kInFlight) take(chunks[i - kInFlight]);
    c.buffer = empty({c.bytes}, kUInt8);
    if (is_root) std::memset(c.buffer.bytes(), 0, size_t(c.bytes));  // what lies between tensors
    for (size_t k = 0; is_root && k < c.tensors.size(); ++k) {
      const Tensor& t = tensors[c.tensors[k]];
      copy_raw(place_in(c.buffer, c.offsets[k], t), t);
    }
    c.work = group->broadcast(c.buffer, root, {.label = label});
  }
  for (size_t i = chunks.size() - std::min(chunks.size(), kInFlight); i < chunks.size(); ++i)
    take(chunks[i]);
}

}  // namespace sherd::dist
