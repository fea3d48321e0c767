#include "core/optimizer_kernels.h"

#include <cmath>

#include "core/cpu/convert.h"
#include "core/cpu/isa.h"
#include "core/parallel_for.h"

namespace sherd::cpu {
namespace {

// Plain element by element loops: a vector's body and its tail do the same operations, so an
// element's bits follow from its own values alone.

template <class T>
struct Adam {
  T factor, keep, l2, beta2, one_minus_beta1, one_minus_beta2, step_size, correction, eps;
  Adam(const AdamStep& s, double gradient_factor)
      : factor(T(gradient_factor)),
        keep(T(s.decoupled ? 1 - s.lr * s.weight_decay : 1)),
        l2(T(s.decoupled ? 0 : s.weight_decay)),
        beta2(T(s.beta2)),
        one_minus_beta1(T(1 - s.beta1)),
        one_minus_beta2(T(1 - s.beta2)),
        step_size(T(s.lr / s.bias_correction1)),
        correction(T(1 / std::sqrt(s.bias_correction2))),
        eps(T(s.eps)) {}

  // state: exp_avg, exp_avg_sq, max_exp_avg_sq or null
  [[gnu::always_inline]] void run(T* __restrict p, const T* __restrict grad, T* const* state,
                                  int64_t n) const {
    T* __restrict m = state[0], * __restrict v = state[1], * __restrict most = state[2];
    for (int64_t i = 0; i < n; ++i) {
      T g = grad[i] * factor;
      if (l2 != 0) g += l2 * p[i];
      const T mean = m[i] + one_minus_beta1 * (g - m[i]),
              square = beta2 * v[i] + one_minus_beta2 * g * g;
      m[i] = mean, v[i] = square;
      T largest = square;
      if (most) most[i] = largest = most[i] > square ? most[i] : square;
      p[i] = p[i] * keep - step_size * mean / (std::sqrt(largest) * correction + eps);
    }
  }
};

template <class T>
struct Sgd {
  T factor, l2, momentum, one_minus_dampening, lr;
  bool nesterov, first;
  Sgd(const SgdStep& s, double gradient_factor)
      : factor(T(gradient_factor)),
        l2(T(s.weight_decay)),
        momentum(T(s.momentum)),
        one_minus_dampening(T(1 - s.dampening)),
        lr(T(s.lr)),
        nesterov(s.nesterov),
        first(s.first) {}

  // state: the momentum buffer or null
  [[gnu::always_inline]] void run(T* __restrict p, const T* __restrict grad, T* const* state,
                                  int64_t n) const {
    T* __restrict buffer = state[0];
    for (int64_t i = 0; i < n; ++i) {
      T g = grad[i] * factor;
      if (l2 != 0) g += l2 * p[i];
      if (buffer) {
        const T b = first ? g : momentum * buffer[i] + one_minus_dampening * g;
        buffer[i] = b;
        g = nesterov ? g + momentum * b : b;
      }
      p[i] -= lr * g;
    }
  }
};

template <class Step, class T>
SHERD_AVX2 void run_avx2(const Step& s, T* p, const T* g, T* const* state, int64_t n) {
  s.run(p, g, state, n);
}
template <class Step, class T>
SHERD_AVX512 void run_avx512(const Step& s, T* p, const T* g, T* const* state, int64_t n) {
  s.run(p, g, state, n);
}

template <template <class> class Step, class Options>
void step(const Tensor& param, const Tensor& grad, std::initializer_list<const Tensor*> states,
          const Options& options) {
  const GradientScaling& scaling = options.gradient;
  if (scaling.found_inf.defined() && scaling.found_inf.template item<double>() != 0) return;
  double factor = scaling.maximize ? -scaling.factor : scaling.factor;
  if (scaling.scale.defined()) factor *= scaling.scale.template item<double>();
  if (param.dtype() != kFloat32 && param.dtype() != kFloat64)
    fail("an optimizer's parameters and states are float32 or float64, not ", param.dtype());
  auto go = [&]<class T>(Type<T>) {
    const Step<T> s(options, factor);
    T *p = param.data<T>(), *state[3] = {};
    int count = 0;
    for (auto* t : states) state[count++] = t->defined() ? t->data<T>() : nullptr;
    const bool same = grad.dtype() == dtype_of<T>;
    const Convert widen = convert(dtype_of<T>, grad.dtype());
    const int64_t size = size_of(grad.dtype());
    const char* g = grad.bytes();
    auto run = has_avx512() ? run_avx512<Step<T>, T> : run_avx2<Step<T>, T>;
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
        T* at[3];
        for (int k = 0; k < 3; ++k) at[k] = state[k] ? state[k] + i : nullptr;
        run(s, p + i, from, at, n);
      }
    });
  };
  param.dtype() == kFloat64 ? go(Type<double>{}) : go(Type<float>{});
}

void adam(const Stream&, const Tensor& param, const Tensor& grad, const Tensor& exp_avg,
          const Tensor& exp_avg_sq, const Tensor& max_exp_avg_sq, const AdamStep& options) {
  step<Adam>(param, grad, {&exp_avg, &exp_avg_sq, &max_exp_avg_sq}, options);
}
void sgd(const Stream&, const Tensor& param, const Tensor& grad, const Tensor& momentum_buffer,
         const SgdStep& options) {
  step<Sgd>(param, grad, {&momentum_buffer}, options);
}

const Register a{adam_kernel, DeviceType::kCPU, adam}, s{sgd_kernel, DeviceType::kCPU, sgd};

}  // namespace
}  // namespace sherd::cpu
