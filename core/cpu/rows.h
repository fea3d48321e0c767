// What kernels over rows share: rows in the type that is computed in, and sums and maxima whose
// order of operations follows from the length alone.
#pragma once
#include <vector>

#include "core/cpu/convert.h"
#include "core/tensor.h"

namespace sherd::cpu {

// The rows [n, columns] of a tensor, in T: in place, or a block at a time where the dtype differs.
template <class T>
class Rows {
 public:
  Rows(const Tensor& t, int64_t columns)
      : Rows(t, columns, t.defined() && t.dim() == 2 ? t.stride(0) : columns) {}
  Rows(const Tensor& t, int64_t columns, int64_t row_stride) : columns_(columns) {
    if (!t.defined()) return;
    data_ = t.bytes(), size_ = size_of(t.dtype()), row_bytes_ = row_stride * size_;
    same_ = t.dtype() == dtype_of<T>;
    in_ = convert(dtype_of<T>, t.dtype()), out_ = convert(t.dtype(), dtype_of<T>);
  }
  bool defined() const { return data_; }
  // Room for a converted row; empty where none is needed.
  std::vector<T> block() const { return std::vector<T>(same_ ? 0 : size_t(columns_)); }
  const T* read(int64_t row, std::vector<T>& block) const {
    if (same_) return reinterpret_cast<const T*>(data_ + row * row_bytes_);
    in_(reinterpret_cast<char*>(block.data()), sizeof(T), data_ + row * row_bytes_, size_,
        columns_);
    return block.data();
  }
  // Where to put a row, which write() then stores.
  T* target(int64_t row, std::vector<T>& block) const {
    return same_ ? reinterpret_cast<T*>(data_ + row * row_bytes_) : block.data();
  }
  void write(int64_t row, const std::vector<T>& block) const {
    if (!same_)
      out_(data_ + row * row_bytes_, size_, reinterpret_cast<const char*>(block.data()), sizeof(T),
           columns_);
  }

 private:
  char* data_ = nullptr;
  int64_t columns_, size_ = 0, row_bytes_ = 0;
  bool same_ = true;
  Convert in_ = nullptr, out_ = nullptr;
};

// A vector of n elements in T, `otherwise` in each place where the tensor is undefined.
template <class T>
std::vector<T> parameter(const Tensor& t, int64_t n, T otherwise) {
  std::vector<T> v(size_t(n), otherwise);
  if (t.defined())
    convert(dtype_of<T>, t.dtype())(reinterpret_cast<char*>(v.data()), sizeof(T), t.bytes(),
                                    size_of(t.dtype()), n);
  return v;
}

template <class F>
void in_compute_type(DType d, F f) {
  d == kFloat64 ? f(Type<double>{}) : f(Type<float>{});
}

// Rows a piece of parallel_for takes: enough elements to be worth a thread's while.
inline int64_t row_grain(int64_t columns) {
  return std::max<int64_t>(1, 32768 / std::max<int64_t>(1, columns));
}

// Partial results in a fixed number of lanes, so that AVX2 and AVX-512 combine in the same order.
inline constexpr int kLanes = 64;
template <class T, class F, class Combine>
[[gnu::always_inline]] inline T fold_of(int64_t n, T start, F f, Combine combine) {
  T lane[kLanes];
  for (int l = 0; l < kLanes; ++l) lane[l] = start;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int l = 0; l < kLanes; ++l) lane[l] = combine(lane[l], f(i + l));
  for (int l = 0; l < n - i; ++l) lane[l] = combine(lane[l], f(i + l));
  for (int m = kLanes / 2; m; m /= 2)
    for (int l = 0; l < m; ++l) lane[l] = combine(lane[l], lane[l + m]);
  return lane[0];
}
// f(0) + ... + f(n - 1)
template <class T, class F>
[[gnu::always_inline]] inline T sum_of(int64_t n, F f) {
  return fold_of<T>(n, T(0), f, [](T a, T b) { return a + b; });
}

}  // namespace sherd::cpu
