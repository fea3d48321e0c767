// Products of two matrices by a library: what the CPU's gemm is made of.
#pragma once
#include <cstdint>

#include "core/tensor.h"

namespace sherd::cpu {

// A matrix with one unit stride. Element (i, j) is data[i * ld + j], or data[j * ld + i] where
// transposed.
struct Matrix {
  char* data;
  int64_t rows, columns, ld;
  bool transposed;
  char* at(int64_t i, int64_t j, DType t) const {
    return data + (transposed ? j * ld + i : i * ld + j) * size_of(t);
  }
  Matrix block(int64_t i, int64_t j, int64_t m, int64_t n, DType t) const {
    return {at(i, j, t), m, n, ld, transposed};
  }
};

// c = a b, or c += a b. c is not transposed.
void onednn_product(const Matrix& a, const Matrix& b, const Matrix& c, bool accumulate);  // float32
template <class T>
void eigen_product(const Matrix& a, const Matrix& b, const Matrix& c, bool accumulate);
extern template void eigen_product<float>(const Matrix&, const Matrix&, const Matrix&, bool);
extern template void eigen_product<double>(const Matrix&, const Matrix&, const Matrix&, bool);
extern template void eigen_product<uint32_t>(const Matrix&, const Matrix&, const Matrix&, bool);
extern template void eigen_product<uint64_t>(const Matrix&, const Matrix&, const Matrix&, bool);

// c = relu?(a b + bias?), or c += a b, by a primitive that is made once for a set of shapes and
// then found by them. a and b of one type: float32, or bfloat16 where the processor has such
// products; bias is float32 or null.
struct PostOps {
  const float* bias = nullptr;
  bool relu = false;
  bool accumulate = false;
};
void onednn_matmul(const Matrix& a, const Matrix& b, DType in, const Matrix& c, DType out,
                   const PostOps& post);
bool onednn_has_bf16();

// y = x w of bfloat16 matrices [M, K] x [K, N], one way and the other: what Bf16Products chooses
// from.
void native_bf16_product(const Tensor& x, const Tensor& w, const Tensor& y);
void converted_bf16_product(const Tensor& x, const Tensor& w, const Tensor& y);

}  // namespace sherd::cpu
