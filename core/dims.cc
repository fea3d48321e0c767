#include "core/dims.h"

namespace sherd {

std::string to_string(const Dims& d) {
  std::string s = "[";
  for (int i = 0; i < d.n; ++i) s += (i ? ", " : "") + std::to_string(d[i]);
  return s + "]";
}

Dims contiguous_strides(const Dims& sizes) {
  Dims s;
  s.n = sizes.n;
  int64_t p = 1;
  for (int i = sizes.n - 1; i >= 0; --i)
    s[i] = p, void(__builtin_mul_overflow(p, std::max<int64_t>(sizes[i], 1), &p));
  return s;
}

Dims broadcast(const Dims& a, const Dims& b, const char* op) {
  if (a == b) return a;
  Dims r;
  r.n = std::max(a.n, b.n);
  for (int i = 1; i <= r.n; ++i) {
    const int64_t x = i <= a.n ? a[a.n - i] : 1, y = i <= b.n ? b[b.n - i] : 1;
    if (x != y && x != 1 && y != 1) fail("[", op, "] shapes ", a, " and ", b, " do not broadcast");
    r[r.n - i] = x == 1 ? y : x;
  }
  return r;
}

int wrap_dim(const char* op, int64_t dim, int ndim) {
  const int n = std::max(ndim, 1);
  if (dim < -n || dim >= n)
    fail("[", op, "] dimension ", dim, " is out of range: expected one in [", -n, ", ", n - 1, "]");
  return int(dim < 0 ? dim + n : dim);
}

}  // namespace sherd
