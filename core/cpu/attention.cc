#include "core/attention.h"

#include <cmath>

#include "core/cpu/isa.h"
#include "core/cpu/row_math.h"
#include "core/cpu/tile.h"
#include "core/parallel_for.h"

namespace sherd::cpu {
namespace {

// [Note: scores by column] A block of scores is kept transposed, [keys, queries]: a query is a
// lane, so the maximum, the sum and the exponentials run over lanes with no sum across a vector,
// and both products take K and V as their left operand, whose strides may be any. Lanes beyond T
// are filled with queries of zeros; nothing is stored for them, and in backward their probabilities
// are 0.
constexpr int64_t kQueries = 64, kKeys = 64;

struct Shape {
  int64_t B, H, T, S, D, E;
  int64_t heads() const { return B * H; }
  int64_t lanes() const { return std::min(kQueries, tile_columns(T)); }
};
Shape shape_of(const Tensor& q, const Tensor& k, const Tensor& v) {
  return {q.size(0), q.size(1), q.size(2), k.size(2), q.size(3), v.size(3)};
}

// The [rows, n] matrix of one head of a tensor [B, H, rows, n].
struct Head {
  char* data;
  DType dtype;
  int64_t rows, n, row, column;  // strides in elements
  Head(const Tensor& t, int64_t head)
      : dtype(t.dtype()), rows(t.size(2)), n(t.size(3)), row(t.stride(2)), column(t.stride(3)) {
    data = t.bytes() +
           (head / t.size(1) * t.stride(0) + head % t.size(1) * t.stride(1)) * size_of(dtype);
  }
  char* at(int64_t i) const { return data + i * row * size_of(dtype); }
  // Rows [i, i + count) in T, with columns up to ld filled with zeros.
  template <class T>
  void load(int64_t i, int64_t count, T* to, int64_t ld) const {
    const Convert f = convert(dtype_of<T>, dtype);
    for (int64_t r = 0; r < count; ++r, to += ld) {
      f(reinterpret_cast<char*>(to), sizeof(T), at(i + r), column * size_of(dtype), n);
      std::fill(to + n, to + ld, T(0));
    }
  }
  template <class T>
  void store(int64_t i, int64_t count, const T* from, int64_t ld) const {
    const Convert f = convert(dtype, dtype_of<T>);
    for (int64_t r = 0; r < count; ++r, from += ld)
      f(at(i + r), column * size_of(dtype), reinterpret_cast<const char*>(from), sizeof(T), n);
  }
  // In place where it is compact already, else by way of `copy`: rows that are a power of two apart
  // would push each other out of the cache.
  template <class T>
  TileView<T> compact(int64_t columns, T* copy) const {
    if (dtype == dtype_of<T> && column == 1 && row == n && n == columns)
      return {reinterpret_cast<const T*>(data), n, 1};
    load(0, rows, copy, columns);
    return {copy, columns, 1};
  }
  template <class T>
  TileView<T> left(T* copy) const {
    return compact(n, copy);
  }
  // As a right operand: rows filled up.
  template <class T>
  TileView<T> right(T* copy) const {
    return compact(tile_columns(n), copy);
  }
};

// Room for one head's work, cut from one allocation.
template <class T>
struct Room {
  T* next;
  T* take(int64_t n) {
    T* p = next;
    next += tile_columns(n);
    return p;
  }
};

// ---- what is done to a block of scores, s[keys, lanes]

// The running softmax of FlashAttention: raises `most`, turns s into e^(s - most), adds them to
// `sum` and says in `scale` by what earlier results are to be multiplied.
template <class T>
[[gnu::always_inline]] inline void step_body(T* __restrict s, int64_t keys, int64_t lanes,
                                             T* __restrict most, T* __restrict sum,
                                             T* __restrict scale) {
  T top[kQueries], total[kQueries];
  for (int64_t t = 0; t < lanes; ++t) top[t] = most[t], total[t] = 0;
  for (int64_t i = 0; i < keys; ++i)
    for (int64_t t = 0; t < lanes; ++t)
      top[t] = s[i * lanes + t] > top[t] ? s[i * lanes + t] : top[t];
  for (int64_t t = 0; t < lanes; ++t) {
    const T finite = top[t] == -std::numeric_limits<T>::infinity() ? T(0) : top[t];
    scale[t] = exp_nonpositive(most[t] - finite);
    most[t] = top[t], top[t] = finite;
  }
  for (int64_t i = 0; i < keys; ++i)
    for (int64_t t = 0; t < lanes; ++t) {
      const T p = exp_nonpositive(s[i * lanes + t] - top[t]);
      s[i * lanes + t] = p, total[t] += p;
    }
  for (int64_t t = 0; t < lanes; ++t) sum[t] = sum[t] * scale[t] + total[t];
}
template <class T>
[[gnu::always_inline]] inline void rescale_body(T* __restrict y, int64_t rows, int64_t lanes,
                                                const T* __restrict scale) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t t = 0; t < lanes; ++t) y[i * lanes + t] *= scale[t];
}
// s = e^(s - lse), and dp = the scores' gradient, scale s (dp - delta)
template <class T>
[[gnu::always_inline]] inline void backward_body(T* __restrict s, T* __restrict dp, int64_t keys,
                                                 int64_t lanes, const T* __restrict lse,
                                                 const T* __restrict delta, T scale) {
  for (int64_t i = 0; i < keys; ++i)
    for (int64_t t = 0; t < lanes; ++t) {
      const T p = exp_nonpositive(s[i * lanes + t] - lse[t]);
      s[i * lanes + t] = p;
      dp[i * lanes + t] = scale * p * (dp[i * lanes + t] - delta[t]);
    }
}
template <class T>
SHERD_AVX2 void step_avx2(T* s, int64_t keys, int64_t lanes, T* most, T* sum, T* scale) {
  step_body(s, keys, lanes, most, sum, scale);
}
template <class T>
SHERD_AVX512 void step_avx512(T* s, int64_t keys, int64_t lanes, T* most, T* sum, T* scale) {
  step_body(s, keys, lanes, most, sum, scale);
}
template <class T>
SHERD_AVX2 void rescale_avx2(T* y, int64_t rows, int64_t lanes, const T* scale) {
  rescale_body(y, rows, lanes, scale);
}
template <class T>
SHERD_AVX512 void rescale_avx512(T* y, int64_t rows, int64_t lanes, const T* scale) {
  rescale_body(y, rows, lanes, scale);
}
template <class T>
SHERD_AVX2 void backward_avx2(T* s, T* dp, int64_t keys, int64_t lanes, const T* lse,
                              const T* delta, T scale) {
  backward_body(s, dp, keys, lanes, lse, delta, scale);
}
template <class T>
SHERD_AVX512 void backward_avx512(T* s, T* dp, int64_t keys, int64_t lanes, const T* lse,
                                  const T* delta, T scale) {
  backward_body(s, dp, keys, lanes, lse, delta, scale);
}
template <class T>
struct Steps {
  bool wide = has_avx512();
  decltype(&step_avx2<T>) step = wide ? step_avx512<T> : step_avx2<T>;
  decltype(&rescale_avx2<T>) rescale = wide ? rescale_avx512<T> : rescale_avx2<T>;
  decltype(&backward_avx2<T>) backward = wide ? backward_avx512<T> : backward_avx2<T>;
};

