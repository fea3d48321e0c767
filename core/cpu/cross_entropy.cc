#include "core/cross_entropy.h"

#include "core/cpu/isa.h"
#include "core/cpu/row_math.h"
#include "core/parallel_for.h"

namespace sherd::cpu {
namespace {

// What a row's loss needs beside x[target].
template <class T>
struct RowSums {
  LogSum<T> log_sum;
  T smoothed;  // -sum_v w[v] log p[v], where labels are smoothed
};

template <class T>
[[gnu::always_inline]] inline RowSums<T> forward_row(const T* x, const T* w, bool smoothing,
                                                     int64_t n) {
  const LogSum<T> l = log_sum(x, n);
  T s = 0;
  if (smoothing)
    s = w ? sum_of<T>(n, [=](int64_t i) { return w[i] * l.loss(x[i]); })
          : sum_of<T>(n, [=](int64_t i) { return l.loss(x[i]); });
  return {l, s};
}
// dx = a p - b w, where w is 1 if null. The target's own term is the caller's.
template <class T>
[[gnu::always_inline]] inline void backward_row(const T* x, const T* w, LogSum<T> l, T a, T b,
                                                T* dx, int64_t n) {
  if (w) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) dx[i] = a * exp_nonpositive(l.log_probability(x[i])) - b * w[i];
  } else {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) dx[i] = a * exp_nonpositive(l.log_probability(x[i])) - b;
  }
}
template <class T>
SHERD_AVX2 RowSums<T> forward_avx2(const T* x, const T* w, bool smoothing, int64_t n) {
  return forward_row(x, w, smoothing, n);
}
template <class T>
SHERD_AVX512 RowSums<T> forward_avx512(const T* x, const T* w, bool smoothing, int64_t n) {
  return forward_row(x, w, smoothing, n);
}
template <class T>
SHERD_AVX2 void backward_avx2(const T* x, const T* w, LogSum<T> l, T a, T b, T* dx, int64_t n) {
  backward_row(x, w, l, a, b, dx, n);
}
template <class T>
SHERD_AVX512 void backward_avx512(const T* x, const T* w, LogSum<T> l, T a, T b, T* dx, int64_t n) {
  backward_row(x, w, l, a, b, dx, n);
}

void check(const Tensor& targets, int64_t classes, const CrossEntropyOptions& options) {
  const int64_t* t = targets.data<int64_t>();
  for (int64_t i = 0; i < targets.numel(); ++i)
    if (t[i] != options.ignore_index && (t[i] < 0 || t[i] >= classes))
      fail("[cross_entropy] target ", t[i], " at position ", i, " is out of range for ", classes,
           " classes (ignore_index is ", options.ignore_index, ")");
}

// The classes' weights: null where all are 1.
template <class T>
struct Weights {
  std::vector<T> values;
  T total;
  Weights(const Tensor& w, int64_t classes) : total(T(classes)) {
    if (!w.defined()) return;
    values = parameter<T>(w, classes, 1);
    double sum = 0;
    for (T v : values) sum += v;
    total = T(sum);
  }
  const T* data() const { return values.empty() ? nullptr : values.data(); }
  T operator[](int64_t i) const { return values.empty() ? T(1) : values[size_t(i)]; }
};

void forward(const Stream&, const Tensor& logits, const Tensor& targets,
             const CrossEntropyOptions& options, const Tensor& losses, const Tensor& log_sums,
             const Tensor& sums) {
  const int64_t rows = logits.size(0), n = logits.size(1);
  check(targets, n, options);
  in_compute_type(logits.dtype(), [&]<class T>(Type<T>) {
    const Rows<T> xs(logits, n);
    const Weights<T> w(options.weight, n);
    const int64_t* target = targets.data<int64_t>();
    const T s = T(options.label_smoothing);
    T *loss = losses.data<T>(), *l = log_sums.data<T>();
    auto row = has_avx512() ? forward_avx512<T> : forward_avx2<T>;
    parallel_for(rows, row_grain(n), [&](int64_t begin, int64_t end) {
      auto block = xs.block();
      for (int64_t i = begin; i < end; ++i) {
        const bool ignored = target[i] == options.ignore_index;
        const T* x = xs.read(i, block);
        const RowSums<T> r = row(x, w.data(), s != 0 && !ignored, n);
        l[2 * i] = r.log_sum.max, l[2 * i + 1] = r.log_sum.rest;
        if (ignored) {
          loss[i] = 0;
        } else {
          loss[i] = (1 - s) * w[target[i]] * r.log_sum.loss(x[target[i]]);
          if (s != 0) loss[i] += s / T(n) * r.smoothed;
        }
      }
    });
    double total = 0, weight = 0;
    for (int64_t i = 0; i < rows; ++i)
      if (target[i] != options.ignore_index) total += loss[i], weight += w[target[i]];
    sums.data<T>()[0] = T(total), sums.data<T>()[1] = T(weight);
  });
}

void backward(const Stream&, const Tensor& g, const Tensor& divisor, const Tensor& logits,
              const Tensor& targets, const Tensor& log_sums, const CrossEntropyOptions& options,
              const Tensor& dlogits) {
  const int64_t rows = logits.size(0), n = logits.size(1);
  check(targets, n, options);
  in_compute_type(logits.dtype(), [&]<class T>(Type<T>) {
    const Rows<T> xs(logits, n), dxs(dlogits, n);
    const Weights<T> w(options.weight, n);
    const int64_t* target = targets.data<int64_t>();
    const T *l = log_sums.data<T>(), s = T(options.label_smoothing);
    const auto gs = parameter<T>(contiguous_raw(g), g.numel(), 0);
    const T scale = divisor.defined() ? T(1 / divisor.item<double>()) : T(1);
    auto row = has_avx512() ? backward_avx512<T> : backward_avx2<T>;
    parallel_for(rows, row_grain(n), [&](int64_t begin, int64_t end) {
      auto in = xs.block(), out = dxs.block();
      for (int64_t i = begin; i < end; ++i) {
        T* dx = dxs.target(i, out);
        if (target[i] == options.ignore_index) {
          std::fill_n(dx, n, T(0));
        } else {
          const T up = gs[gs.size() == 1 ? 0 : size_t(i)] * scale,
                  hit = (1 - s) * w[target[i]] * up, even = s / T(n) * up;
          row(xs.read(i, in), w.data(), LogSum<T>{l[2 * i], l[2 * i + 1]}, hit + even * w.total,
              even, dx, n);
          dx[target[i]] -= hit;
        }
        dxs.write(i, out);
      }
    });
  });
}

const Register f{cross_entropy_forward, DeviceType::kCPU, forward},
    b{cross_entropy_backward, DeviceType::kCPU, backward};

}  // namespace
}  // namespace sherd::cpu
