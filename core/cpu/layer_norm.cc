#include "core/layer_norm.h"

#include <cmath>

#include "core/cpu/isa.h"
#include "core/cpu/rows.h"
#include "core/parallel_for.h"

namespace sherd::cpu {
namespace {

template <class T>
[[gnu::always_inline]] inline void forward_row(const T* __restrict x, const T* __restrict w,
                                               const T* __restrict b, T eps, T* __restrict y,
                                               T* mean, T* rstd, int64_t n) {
  const T m = sum_of<T>(n, [=](int64_t i) { return x[i]; }) / n;
  const T v = sum_of<T>(n, [=](int64_t i) { return (x[i] - m) * (x[i] - m); }) / n;
  const T r = 1 / std::sqrt(v + eps);
  for (int64_t i = 0; i < n; ++i) y[i] = (x[i] - m) * r * w[i] + b[i];
  *mean = m, *rstd = r;
}
// dx may be g.
template <class T>
[[gnu::always_inline]] inline void backward_row(const T* g, const T* __restrict x,
                                                const T* __restrict w, T m, T r, T* dx,
                                                T* __restrict dw, T* __restrict db, int64_t n) {
  const T a = sum_of<T>(n, [=](int64_t i) { return g[i] * w[i]; }) / n;
  const T c = sum_of<T>(n, [=](int64_t i) { return g[i] * w[i] * (x[i] - m); }) * r * r / n;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const T centred = x[i] - m, gi = g[i];
    dx[i] = (gi * w[i] - a - centred * c) * r;
    dw[i] += gi * centred * r;
    db[i] += gi;
  }
}
template <class T>
SHERD_AVX2 void forward_avx2(const T* x, const T* w, const T* b, T eps, T* y, T* m, T* r,
                             int64_t n) {
  forward_row(x, w, b, eps, y, m, r, n);
}
template <class T>
SHERD_AVX512 void forward_avx512(const T* x, const T* w, const T* b, T eps, T* y, T* m, T* r,
                                 int64_t n) {
  forward_row(x, w, b, eps, y, m, r, n);
}
template <class T>
SHERD_AVX2 void backward_avx2(const T* g, const T* x, const T* w, T m, T r, T* dx, T* dw, T* db,
                              int64_t n) {
  backward_row(g, x, w, m, r, dx, dw, db, n);
}
template <class T>
SHERD_AVX512 void backward_avx512(const T* g, const T* x, const T* w, T m, T r, T* dx, T* dw, T* db,
                                  int64_t n) {
  backward_row(g, x, w, m, r, dx, dw, db, n);
}

void forward(const Stream&, const Tensor& x, const Tensor& weight, const Tensor& bias, double eps,
             const Tensor& y, const Tensor& mean, const Tensor& rstd) {
  const int64_t rows = mean.numel(), n = rows ? x.numel() / rows : 0;
  in_compute_type(x.dtype(), [&]<class T>(Type<T>) {
    const auto w = parameter<T>(weight, n, 1), b = parameter<T>(bias, n, 0);
    const Rows<T> xs(x, n, n), ys(y, n, n);
    T *m = mean.data<T>(), *r = rstd.data<T>();
    auto row = has_avx512() ? forward_avx512<T> : forward_avx2<T>;
    parallel_for(rows, row_grain(n), [&](int64_t begin, int64_t end) {
      auto in = xs.block(), out = ys.block();
      for (int64_t i = begin; i < end; ++i) {
        row(xs.read(i, in), w.data(), b.data(), T(eps), ys.target(i, out), m + i, r + i, n);
        ys.write(i, out);
      }
    });
  });
}

void backward(const Stream&, const Tensor& g, const Tensor& x, const Tensor& weight,
              const Tensor& mean, const Tensor& rstd, const Tensor& dx, const Tensor& dweight,
              const Tensor& dbias) {
  const int64_t rows = mean.numel(), n = rows                ? x.numel() / rows
                                         : dweight.defined() ? dweight.numel()
                                         : dbias.defined()   ? dbias.numel()
                                                             : 0;
  // Larger pieces than in forward: each has sums of its own for the parameters.
  const int64_t grain = std::max<int64_t>(16, 4 * row_grain(n)),
                pieces = std::max<int64_t>(1, (rows + grain - 1) / grain);
  in_compute_type(x.dtype(), [&]<class T>(Type<T>) {
    const auto w = parameter<T>(weight, n, 1);
    const Rows<T> gs(g, n, n), xs(x, n, n), dxs(dx, n, n);
    const T *m = mean.data<T>(), *r = rstd.data<T>();
    auto row = has_avx512() ? backward_avx512<T> : backward_avx2<T>;
    std::vector<T> sums(size_t(pieces * n * 2));
    parallel_for(rows, grain, [&](int64_t begin, int64_t end) {
      auto a = gs.block(), b = xs.block();
      std::vector<T> c = dxs.defined() ? dxs.block() : std::vector<T>(size_t(n));
      T* dw = &sums[size_t(begin / grain * n * 2)];
      for (int64_t i = begin; i < end; ++i) {
        T* to = dxs.defined() ? dxs.target(i, c) : c.data();
        row(gs.read(i, a), xs.read(i, b), w.data(), m[i], r[i], to, dw, dw + n, n);
        if (dxs.defined()) dxs.write(i, c);
      }
    });
    for (int64_t p = 1; p < pieces; ++p)
      for (int64_t i = 0; i < 2 * n; ++i) sums[i] += sums[p * 2 * n + i];
    auto store = [&](const Tensor& to, const T* from) {
      if (to.defined())
        convert(to.dtype(), dtype_of<T>)(to.bytes(), size_of(to.dtype()),
                                         reinterpret_cast<const char*>(from), sizeof(T), n);
    };
    store(dweight, sums.data());
    store(dbias, sums.data() + n);
  });
}

const Register f{layer_norm_forward, DeviceType::kCPU, forward},
    b{layer_norm_backward, DeviceType::kCPU, backward};

}  // namespace
}  // namespace sherd::cpu