// The mask of one head, added to a block of scores.
struct Mask {
  const char* data = nullptr;
  DType dtype = kFloat32;
  int64_t row = 0, column = 0;  // strides in elements; 0 where expanded
  Mask(const Tensor& m, int64_t head, const Shape& s) {
    if (!m.defined()) return;
    auto stride = [&](int i) { return m.size(i) == 1 ? 0 : m.stride(i); };
    dtype = m.dtype(), row = stride(2), column = stride(3);
    data = m.bytes() + (head / s.H * stride(0) + head % s.H * stride(1)) * size_of(dtype);
  }
  template <class T>
  void add(T* s, int64_t first_query, int64_t queries, int64_t first_key, int64_t keys,
           int64_t lanes) const {
    if (!data) return;
    const Convert f = convert(dtype_of<T>, dtype);
    T value[kKeys];
    for (int64_t t = 0; t < queries; ++t) {
      f(reinterpret_cast<char*>(value), sizeof(T),
        data + ((first_query + t) * row + first_key * column) * size_of(dtype),
        column * size_of(dtype), keys);
      for (int64_t i = 0; i < keys; ++i)
        s[i * lanes + t] += dtype != kBool  ? value[i]
                            : value[i] != 0 ? T(0)
                                            : -std::numeric_limits<T>::infinity();
    }
  }
};

// One block of queries against the keys before `last`, a block at a time: f(first key, keys).
// Causal blocks that are hidden whole are left out.
template <class F>
void for_key_blocks(const Shape& s, bool causal, int64_t first_query, F f) {
  const int64_t last = causal ? std::min(s.S, first_query + s.lanes()) : s.S;
  for (int64_t i = 0; i < last; i += kKeys) f(i, std::min(kKeys, last - i));
}

// The scores of a block, s[keys, lanes] = k q^T with everything that hides keys.
template <class T>
void scores(const Shape& s, bool causal, const Mask& mask, TileView<T> k, const T* q_transposed,
            int64_t first_query, int64_t first_key, int64_t keys, T* to) {
  const int64_t lanes = s.lanes();
  tile_product(keys, lanes, s.D, k.from_row(first_key), q_transposed, lanes, to, lanes, false);
  mask.add(to, first_query, std::min(lanes, s.T - first_query), first_key, keys, lanes);
  if (!causal || first_key + keys - 1 <= first_query) return;
  for (int64_t i = 0; i < keys; ++i)
    for (int64_t t = 0; t < std::min(lanes, first_key + i - first_query); ++t)
      to[i * lanes + t] = -std::numeric_limits<T>::infinity();
}

