// CPU driver of reductions: rows (the reduced elements lie side by side) or columns (they lie
// across), in fixed pieces.
#pragma once
#include <cstring>
#include <vector>

#include "core/cpu/convert.h"
#include "core/cpu/isa.h"
#include "core/parallel_for.h"
#include "core/reduce.h"

namespace sherd::cpu {

template <class T, int bytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(bytes)));
};
template <class T>
using IntOf = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;
template <class T, int W>
struct Wide {  // lanes of W elements
  using V = Lane<std::conditional_t<W == 1, T, typename VectorOf<T, W* int(sizeof(T))>::type>>;
  using I = Lane<
      std::conditional_t<W == 1, IntOf<T>, typename VectorOf<IntOf<T>, W* int(sizeof(T))>::type>>;
};
template <class Op, class T, int W>
using StateOf = typename Op::template State<typename Wide<T, W>::V, typename Wide<T, W>::I>;
template <class T>
constexpr int kWidth = 64 /
                       sizeof(T);  // also on AVX2, as two registers: the same order of additions
inline constexpr int kUnroll = 4, kColumns = 4;
inline constexpr int64_t kRowBlock = 2048, kRowChunk = 65536, kColumnBlock = 64, kColumnChunk = 512;

// From W lanes to one, by halves; every field is W elements wide.
template <class Op, class T, int W>
[[gnu::always_inline]] inline StateOf<Op, T, 1> fold(const Op& op, const StateOf<Op, T, W>& s,
                                                     double n) {
  if constexpr (W == 1) {
    return s;
  } else {
    StateOf<Op, T, W / 2> half[2];
    constexpr size_t field = W * sizeof(T), fields = sizeof(s) / field;
    for (size_t f = 0; f < fields; ++f)
      for (int h = 0; h < 2; ++h)
        std::memcpy(reinterpret_cast<char*>(&half[h]) + f * field / 2,
                    reinterpret_cast<const char*>(&s) + f * field + h * field / 2, field / 2);
    op.merge(half[0], half[1], n, n);
    return fold<Op, T, W / 2>(op, half[0], n * 2);
  }
}
template <class Op, class T>
StateOf<Op, T, 1> one_lane(const StateOf<Op, T, kWidth<T>>& s, int lane) {
  StateOf<Op, T, 1> r;
  for (size_t f = 0; f < sizeof(r) / sizeof(T); ++f)
    std::memcpy(reinterpret_cast<char*>(&r) + f * sizeof(T),
                reinterpret_cast<const char*>(&s) + (f * kWidth<T> + lane) * sizeof(T), sizeof(T));
  return r;
}
template <class I>
constexpr I iota(int64_t first) {
  I r{};
  if constexpr (requires { r.v[0]; })
    for (size_t i = 0; i < sizeof(r.v) / sizeof(r.v[0]); ++i) r.v[i] = first + i;
  else
    r.v = first;
  return r;
}
template <class Op, class T>
[[gnu::always_inline]] inline void row_body(const Op& op, const T* x, int64_t n, int64_t first,
                                            StateOf<Op, T, 1>& out) {
  constexpr int W = kWidth<T>;
  using V = typename Wide<T, W>::V;
  const int steps = n / (W * kUnroll);
  int64_t done = int64_t(steps) * W * kUnroll;
  if (steps) {
    StateOf<Op, T, W> s[kUnroll];
    for (int i = 0; i < steps; ++i)
      for (int u = 0; u < kUnroll; ++u) {
        V v;
        std::memcpy(&v, x + (i * kUnroll + u) * W, sizeof v);
        op.add(s[u], v, i);
      }
    if constexpr (requires { op.place(s[0], typename Wide<T, W>::I{}, 1); })
      for (int u = 0; u < kUnroll; ++u)
        op.place(s[u], iota<typename Wide<T, W>::I>(first + u * W), W * kUnroll);
    for (int u = 1; u < kUnroll; u *= 2)
      for (int k = 0; k + u < kUnroll; k += 2 * u)
        op.merge(s[k], s[k + u], double(steps) * u, double(steps) * u);
    out = fold<Op, T, W>(op, s[0], double(steps) * kUnroll);
  }
  auto include = [&](StateOf<Op, T, 1> s, int64_t m) {
    if (done)
      op.merge(out, s, done, m);
    else
      out = s;
    done += m;
  };
  if (const int vectors = (n - done) / W) {
    StateOf<Op, T, W> s;
    for (int i = 0; i < vectors; ++i) {
      V v;
      std::memcpy(&v, x + done + i * W, sizeof v);
      op.add(s, v, i);
    }
    if constexpr (requires { op.place(s, typename Wide<T, W>::I{}, 1); })
      op.place(s, iota<typename Wide<T, W>::I>(first + done), W);
    include(fold<Op, T, W>(op, s, vectors), int64_t(vectors) * W);
  }
  if (done < n) {
    StateOf<Op, T, 1> s;
    for (int64_t i = done; i < n; ++i) op.add(s, Lane<T>{x[i]}, int(i - done));
    if constexpr (requires { op.place(s, typename Wide<T, 1>::I{}, 1); })
      op.place(s, iota<typename Wide<T, 1>::I>(first + done), 1);
    include(s, n - done);
  }
}
// rows[r] points at kColumns vectors of row r
template <class Op, class T>
[[gnu::always_inline]] inline void column_body(const Op& op, const T* const* rows, int n,
                                               int64_t first, int vectors,
                                               StateOf<Op, T, kWidth<T>>* out) {
  constexpr int W = kWidth<T>;
  for (int c = 0; c < vectors; c += kColumns) {
    StateOf<Op, T, W> s[kColumns];
    const int m = std::min(kColumns, vectors - c);
    auto go = [&](auto count) {
      for (int r = 0; r < n; ++r)
        for (int k = 0; k < count(); ++k) {
          typename Wide<T, W>::V v;
          std::memcpy(&v, rows[r] + (c + k) * W, sizeof v);
          op.add(s[k], v, r);
        }
    };
    if (m == kColumns)
      go([] { return kColumns; });
    else
      go([m] { return m; });
    for (int k = 0; k < m; ++k) {
      if constexpr (requires { op.place(s[0], typename Wide<T, W>::I{}, 1); })
        op.place(s[k], typename Wide<T, W>::I{} + int(first), 1);
      if (first)
        op.merge(out[c + k], s[k], first % kColumnChunk ? double(first % kColumnChunk) : 0, n);
      else
        out[c + k] = s[k];
    }
  }
}
template <class Op, class T>
SHERD_AVX2 void row_avx2(const Op& op, const T* x, int64_t n, int64_t first, StateOf<Op, T, 1>& s) {
  row_body(op, x, n, first, s);
}
template <class Op, class T>
SHERD_AVX512 void row_avx512(const Op& op, const T* x, int64_t n, int64_t first,
                             StateOf<Op, T, 1>& s) {
  row_body(op, x, n, first, s);
}
template <class Op, class T>
SHERD_AVX2 void column_avx2(const Op& op, const T* const* r, int n, int64_t first, int v,
                            StateOf<Op, T, kWidth<T>>* s) {
  column_body(op, r, n, first, v, s);
}
template <class Op, class T>
SHERD_AVX512 void column_avx512(const Op& op, const T* const* r, int n, int64_t first, int v,
                                StateOf<Op, T, kWidth<T>>* s) {
  column_body(op, r, n, first, v, s);
}

