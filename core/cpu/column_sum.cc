#include "core/column_sum.h"

#include "core/cpu/isa.h"
#include "core/cpu/rows.h"
#include "core/parallel_for.h"

namespace sherd::cpu {
namespace {

constexpr int64_t kStrip =
    512;  // columns summed together: sums and the rows' pieces stay in the cache
constexpr int64_t kPiece =
    256;  // rows summed one after another; the pieces' sums are added in order

template <class T>
[[gnu::always_inline]] inline void add_rows(T* __restrict sum, const T* __restrict x, int64_t ld,
                                            int64_t rows, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= rows; i += 8, x += 8 * ld)  // a sum is loaded and stored once for eight rows
    for (int64_t j = 0; j < n; ++j) {
      T s = sum[j];
      for (int64_t k = 0; k < 8; ++k) s += x[k * ld + j];
      sum[j] = s;
    }
  for (; i < rows; ++i, x += ld)
    for (int64_t j = 0; j < n; ++j) sum[j] += x[j];
}
template <class T>
SHERD_AVX2 void add_rows_avx2(T* sum, const T* x, int64_t ld, int64_t rows, int64_t n) {
  add_rows(sum, x, ld, rows, n);
}
template <class T>
SHERD_AVX512 void add_rows_avx512(T* sum, const T* x, int64_t ld, int64_t rows, int64_t n) {
  add_rows(sum, x, ld, rows, n);
}

void column_sum(const Stream&, const Tensor& x, const Tensor& y, bool accumulate) {
  const int64_t rows = x.size(0), n = x.size(1), ld = x.stride(0), size = size_of(x.dtype());
  if (n == 0) return;
  const int64_t strips = (n + kStrip - 1) / kStrip,
                pieces = std::max<int64_t>(1, (rows + kPiece - 1) / kPiece);
  in_compute_type(x.dtype(), [&]<class T>(Type<T>) {
    std::vector<T> sums(size_t(pieces * n));
    const bool same = x.dtype() == dtype_of<T>;
    const Convert widen = convert(dtype_of<T>, x.dtype());
    auto add = has_avx512() ? add_rows_avx512<T> : add_rows_avx2<T>;
    parallel_for(strips * pieces, 1, [&](int64_t begin, int64_t end) {
      constexpr int64_t kConverted = 8;  // rows
      T block[kConverted * kStrip];
      for (int64_t task = begin; task < end; ++task) {
        const int64_t p = task / strips, j = task % strips * kStrip, m = std::min(kStrip, n - j),
                      last = std::min(rows, (p + 1) * kPiece);
        T* sum = &sums[size_t(p * n + j)];
        const char* from = x.bytes() + j * size;
        if (same) {
          add(sum, reinterpret_cast<const T*>(from) + p * kPiece * ld, ld, last - p * kPiece, m);
          continue;
        }
        for (int64_t i = p * kPiece; i < last; i += kConverted) {
          const int64_t count = std::min(kConverted, last - i);
          for (int64_t k = 0; k < count; ++k)
            widen(reinterpret_cast<char*>(block + k * kStrip), sizeof(T),
                  from + (i + k) * ld * size, size, m);
          add(sum, block, kStrip, count, m);
        }
      }
    });
    for (int64_t p = 1; p < pieces; ++p)
      for (int64_t j = 0; j < n; ++j) sums[size_t(j)] += sums[size_t(p * n + j)];
    if (accumulate) {
      const auto before = parameter<T>(y, n, 0);
      for (int64_t j = 0; j < n; ++j) sums[size_t(j)] += before[size_t(j)];
    }
    convert(y.dtype(), dtype_of<T>)(y.bytes(), size_of(y.dtype()),
                                    reinterpret_cast<const char*>(sums.data()), sizeof(T), n);
  });
}

const Register r{column_sum_kernel, DeviceType::kCPU, column_sum};

}  // namespace
}  // namespace sherd::cpu