// A block of queries (or of their gradients) as [channels, lanes], times `scale`.
template <class T>
void load_transposed(const Head& head, int64_t first, int64_t count, int64_t lanes, T scale,
                     T* rows, T* to) {
  TileView<T> from{reinterpret_cast<const T*>(head.at(first)), head.row, head.column};
  if (head.dtype != dtype_of<T>) {
    head.load(first, count, rows, head.n);
    from = {rows, head.n, 1};
  }
  transpose_tile(from, count, head.n, to, lanes);
  for (int64_t j = 0; j < head.n; ++j) {
    for (int64_t t = 0; t < count; ++t) to[j * lanes + t] *= scale;
    std::fill(to + j * lanes + count, to + (j + 1) * lanes, T(0));
  }
}

// Runs f(head, room) for each head; `per_head` elements of scratch memory. Heads that share a
// thread share the room.
template <class T, class F>
void for_heads(const Shape& s, int64_t per_head, F f) {
  const int64_t grain = (s.heads() + num_threads() - 1) / num_threads(),
                pieces = (s.heads() + grain - 1) / grain;
  per_head = tile_columns(per_head);
  const Tensor scratch = empty({pieces * per_head}, dtype_of<T>);
  T* const room = scratch.data<T>();
  parallel_for(s.heads(), grain, [&](int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; ++head)
      f(head, Room<T>{room + begin / grain * per_head});
  });
}

template <class T>
void forward_head(const Shape& s, const AttentionOptions& o, const Head& q, const Head& k,
                  const Head& v, const Head& y, T* lse, const Mask& mask, Room<T> room) {
  const Steps<T> steps;
  const int64_t lanes = s.lanes();
  const TileView<T> keys_in = k.left(room.take(s.S * s.D)),
                    values_in = v.left(room.take(s.S * s.E));
  T *rows = room.take(lanes * std::max(s.D, s.E)), *qt = room.take(s.D * lanes),
    *block = room.take(kKeys * lanes), *yt = room.take(s.E * lanes), *most = room.take(lanes),
    *sum = room.take(lanes), *scale = room.take(lanes);
  for (int64_t first = 0; first < s.T; first += lanes) {
    const int64_t count = std::min(lanes, s.T - first);
    load_transposed(q, first, count, lanes, T(o.scale), rows, qt);
    std::fill_n(most, lanes, -std::numeric_limits<T>::infinity());
    std::fill_n(sum, lanes, T(0));
    std::fill_n(yt, s.E * lanes, T(0));
    for_key_blocks(s, o.causal, first, [&](int64_t i, int64_t keys) {
      scores(s, o.causal, mask, keys_in, qt, first, i, keys, block);
      steps.step(block, keys, lanes, most, sum, scale);
      if (i > 0) steps.rescale(yt, s.E, lanes, scale);
      tile_product(s.E, lanes, keys, values_in.from_row(i).transposed(), block, lanes, yt, lanes,
                   i > 0);
    });
    for (int64_t t = 0; t < lanes; ++t) {
      const bool none = sum[t] == 0;  // every key is hidden
      if (t < count)
        lse[first + t] = none ? -std::numeric_limits<T>::infinity() : most[t] + std::log(sum[t]);
      scale[t] = none ? T(0) : 1 / sum[t];
    }
    steps.rescale(yt, s.E, lanes, scale);
    transpose_tile(TileView<T>{yt, lanes, 1}, s.E, count, rows, s.E);
    y.store(first, count, rows, s.E);
  }
}

