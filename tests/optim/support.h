// What the optimizers' tests share: random leaves, reading tensors, and messages of errors.
#pragma once
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace sherd::test {

inline Tensor random_tensor(const Dims& sizes, uint64_t seed, DType dtype = kFloat32) {
  std::mt19937_64 engine(seed * 7919 + 17);
  std::normal_distribution<double> normal;
  std::vector<double> v(size_t(sizes.numel()));
  for (auto& x : v) x = normal(engine);
  return to_raw(tensor<double>(std::span<const double>(v), sizes), dtype);
}
inline Tensor random_leaf(const Dims& sizes, uint64_t seed, DType dtype = kFloat32) {
  return random_tensor(sizes, seed, dtype).set_requires_grad();
}
inline Tensor copy_of(const Tensor& x) {
  const Tensor y = empty(x.sizes(), x.dtype());
  copy_raw(y, x);
  return y;
}

// The elements in row-major order, as float64.
inline std::vector<double> values(const Tensor& t) {
  const Tensor x = contiguous_raw(to_raw(t, kFloat64));
  return {x.data<double>(), x.data<double>() + x.numel()};
}
inline std::string bits(const Tensor& t) {
  const Tensor x = contiguous_raw(t);
  return {x.bytes(), size_t(x.nbytes())};
}

template <class F>
std::string message_of(F f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}
#define EXPECT_SAYS(statement, part) \
  EXPECT_THAT(::sherd::test::message_of([&] { statement; }), ::testing::HasSubstr(part))

}  // namespace sherd::test
