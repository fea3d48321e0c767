#include "distributed/outputs.h"

#include <algorithm>
#include <tuple>
#include <vector>

#include "core/pointwise.h"

namespace sherd::dist {
namespace {

// From its first to behind its last element, in bytes of its Storage.
struct Extent {
  size_t index;
  const Tensor* tensor;
  int64_t lo, hi;
  auto order() const { return std::tuple(tensor->storage().get(), lo); }
};

Extent extent_of(const Tensor& t, size_t index) {
  int64_t last = t.storage_offset();
  for (int i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
  const int64_t bytes = size_of(t.dtype());
  return {index, &t, t.storage_offset() * bytes, (last + 1) * bytes};
}

// Each dimension steps over all that lies in those of smaller strides. What does not is looked at
// element by element.
bool is_apart(const Tensor& t) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int i = 0; i < t.dim(); ++i)
    if (t.size(i) > 1) dims.emplace_back(t.stride(i), t.size(i));
  std::ranges::sort(dims);
  int64_t covered = 1;
  for (auto& [stride, size] : dims) {
    if (stride < covered) return false;
    covered += stride * (size - 1);
  }
  return true;
}

class Places {
 public:
  Places(int64_t lo, int64_t hi, int64_t unit)
      : lo_(lo), unit_(unit), owners_(size_t((hi - lo) / unit), kNobody) {}

  // Takes the places of all elements. Whose the first is that was taken before; kNobody: none was.
  int64_t take(const Extent& e) { return take(e, 0, e.lo); }
  static constexpr int64_t kNobody = -1;

 private:
  int64_t take(const Extent& e, int dim, int64_t at) {
    const int64_t bytes = size_of(e.tensor->dtype());
    if (dim == e.tensor->dim()) {
      for (int64_t k = at; k < at + bytes; k += unit_) {
        int64_t& owner = owners_[size_t((k - lo_) / unit_)];
        if (owner != kNobody) return owner;
        owner = int64_t(e.index);
      }
      return kNobody;
    }
    for (int64_t i = 0; i < e.tensor->size(dim); ++i)
      if (const int64_t owner = take(e, dim + 1, at + i * e.tensor->stride(dim) * bytes);
          owner != kNobody)
        return owner;
    return kNobody;
  }

  int64_t lo_, unit_;
  std::vector<int64_t> owners_;
};

}  // namespace

void check_outputs(const char* op, const char* what, std::span<const Tensor> outputs) {
  std::vector<Extent> extents;
  for (size_t i = 0; i < outputs.size(); ++i)
    if (outputs[i].defined() && outputs[i].numel() > 0) extents.push_back(extent_of(outputs[i], i));
  std::ranges::sort(extents, {}, &Extent::order);
  const auto refuse = [&](size_t a, size_t b) {
    const auto name = [&](size_t i) {
      return outputs.size() == 1 ? std::string(what) : concat(what, "[", i, "]");
    };
    if (a == b)
      fail(
          "[", op, "] several elements of ", name(a),
          " lie in one place (is it expanded?): give a tensor of its own memory, as clone() makes");
    fail("[", op, "] ", name(std::min(a, b)), " and ", name(std::max(a, b)),
         " share memory: give each its own");
  };
  for (auto begin = extents.begin(); begin != extents.end();) {
    // Those that may touch.
    auto end = begin + 1, last = begin;
    for (; end != extents.end() && end->tensor->storage() == begin->tensor->storage() &&
           end->lo < last->hi;
         ++end) {
      if (end->tensor->is_contiguous() && last->tensor->is_contiguous())
        refuse(last->index, end->index);
      if (end->hi > last->hi) last = end;
    }
    for (auto e = begin; e != end; ++e)
      if (is_expanded(*e->tensor)) refuse(e->index, e->index);
    constexpr int64_t kMostBytes = int64_t(4) << 20;
    if (last->hi - begin->lo <= kMostBytes && (end - begin > 1 || !is_apart(*begin->tensor))) {
      int64_t unit = size_of(begin->tensor->dtype());
      for (auto e = begin; e != end; ++e)
        unit = std::min<int64_t>(unit, size_of(e->tensor->dtype()));
      Places places(begin->lo, last->hi, unit);
      for (auto e = begin; e != end; ++e)
        if (const int64_t owner = places.take(*e); owner != Places::kNobody)
          refuse(size_t(owner), e->index);
    }
    begin = end;
  }
}

}  // namespace sherd::dist
