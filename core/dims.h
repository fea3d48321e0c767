// Dims: sizes, strides or a list of dimensions, up to kMaxDims of them, without an allocation.
#pragma once
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "core/error.h"

namespace sherd {

inline constexpr int kMaxDims = 8;

struct Dims {
  int n = 0;
  int64_t d[kMaxDims];

  Dims() = default;
  Dims(std::initializer_list<int64_t> v) : Dims(std::span(v.begin(), v.size())) {}
  Dims(std::span<const int64_t> v) {
    for (auto x : v) push(x);
  }
  Dims(const std::vector<int64_t>& v) : Dims(std::span(v)) {}

  void push(int64_t x) {
    if (n == kMaxDims) fail("a tensor has at most ", kMaxDims, " dimensions");
    d[n++] = x;
  }
  int64_t& operator[](int i) { return d[i]; }
  int64_t operator[](int i) const { return d[i]; }
  const int64_t* begin() const { return d; }
  const int64_t* end() const { return d + n; }
  bool operator==(const Dims& o) const { return n == o.n && std::equal(begin(), end(), o.begin()); }
  // The product; 1 for no dimensions.
  int64_t numel() const {
    uint64_t p = 1;  // beside a 0, others may overflow
    for (auto x : *this) p *= uint64_t(x);
    return int64_t(p);
  }
};

std::string to_string(const Dims& d);  // "[2, 3]"
inline std::ostream& operator<<(std::ostream& out, const Dims& d) { return out << to_string(d); }
Dims contiguous_strides(const Dims& sizes);                    // of a row-major tensor, in elements
Dims broadcast(const Dims& a, const Dims& b, const char* op);  // Error names op and both shapes
// A dimension in [-ndim, ndim) as one in [0, ndim); 0-d tensors accept 0 and -1.
int wrap_dim(const char* op, int64_t dim, int ndim);

}  // namespace sherd