inline int64_t offset(const Axes& a, int64_t i) {
  int64_t o = 0;
  for (int d = 0; d < a.n; ++d) o += i % a.sizes[d] * a.strides[d], i /= a.sizes[d];
  return o;
}

template <class Op, class T>
void reduce_rows(const Op& op, const ReductionPlan& r, auto* out) {
  const int64_t n = r.reduced.count, chunks = std::max<int64_t>(1, (n + kRowChunk - 1) / kRowChunk),
                inner = r.reduced.n ? r.reduced.sizes[0] : 1;
  const int64_t stride = r.reduced.n ? r.reduced.strides[0] : 0;
  const bool direct = stride == int64_t(sizeof(T)) &&
                      std::same_as<T, float> == (r.dtype == kFloat32) &&
                      size_of(r.dtype) == sizeof(T) && r.reduced.n == 1 && (r.dtype == r.compute);
  const Convert from = convert(r.compute, r.dtype);
  std::vector<StateOf<Op, T, 1>> states(chunks > 1 ? r.kept.count * chunks : 0);
  auto row = has_avx512() ? row_avx512<Op, T> : row_avx2<Op, T>;
  parallel_for(r.kept.count * chunks, std::max<int64_t>(1, 32768 / std::max<int64_t>(1, n)),
               [&](int64_t begin, int64_t end) {
                 alignas(64) T block[kRowBlock];
                 for (int64_t task = begin; task < end; ++task) {
                   const char* base = r.in + offset(r.kept, task / chunks);
                   const int64_t lo = task % chunks * kRowChunk, hi = std::min(n, lo + kRowChunk);
                   StateOf<Op, T, 1> total, part;
                   for (int64_t i = lo; i < hi; i += kRowBlock) {
                     const int64_t m = std::min(kRowBlock, hi - i);
                     const T* x = block;
                     if (direct)
                       x = reinterpret_cast<const T*>(base) + i;
                     else
                       for (int64_t k = i; k < i + m;) {
                         int64_t run = std::min(i + m - k, inner - k % inner);
                         from(reinterpret_cast<char*>(block + (k - i)), sizeof(T),
                              base + offset(r.reduced, k), stride, run),
                             k += run;
                       }
                     row(op, x, m, i, i == lo ? total : part);
                     if (i != lo) op.merge(total, part, double(i - lo), double(m));
                   }
                   if (chunks == 1)
                     out[task] = op.result(total, double(n)).v;
                   else
                     states[task] = total;
                 }
               });
  if (chunks > 1)
    for (int64_t k = 0; k < r.kept.count; ++k) {  // pairwise
      auto* s = &states[k * chunks];
      auto count = [&](int64_t lo, int64_t hi) {
        return double(std::min(n, hi * kRowChunk) - std::min(n, lo * kRowChunk));
      };
      for (int64_t u = 1; u < chunks; u *= 2)
        for (int64_t c = 0; c + u < chunks; c += 2 * u)
          op.merge(s[c], s[c + u], count(c, c + u), count(c + u, c + 2 * u));
      out[k] = op.result(s[0], double(n)).v;
    }
}

