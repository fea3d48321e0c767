#include "core/embedding.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "core/cpu/isa.h"
#include "core/cpu/rows.h"
#include "core/parallel_for.h"

namespace sherd::cpu {
namespace {

// The indices as int64, checked.
std::vector<int64_t> read_indices(const Tensor& indices, int64_t below) {
  std::vector<int64_t> v(size_t(indices.numel()));
  convert(kInt64, indices.dtype())(reinterpret_cast<char*>(v.data()), sizeof(int64_t),
                                   indices.bytes(), size_of(indices.dtype()), indices.numel());
  for (size_t i = 0; i < v.size(); ++i)
    if (v[i] < 0 || v[i] >= below)
      fail("[embedding] index ", v[i], " at position ", i, " is out of range for a table of ",
           below, " rows");
  return v;
}

void forward(const Stream&, const Tensor& weight, const Tensor& indices, const Tensor& y) {
  const int64_t channels = weight.size(1), bytes = channels * size_of(weight.dtype()),
                row = weight.stride(0) * size_of(weight.dtype());
  const auto index = read_indices(indices, weight.size(0));
  if (bytes == 0) return;
  const char* from = weight.bytes();
  char* to = y.bytes();
  parallel_for(int64_t(index.size()), row_grain(channels), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      std::memcpy(to + i * bytes, from + index[size_t(i)] * row, size_t(bytes));
  });
}

template <class T>
[[gnu::always_inline]] inline void add_row(T* __restrict to, const T* __restrict from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] += from[i];
}
template <class T>
SHERD_AVX2 void add_row_avx2(T* to, const T* from, int64_t n) {
  add_row(to, from, n);
}
template <class T>
SHERD_AVX512 void add_row_avx512(T* to, const T* from, int64_t n) {
  add_row(to, from, n);
}

void backward(const Stream&, const Tensor& g, const Tensor& indices, int64_t padding_idx,
              bool accumulate, const Tensor& dweight) {
  const int64_t rows = dweight.size(0), n = dweight.size(1);
  const auto index = read_indices(indices, rows);
  if (dweight.numel() == 0) return;
  // Positions by row of the table, in order within each: a row belongs to one thread, and its terms
  // are added in the order of positions.
  std::vector<int64_t> first(size_t(rows) + 1), position(index.size());
  for (int64_t i : index) ++first[size_t(i) + 1];
  std::partial_sum(first.begin(), first.end(), first.begin());
  {
    std::vector<int64_t> next(first.begin(), first.end() - 1);
    for (size_t i = 0; i < index.size(); ++i)
      position[size_t(next[size_t(index[i])]++)] = int64_t(i);
  }
  const bool wide = g.dtype() == kFloat64 || dweight.dtype() == kFloat64;
  in_compute_type(wide ? kFloat64 : kFloat32, [&]<class T>(Type<T>) {
    const Rows<T> gs(g, n, n), ws(dweight, n, n);
    auto add = has_avx512() ? add_row_avx512<T> : add_row_avx2<T>;
    parallel_for(rows, row_grain(n), [&](int64_t begin, int64_t end) {
      auto in = gs.block(), out = ws.block();
      for (int64_t v = begin; v < end; ++v) {
        const int64_t from = first[size_t(v)], to = v == padding_idx ? from : first[size_t(v) + 1];
        if (from == to && accumulate) continue;
        T* sum = ws.target(v, out);
        int64_t i = from;
        if (accumulate) {
          ws.read(v, out);
        } else if (from == to) {
          std::fill_n(sum, n, T(0));
        } else {
          std::copy_n(gs.read(position[size_t(i++)], in), n, sum);
        }
        for (; i < to; ++i) add(sum, gs.read(position[size_t(i)], in), n);
        ws.write(v, out);
      }
    });
  });
}

const Register f{embedding_forward, DeviceType::kCPU, forward},
    b{embedding_backward, DeviceType::kCPU, backward};

}  // namespace
}  // namespace sherd::cpu
