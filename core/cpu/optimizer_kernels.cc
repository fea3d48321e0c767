#include "core/optimizer_kernels.h"

#include <cmath>

#include "core/cpu/convert.h"
#include "core/cpu/isa.h"
#include "core/parallel_for.h"

namespace sherd::cpu {
namespace {

// Plain element by element loops: a vector's body and its tail do the same operations, so an
// element's bits follow from its own values alone. What would be a branch in the loop is a template
// parameter.

template <bool kCoupledDecay, bool kAmsgrad>
struct Adam {
  template <class T>
  [[gnu::always_inline]] static void run(const AdamStep& s, T factor, T* __restrict p,
                                         const T* __restrict grad, T* __restrict m, T* __restrict v,
                                         T* __restrict most, int64_t n) {
    const T keep = T(s.decoupled ? 1 - s.lr * s.weight_decay : 1), decay = T(s.weight_decay),
            beta2 = T(s.beta2), one_minus_beta1 = T(1 - s.beta1), one_minus_beta2 = T(1 - s.beta2),
            step_size = T(s.lr / s.bias_correction1),
            correction = T(1 / std::sqrt(s.bias_correction2)), eps = T(s.eps);
    for (int64_t i = 0; i < n; ++i) {
      T g = grad[i] * factor;
      if constexpr (kCoupledDecay) g += decay * p[i];
      const T mean = m[i] + one_minus_beta1 * (g - m[i]);
      T square = beta2 * v[i] + one_minus_beta2 * g * g;
      m[i] = mean, v[i] = square;
      if constexpr (kAmsgrad) most[i] = square = most[i] > square ? most[i] : square;
      p[i] = p[i] * keep - step_size * mean / (std::sqrt(square) * correction + eps);
    }
  }
};

template <bool kMomentum, bool kFirst, bool kNesterov>
struct Sgd {
  template <class T>
  [[gnu::always_inline]] static void run(const SgdStep& s, T factor, T* __restrict p,
                                         const T* __restrict grad, T* __restrict buffer, T*, T*,
                                         int64_t n) {
    const T decay = T(s.weight_decay), momentum = T(s.momentum),
            one_minus_dampening = T(1 - s.dampening), lr = T(s.lr);
    for (int64_t i = 0; i < n; ++i) {
      T g = grad[i] * factor + decay * p[i];
      if constexpr (kMomentum) {
        T b = g;
        if constexpr (!kFirst) b = momentum * buffer[i] + one_minus_dampening * g;
        buffer[i] = b;
        g = kNesterov ? g + momentum * b : b;
      }
      p[i] -= lr * g;
    }
  }
};

template <class Step, class Options, class T>
SHERD_AVX2 void run_avx2(const Options& o, T factor, T* p, const T* g, T* a, T* b, T* c,
                         int64_t n) {
  Step::run(o, factor, p, g, a, b, c, n);
}
template <class Step, class Options, class T>
SHERD_AVX512 void run_avx512(const Options& o, T factor, T* p, const T* g, T* a, T* b, T* c,
                             int64_t n) {
  Step::run(o, factor, p, g, a, b, c, n);
}

template <class Step, class Options>
void step(const Tensor& param, const Tensor& grad, const Options& options, const Tensor& a,
          const Tensor& b = {}, const Tensor& c = {}) {
  const GradientScaling& scaling = options.gradient;
  if (scaling.found_inf.defined() && scaling.found_inf.template item<double>() != 0) return;
  double factor = scaling.maximize ? -scaling.factor : scaling.factor;
  if (scaling.scale.defined()) factor *= scaling.scale.template item<double>();
  if (param.dtype() != kFloat32 && param.dtype() != kFloat64)
    fail("an optimizer's parameters and states are float32 or float64, not ", param.dtype());
  auto go = [&]<class T>(Type<T>) {
    auto data = [](const Tensor& t) { return t.defined() ? t.data<T>() : nullptr; };
    T *const p = param.data<T>(), *const states[] = {data(a), data(b), data(c)};
    const bool same = grad.dtype() == dtype_of<T>;
    const Convert widen = convert(dtype_of<T>, grad.dtype());
    const int64_t size = size_of(grad.dtype());
    const char* const g = grad.bytes();
    auto run = has_avx512() ? run_avx512<Step, Options, T> : run_avx2<Step, Options, T>;
    parallel_for(param.numel(), 32768, [&](int64_t begin, int64_t end) {
      constexpr int64_t kConverted = 1024;
      T block[kConverted];
      for (int64_t i = begin, n; i < end; i += n) {
        n = same ? end - i : std::min(kConverted, end - i);
        const T* from = reinterpret_cast<const T*>(g + i * size);
        if (!same) {
          widen(reinterpret_cast<char*>(block), sizeof(T), g + i * size, size, n);
          from = block;
        }
        auto at = [&](T* state) { return state ? state + i : nullptr; };
        run(options, T(factor), p + i, from, at(states[0]), at(states[1]), at(states[2]), n);
      }
    });
  };
  param.dtype() == kFloat64 ? go(Type<double>{}) : go(Type<float>{});
}

void adam(const Stream&, const Tensor& param, const Tensor& grad, const Tensor& exp_avg,
          const Tensor& exp_avg_sq, const Tensor& max_exp_avg_sq, const AdamStep& s) {
  auto go = [&]<bool kCoupledDecay, bool kAmsgrad>() {
    step<Adam<kCoupledDecay, kAmsgrad>>(param, grad, s, exp_avg, exp_avg_sq, max_exp_avg_sq);
  };
  if (!s.decoupled && s.weight_decay != 0)
    max_exp_avg_sq.defined() ? go.template operator()<true, true>()
                             : go.template operator()<true, false>();
  else
    max_exp_avg_sq.defined() ? go.template operator()<false, true>()
                             : go.template operator()<false, false>();
}

void sgd(const Stream&, const Tensor& param, const Tensor& grad, const Tensor& momentum_buffer,
         const SgdStep& s) {
  if (!momentum_buffer.defined()) return step<Sgd<false, false, false>>(param, grad, s, {});
  if (s.first)
    s.nesterov ? step<Sgd<true, true, true>>(param, grad, s, momentum_buffer)
               : step<Sgd<true, true, false>>(param, grad, s, momentum_buffer);
  else
    s.nesterov ? step<Sgd<true, false, true>>(param, grad, s, momentum_buffer)
               : step<Sgd<true, false, false>>(param, grad, s, momentum_buffer);
}

const Register a{adam_kernel, DeviceType::kCPU, adam}, s{sgd_kernel, DeviceType::kCPU, sgd};

}  // namespace
}  // namespace sherd::cpu
