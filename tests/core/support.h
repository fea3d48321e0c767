// What the kernels' tests share: random inputs, layouts, comparisons, and the two instruction sets.
#pragma once
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "core/cpu/isa.h"
#include "core/parallel_for.h"
#include "core/tensor.h"

namespace sherd::test {

// Uniform in [low, high), from a fixed seed.
inline Tensor random_tensor(const Dims& sizes, uint64_t seed, DType dtype = kFloat32,
                            double low = -1, double high = 1) {
  std::mt19937_64 engine(seed * 7919 + 17);
  std::uniform_real_distribution<double> uniform(low, high);
  std::vector<double> v(size_t(sizes.numel()));
  for (auto& x : v) x = uniform(engine);
  const Tensor t = empty(sizes, dtype);
  copy_raw(t, tensor<double>(std::span<const double>(v), sizes));
  return t;
}
inline Tensor random_indices(int64_t n, int64_t below, uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::vector<int64_t> v(static_cast<size_t>(n));
  for (auto& x : v) x = int64_t(engine() % uint64_t(below));
  return tensor<int64_t>(v);
}

// The elements in row-major order, as float64.
inline std::vector<double> values(const Tensor& t) {
  const Tensor x = contiguous_raw(to_raw(contiguous_raw(t), kFloat64));
  const double* p = x.data<double>();
  return {p, p + x.numel()};
}
inline Tensor from_values(const std::vector<double>& v, const Dims& sizes, DType dtype) {
  const Tensor t = empty(sizes, dtype);
  copy_raw(t, tensor<double>(std::span<const double>(v), sizes));
  return t;
}

// The same values over memory that begins one element after an aligned address.
inline Tensor shifted(const Tensor& t) {
  const Tensor memory = empty({t.numel() + 1}, t.dtype());
  const Tensor y = over_storage(memory.storage(), t.sizes(), t.dtype(), 1);
  copy_raw(y, t);
  return y;
}
// The same values with the last two dimensions exchanged in memory.
inline Tensor transposed_layout(const Tensor& t) {
  Dims sizes = t.sizes();
  std::swap(sizes[sizes.n - 1], sizes[sizes.n - 2]);
  const Tensor memory = empty(sizes, t.dtype());
  Dims strides = memory.strides();
  std::swap(strides[sizes.n - 1], strides[sizes.n - 2]);
  const Tensor y = memory.as_strided_raw(t.sizes(), strides, 0);
  copy_raw(y, t);
  return y;
}
// The same values with `gap` unused elements after each row of the last dimension.
inline Tensor padded_layout(const Tensor& t, int64_t gap = 3) {
  Dims sizes = t.sizes();
  sizes[sizes.n - 1] += gap;
  const Tensor memory = full(sizes, 99, t.dtype());
  const Tensor y = memory.as_strided_raw(t.sizes(), memory.strides(), 0);
  copy_raw(y, t);
  return y;
}

// |got - want| <= atol + rtol |want| in every element; NaN and infinities must be the same.
inline void expect_close(const std::vector<double>& got, const std::vector<double>& want,
                         double rtol, double atol, const std::string& what = "") {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::isnan(want[i])) {
      ASSERT_TRUE(std::isnan(got[i])) << what << " at " << i << ": " << got[i] << ", expected NaN";
    } else if (std::isinf(want[i])) {
      ASSERT_EQ(got[i], want[i]) << what << " at " << i;
    } else {
      ASSERT_LE(std::abs(got[i] - want[i]), atol + rtol * std::abs(want[i]))
          << what << " at " << i << ": " << got[i] << ", expected " << want[i];
    }
  }
}
inline void expect_close(const Tensor& got, const std::vector<double>& want, double rtol,
                         double atol, const std::string& what = "") {
  expect_close(values(got), want, rtol, atol, what);
}

inline bool same_bits(const Tensor& a, const Tensor& b) {
  const Tensor x = contiguous_raw(a), y = contiguous_raw(b);
  return x.dtype() == y.dtype() && x.sizes() == y.sizes() &&
         (x.numel() == 0 || std::memcmp(x.bytes(), y.bytes(), size_t(x.nbytes())) == 0);
}

// Rounding to a dtype: relative error of one operation.
inline double epsilon(DType d) {
  return d == kBFloat16 ? 0x1p-8 : d == kFloat16 ? 0x1p-11 : d == kFloat64 ? 0x1p-52 : 0x1p-23;
}

class Threads {
 public:
  explicit Threads(int n) : before_(num_threads()) { set_num_threads(n); }
  ~Threads() { set_num_threads(before_); }

 private:
  int before_;
};
class OnlyAvx2 {
 public:
  OnlyAvx2() : before_(cpu::has_avx512()) { cpu::set_avx512(false); }
  ~OnlyAvx2() { cpu::set_avx512(before_); }

 private:
  bool before_;
};

// f() gives tensors; they must have the same bits on AVX2 as on AVX-512, and on one thread as on
// three.
template <class F>
void expect_same_bits_everywhere(F f, const std::string& what = "") {
  std::vector<Tensor> first;
  {
    Threads one(1);
    first = f();
  }
  auto compare = [&](const char* where) {
    const std::vector<Tensor> other = f();
    ASSERT_EQ(first.size(), other.size());
    for (size_t i = 0; i < first.size(); ++i)
      EXPECT_TRUE(same_bits(first[i], other[i]))
          << what << " differs " << where << ", result " << i;
  };
  {
    Threads three(3);
    compare("on three threads");
  }
  OnlyAvx2 guard;
  compare("on AVX2");
}

}  // namespace sherd::test