template <class T>
void backward_head(const Shape& s, const AttentionOptions& o, const Head& g, const Head& q,
                   const Head& k, const Head& v, const Head& y, const T* lse, const Head& dq,
                   const Head& dk, const Head& dv, const Mask& mask, Room<T> room) {
  const Steps<T> steps;
  const int64_t lanes = s.lanes(), D = tile_columns(s.D), E = tile_columns(s.E);
  const TileView<T> keys_in = k.right(room.take(s.S * D)), queries_in = q.right(room.take(s.T * D)),
                    values_in = v.left(room.take(s.S * s.E)), g_in = g.right(room.take(s.T * E));
  T *rows = room.take(lanes * std::max(D, E)), *qt = room.take(s.D * lanes),
    *gt = room.take(s.E * lanes), *block = room.take(kKeys * lanes),
    *dblock = room.take(kKeys * lanes), *row_lse = room.take(lanes), *delta = room.take(lanes),
    *dq_rows = room.take(lanes * D), *dk_rows = room.take(s.S * D), *dv_rows = room.take(s.S * E);
  std::fill_n(dk_rows, s.S * D, T(0));
  std::fill_n(dv_rows, s.S * E, T(0));
  for (int64_t first = 0; first < s.T; first += lanes) {
    const int64_t count = std::min(lanes, s.T - first);
    load_transposed(q, first, count, lanes, T(o.scale), rows, qt);
    load_transposed(g, first, count, lanes, T(1), rows, gt);
    // delta = sum(g y) of a query: what all its scores' gradients have in common.
    y.load(first, count, rows, E);
    for (int64_t t = 0; t < lanes; ++t) {
      // e^(s - inf) = 0: no probabilities where there is no query, or no key for it
      row_lse[t] = t < count && lse[first + t] != -std::numeric_limits<T>::infinity()
                       ? lse[first + t]
                       : std::numeric_limits<T>::infinity();
      delta[t] = 0;
      if (t < count) {
        const T *gr = g_in.data + (first + t) * g_in.row, *yr = rows + t * E;
        delta[t] = sum_of<T>(s.E, [=](int64_t i) { return gr[i] * yr[i]; });
      }
    }
    bool any = false;
    for_key_blocks(s, o.causal, first, [&](int64_t i, int64_t keys) {
      scores(s, o.causal, mask, keys_in, qt, first, i, keys, block);
      tile_product(keys, lanes, s.E, values_in.from_row(i), gt, lanes, dblock, lanes, false);
      steps.backward(block, dblock, keys, lanes, row_lse, delta, T(o.scale));
      const TileView<T> p{block, lanes, 1}, ds{dblock, lanes, 1};
      tile_product(keys, E, count, p, g_in.data + first * g_in.row, g_in.row, dv_rows + i * E, E,
                   true);
      tile_product(keys, D, count, ds, queries_in.data + first * queries_in.row, queries_in.row,
                   dk_rows + i * D, D, true);
      tile_product(count, D, keys, ds.transposed(), keys_in.data + i * keys_in.row, keys_in.row,
                   dq_rows, D, any);
      any = true;
    });
    dq.store(first, count, dq_rows, D);
  }
  dk.store(0, s.S, dk_rows, D);
  dv.store(0, s.S, dv_rows, E);
}

void forward(const Stream&, const Tensor& q, const Tensor& k, const Tensor& v,
             const AttentionOptions& o, const Tensor& y, const Tensor& lse) {
  const Shape s = shape_of(q, k, v);
  if (y.numel() == 0) return;
  if (s.S == 0) {
    copy_raw(y, Tensor(0.0));
    return copy_raw(lse, Tensor(-INFINITY));
  }
  in_compute_type(q.dtype(), [&]<class T>(Type<T>) {
    const int64_t lanes = s.lanes(), room = s.S * (s.D + s.E) +
                                            lanes * (std::max(s.D, s.E) + s.D + s.E + kKeys + 3) +
                                            9 * kTileColumns;
    T* const l = lse.data<T>();
    for_heads<T>(s, room, [&](int64_t h, Room<T> r) {
      forward_head(s, o, {q, h}, {k, h}, {v, h}, {y, h}, l + h * s.T, Mask(o.mask, h, s), r);
    });
  });
}

void backward(const Stream&, const Tensor& g, const Tensor& q, const Tensor& k, const Tensor& v,
              const Tensor& y, const Tensor& lse, const AttentionOptions& o, const Tensor& dq,
              const Tensor& dk, const Tensor& dv) {
  const Shape s = shape_of(q, k, v);
  if (s.heads() == 0) return;
  if (s.T == 0 || s.S == 0) {
    for (const Tensor* t : {&dq, &dk, &dv})
      if (t->numel()) copy_raw(*t, Tensor(0.0));
    return;
  }
  in_compute_type(q.dtype(), [&]<class T>(Type<T>) {
    const int64_t lanes = s.lanes(), D = tile_columns(s.D), E = tile_columns(s.E),
                  room = (s.S + s.T) * (D + E) + s.S * (D + E) +
                         lanes * (std::max(D, E) + s.D + s.E + 2 * kKeys + 2 + D) +
                         16 * kTileColumns;
    const T* const l = lse.data<T>();
    for_heads<T>(s, room, [&](int64_t h, Room<T> r) {
      backward_head(s, o, {g, h}, {q, h}, {k, h}, {v, h}, {y, h}, l + h * s.T, {dq, h}, {dk, h},
                    {dv, h}, Mask(o.mask, h, s), r);
    });
  });
}

const Register f{attention_forward, DeviceType::kCPU, forward},
    b{attention_backward, DeviceType::kCPU, backward};

}  // namespace
}  // namespace sherd::cpu