template <class Op, class T>
void reduce_columns(const Op& op, const ReductionPlan& r, auto* out) {
  constexpr int W = kWidth<T>, kTile = 2 * kColumns;  // vectors a tile
  using State = StateOf<Op, T, W>;
  const int64_t n = r.reduced.count, width = r.kept.sizes[0],
                tiles = (width + kTile * W - 1) / (kTile * W),
                chunks = (n + kColumnChunk - 1) / kColumnChunk;
  const int64_t outer = r.kept.count / width, stride = r.kept.strides[0];
  const Convert from = convert(r.compute, r.dtype);
  const int64_t tile_vectors = std::min<int64_t>(kTile, (width + W - 1) / W);
  std::vector<State> states(outer * tiles * chunks * tile_vectors);
  auto column = has_avx512() ? column_avx512<Op, T> : column_avx2<Op, T>;
  parallel_for(outer * tiles * chunks, 1, [&](int64_t begin, int64_t end) {
    alignas(64) T copy[kColumnBlock * kTile * W] = {};
    for (int64_t task = begin; task < end; ++task) {
      const int64_t c = task % chunks, tile = task / chunks % tiles, o = task / chunks / tiles,
                    j = tile * kTile * W, m = std::min<int64_t>(kTile * W, width - j);
      const int vectors = int((m + W - 1) / W);
      const char* base = r.in + offset(r.kept, o * width) + j * stride;
      const bool direct = r.dtype == r.compute && stride == int64_t(sizeof(T));
      const int whole =
          direct ? int(m / W) : 0;  // vectors read where they lie; the others from a copy
      for (int64_t i = c * kColumnChunk; i < std::min(n, (c + 1) * kColumnChunk);
           i += kColumnBlock) {
        const T *rows[kColumnBlock], *copies[kColumnBlock];
        const int k = int(std::min(kColumnBlock, std::min(n, (c + 1) * kColumnChunk) - i));
        for (int q = 0; q < k; ++q) {
          const char* x = base + offset(r.reduced, i + q);
          rows[q] = reinterpret_cast<const T*>(x);
          if (whole == vectors) continue;
          copies[q] = copy + q * kTile * W;
          from(reinterpret_cast<char*>(copy + q * kTile * W), sizeof(T), x + whole * W * stride,
               stride, m - whole * W);
        }
        if (whole) column(op, rows, k, i - c * kColumnChunk, whole, &states[task * tile_vectors]);
        if (whole < vectors)
          column(op, copies, k, i - c * kColumnChunk, vectors - whole,
                 &states[task * tile_vectors + whole]);
      }
      if constexpr (requires(State s) { op.place(s, typename Wide<T, W>::I{}, 1); })
        for (int v = 0; v < vectors; ++v)
          op.place(states[task * tile_vectors + v],
                   typename Wide<T, W>::I{} + int(c * kColumnChunk), 1);
    }
  });
  for (int64_t t = 0; t < outer * tiles; ++t) {
    auto at = [&](int64_t c, int64_t v) -> State& {
      return states[(t * chunks + c) * tile_vectors + v];
    };
    auto count = [&](int64_t lo, int64_t hi) {
      return double(std::min(n, hi * kColumnChunk) - std::min(n, lo * kColumnChunk));
    };
    const int64_t j = t % tiles * kTile * W, m = std::min<int64_t>(kTile * W, width - j);
    for (int64_t v = 0; v * W < m; ++v) {
      for (int64_t u = 1; u < chunks; u *= 2)
        for (int64_t c = 0; c + u < chunks; c += 2 * u)
          op.merge(at(c, v), at(c + u, v), count(c, c + u), count(c + u, c + 2 * u));
      for (int64_t l = 0; l < W && v * W + l < m; ++l)
        out[t / tiles * width + j + v * W + l] =
            op.result(one_lane<Op, T>(at(0, v), int(l)), double(n)).v;
    }
  }
}

template <class Op>
void reduction_kernel(const Stream&, const Op& op, const ReductionPlan& r) {
  auto go = [&]<class T>(Type<T>) {
    using Out = std::conditional_t<gives_of<Op> == kIndex, int64_t, T>;
    const bool rows =
        r.kept.n == 0 || r.reduced.count <= 1 ||
        (r.reduced.n && std::abs(r.reduced.strides[0]) <= std::abs(r.kept.strides[0])) ||
        r.kept.strides[0] == 0;
    rows ? reduce_rows<Op, T>(op, r, static_cast<Out*>(r.out))
         : reduce_columns<Op, T>(op, r, static_cast<Out*>(r.out));
  };
  if constexpr (!in_float64<Op>)
    if (r.compute == kFloat32) return go(Type<float>{});
  if (r.compute == kFloat64) return go(Type<double>{});
  if constexpr (kinds_of<Op> == kNumbers) return go(Type<int64_t>{});
}

}  // namespace sherd::cpu
