#include "distributed/collective_tag.h"

#include <cstring>

namespace sherd::dist {
namespace {

// FNV-1a.
class Hash {
 public:
  void add(const void* data, size_t n) {
    auto* p = static_cast<const unsigned char*>(data);
    for (size_t i = 0; i < n; ++i) value_ = (value_ ^ p[i]) * 0x100000001b3;
  }
  void add(int64_t x) { add(&x, sizeof x); }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xcbf29ce484222325;
};

}  // namespace

const char* name_of(CollectiveKind kind) {
  return std::array{
      "broadcast", "all_reduce",     "reduce",     "all_gather", "gather",
      "scatter",   "reduce_scatter", "all_to_all", "barrier",    "destroy"}[int(kind)];
}

std::string CollectiveTag::describe() const {
  std::string s = concat("#", sequence, " ", name_of(kind));
  if (has_op) s += concat(" ", op);
  if (tensors > 0) s += concat(" of ", dtype, " ", Dims(std::span(sizes, dims)));
  if (tensors > 1) s += concat(" and ", tensors - 1, " more (", numel, " elements)");
  if (root >= 0) s += concat(", root ", root);
  if (label[0]) s += concat(", '", std::string(label, strnlen(label, sizeof label)), "'");
  return s;
}

CollectiveTag make_tag(CollectiveKind kind, std::span<const Tensor> tensors, bool same_shape,
                       const std::string& label) {
  CollectiveTag tag;
  tag.kind = kind;
  tag.tensors = int(tensors.size());
  tag.same_shape = same_shape;
  Hash hash;
  for (const Tensor& t : tensors) {
    hash.add(int64_t(t.dtype()));
    if (same_shape)
      for (int64_t n : t.sizes()) hash.add(n);
    tag.numel += t.numel();
  }
  if (!tensors.empty()) {
    tag.dtype = tensors[0].dtype();
    tag.dims = uint8_t(tensors[0].dim());
    std::copy(tensors[0].sizes().begin(), tensors[0].sizes().end(), tag.sizes);
  }
  hash.add(label.data(), label.size());
  std::memcpy(tag.label, label.data(), std::min(label.size(), sizeof tag.label - 1));
  tag.fingerprint = hash.value();
  return tag;
}

std::string difference(const CollectiveTag& mine, const CollectiveTag& theirs) {
  std::string s;
  auto differs = [&s](bool yes, const char* what) {
    if (yes) s += concat(s.empty() ? "" : ", ", what);
  };
  differs(mine.kind != theirs.kind, "operation");
  differs(mine.sequence != theirs.sequence, "sequence number");
  if (mine.kind == theirs.kind) {
    differs(mine.has_op && mine.op != theirs.op, "reduce op");
    differs(mine.root != theirs.root, "root");
    differs(mine.tensors != theirs.tensors, "number of tensors");
    differs(mine.dtype != theirs.dtype, "dtype");
    differs(mine.same_shape && Dims(std::span(mine.sizes, mine.dims)) !=
                                   Dims(std::span(theirs.sizes, theirs.dims)),
            "shape");
    differs(std::strncmp(mine.label, theirs.label, sizeof mine.label) != 0, "label");
    if (s.empty() && (mine.to_peer != theirs.from_peer || mine.from_peer != theirs.to_peer))
      s = concat("element count (", mine.to_peer, " sent for ", theirs.from_peer, " expected, ",
                 mine.from_peer, " expected for ", theirs.to_peer, " sent)");
    if (s.empty() && mine.fingerprint != theirs.fingerprint) s = "shapes, dtypes or label";
  }
  return s;
}

}  // namespace sherd::dist
