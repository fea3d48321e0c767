// Products and transposes of small matrices that stay in the cache: what attention is made of.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#include "core/cpu/isa.h"

namespace sherd::cpu {

// The columns of a right operand and of a result come in multiples of this: fill up with zeros.
inline constexpr int64_t kTileColumns = 16;
constexpr int64_t tile_columns(int64_t n) {
  return (n + kTileColumns - 1) / kTileColumns * kTileColumns;
}

// Elements at data[i * row + j * column].
template <class T>
struct TileView {
  const T* data;
  int64_t row, column;
  TileView from_row(int64_t i) const { return {data + i * row, row, column}; }
  TileView transposed() const { return {data, column, row}; }
};

[[gnu::always_inline]] inline float fused(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}
[[gnu::always_inline]] inline double fused(double a, double b, double c) {
  return __builtin_fma(a, b, c);
}

// R rows of the result and kSteps steps of k: the result is loaded and stored once for all of them.
template <int R, int kSteps, bool kAdd, class T>
[[gnu::always_inline]] inline void tile_steps(int64_t n, TileView<T> a, const T* __restrict b,
                                              int64_t ldb, T* __restrict c, int64_t ldc) {
  T x[R][kSteps];
  for (int r = 0; r < R; ++r)
    for (int u = 0; u < kSteps; ++u) x[r][u] = a.data[r * a.row + u * a.column];
#pragma GCC ivdep
  for (int64_t j = 0; j < n; ++j) {
    T s[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) s[r] = kAdd ? c[r * ldc + j] : T(0);
#pragma GCC unroll 8
    for (int u = 0; u < kSteps; ++u)
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) s[r] = fused(x[r][u], b[u * ldb + j], s[r]);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) c[r * ldc + j] = s[r];
  }
}
// R rows of the result. Each element's sum is one chain of fused multiply-adds in the order of k.
template <int R, class T>
[[gnu::always_inline]] inline void tile_rows(int64_t n, int64_t depth, TileView<T> a, const T* b,
                                             int64_t ldb, T* c, int64_t ldc, bool accumulate) {
  constexpr int kSteps = 4;
  int64_t k = 0;
  if (!accumulate) {
    if (depth >= kSteps) {
      tile_steps<R, kSteps, false>(n, a, b, ldb, c, ldc);
      k = kSteps;
    } else {
      for (int r = 0; r < R; ++r) std::fill_n(c + r * ldc, n, T(0));
    }
  }
  auto at = [&] { return TileView<T>{a.data + k * a.column, a.row, a.column}; };
  for (; k + kSteps <= depth; k += kSteps)
    tile_steps<R, kSteps, true>(n, at(), b + k * ldb, ldb, c, ldc);
  for (; k < depth; ++k) tile_steps<R, 1, true>(n, at(), b + k * ldb, ldb, c, ldc);
}
template <int R, class T>
[[gnu::always_inline]] inline void tile_body(int64_t m, int64_t n, int64_t depth, TileView<T> a,
                                             const T* b, int64_t ldb, T* c, int64_t ldc,
                                             bool accumulate) {
  n = n / kTileColumns * kTileColumns;  // the loops need no remainder
  int64_t i = 0;
  auto rows = [&]<int kRows>(std::integral_constant<int, kRows>) {
    for (; i + kRows <= m; i += kRows)
      tile_rows<kRows>(n, depth, a.from_row(i), b, ldb, c + i * ldc, ldc, accumulate);
  };
  rows(std::integral_constant<int, R>{});
  if constexpr (R > 4) rows(std::integral_constant<int, 4>{});
  rows(std::integral_constant<int, 2>{});
  rows(std::integral_constant<int, 1>{});
}
template <class T>
SHERD_AVX2 void tile_product_avx2(int64_t m, int64_t n, int64_t depth, TileView<T> a, const T* b,
                                  int64_t ldb, T* c, int64_t ldc, bool accumulate) {
  tile_body<4>(m, n, depth, a, b, ldb, c, ldc, accumulate);
}
template <class T>
SHERD_AVX512 void tile_product_avx512(int64_t m, int64_t n, int64_t depth, TileView<T> a,
                                      const T* b, int64_t ldb, T* c, int64_t ldc, bool accumulate) {
  tile_body<6>(m, n, depth, a, b, ldb, c, ldc, accumulate);
}
// c[m, n] = a[m, depth] b[depth, n], or += it. n is rounded up to kTileColumns in b and c; their
// rows are ldb and ldc apart. The bits of an element depend on its row of a and its column of b
// alone.
template <class T>
void tile_product(int64_t m, int64_t n, int64_t depth, TileView<T> a, const T* b, int64_t ldb, T* c,
                  int64_t ldc, bool accumulate) {
  auto f = has_avx512() ? tile_product_avx512<T> : tile_product_avx2<T>;
  f(m, tile_columns(n), depth, a, b, ldb, c, ldc, accumulate);
}

// to[j * ldt + i] = from(i, j) for i < rows, j < columns
template <class T>
void transpose_tile(TileView<T> from, int64_t rows, int64_t columns, T* to, int64_t ldt) {
  int64_t i = 0;
  if constexpr (sizeof(T) == 4)
    if (from.column == 1)
      for (; i + 8 <= rows; i += 8) {
        int64_t j = 0;
        for (; j + 8 <= columns; j += 8) {
          __m256 r[8], s[8];
          for (int k = 0; k < 8; ++k) r[k] = _mm256_loadu_ps(from.data + (i + k) * from.row + j);
          for (int k = 0; k < 8; k += 2)
            s[k] = _mm256_unpacklo_ps(r[k], r[k + 1]),
            s[k + 1] = _mm256_unpackhi_ps(r[k], r[k + 1]);
          for (int k = 0; k < 8; k += 4) {
            r[k] = _mm256_shuffle_ps(s[k], s[k + 2], 0x44);
            r[k + 1] = _mm256_shuffle_ps(s[k], s[k + 2], 0xee);
            r[k + 2] = _mm256_shuffle_ps(s[k + 1], s[k + 3], 0x44);
            r[k + 3] = _mm256_shuffle_ps(s[k + 1], s[k + 3], 0xee);
          }
          for (int k = 0; k < 4; ++k) {
            _mm256_storeu_ps(to + (j + k) * ldt + i, _mm256_permute2f128_ps(r[k], r[k + 4], 0x20));
            _mm256_storeu_ps(to + (j + k + 4) * ldt + i,
                             _mm256_permute2f128_ps(r[k], r[k + 4], 0x31));
          }
        }
        for (; j < columns; ++j)
          for (int k = 0; k < 8; ++k) to[j * ldt + i + k] = from.data[(i + k) * from.row + j];
      }
  for (; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j)
      to[j * ldt + i] = from.data[i * from.row + j * from.column];
}

}  // namespace sherd::cpu
