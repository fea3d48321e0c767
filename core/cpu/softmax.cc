#include "core/softmax.h"

#include "core/cpu/isa.h"
#include "core/cpu/row_math.h"
#include "core/cpu/rows.h"
#include "core/parallel_for.h"

namespace sherd::cpu {
namespace {

// Formulas of one row each. y may be x, and dx may be g or y.
struct Softmax {
  template <class T>
  static void run(const T* x, const T*, T* y, int64_t n) {
    const T m = max_of(x, n);
    const T scale = 1 / exp_sum(x, m, y, n);
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) y[i] *= scale;
  }
};
struct LogSoftmax {
  template <class T>
  static void run(const T* x, const T*, T* y, int64_t n) {
    const LogSum<T> s = log_sum(x, n);
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) y[i] = s.log_probability(x[i]);
  }
};
struct SoftmaxBackward {
  template <class T>
  static void run(const T* g, const T* y, T* dx, int64_t n) {
    const T s = sum_of<T>(n, [=](int64_t i) { return g[i] * y[i]; });
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) dx[i] = y[i] * (g[i] - s);
  }
};
struct LogSoftmaxBackward {
  template <class T>
  static void run(const T* g, const T* y, T* dx, int64_t n) {
    const T s = sum_of<T>(n, [=](int64_t i) { return g[i]; });
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) dx[i] = g[i] - exp(Lane<T>{y[i]}).v * s;
  }
};

template <class F, class T>
SHERD_AVX2 void row_avx2(const T* a, const T* b, T* to, int64_t n) {
  F::run(a, b, to, n);
}
template <class F, class T>
SHERD_AVX512 void row_avx512(const T* a, const T* b, T* to, int64_t n) {
  F::run(a, b, to, n);
}

template <class F>
void over_rows(const Tensor& a, const Tensor& b, const Tensor& to) {
  if (to.numel() == 0) return;
  const int64_t n = to.dim() ? to.size(-1) : 1;
  const bool wide =
      a.dtype() == kFloat64 || to.dtype() == kFloat64 || (b.defined() && b.dtype() == kFloat64);
  in_compute_type(wide ? kFloat64 : kFloat32, [&]<class T>(Type<T>) {
    const Rows<T> as(a, n, n), bs(b, n, n), tos(to, n, n);
    auto row = has_avx512() ? row_avx512<F, T> : row_avx2<F, T>;
    parallel_for(to.numel() / n, row_grain(n), [&](int64_t begin, int64_t end) {
      auto ab = as.block(), bb = bs.block(), tb = tos.block();
      for (int64_t i = begin; i < end; ++i) {
        row(as.read(i, ab), bs.defined() ? bs.read(i, bb) : nullptr, tos.target(i, tb), n);
        tos.write(i, tb);
      }
    });
  });
}

template <class F>
void forward(const Stream&, const Tensor& x, const Tensor& y) {
  over_rows<F>(x, {}, y);
}
template <class F>
void backward(const Stream&, const Tensor& g, const Tensor& y, const Tensor& dx) {
  over_rows<F>(g, y, dx);
}

const Register a{softmax_forward, DeviceType::kCPU, forward<Softmax>},
    b{softmax_backward, DeviceType::kCPU, backward<SoftmaxBackward>},
    c{log_softmax_forward, DeviceType::kCPU, forward<LogSoftmax>},
    d{log_softmax_backward, DeviceType::kCPU, backward<LogSoftmaxBackward>};

}  // namespace
}  // namespace sherd::cpu
