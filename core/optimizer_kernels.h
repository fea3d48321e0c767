// Optimizer steps on flat runs of parameters, each one pass over memory.
//
//     AdamStep step{.lr = 1e-3, .weight_decay = 0.01, .decoupled = true,
//                   .bias_correction1 = 1 - std::pow(0.9, t),
//                   .bias_correction2 = 1 - std::pow(0.999, t)};
//     adam_kernel(p.device(), p.dtype())(p, g, exp_avg, exp_avg_sq, {}, step);
//
// All tensors of a call have n elements, contiguous; parameters and states share one dtype, float32
// or float64; gradients may also be bfloat16 or float16. An element's bits depend on its own values
// alone, not on where a run is cut or how it is aligned.
#pragma once
#include "core/kernel.h"

namespace sherd {

// What every step may do to the gradient first. Scalars are tensors where a kernel made them, so
// that nobody waits for an accelerator.
struct GradientScaling {
  double factor = 1;
  Tensor scale = {};      // one element, float32: multiplies the gradient too (a clip coefficient)
  Tensor found_inf = {};  // one element, float32: where it isn't 0, the step changes nothing
  bool maximize = false;
};

// Kingma, Ba: Adam. arXiv 1412.6980. Loshchilov, Hutter: Decoupled Weight Decay (AdamW). arXiv
// 1711.05101. With g scaled as above, and g += weight_decay p where not decoupled:
//     p *= 1 - lr weight_decay                            if decoupled
//     m += (1 - beta1) (g - m);   v = beta2 v + (1 - beta2) g g
//     p -= lr / bias_correction1 m / (sqrt(v) / sqrt(bias_correction2) + eps)
// With amsgrad the largest v so far takes v's place in the last line.
struct AdamStep {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  bool decoupled = true;                              // AdamW; else Adam
  double bias_correction1 = 1, bias_correction2 = 1;  // 1 - beta^t
  GradientScaling gradient;
};
// param, exp_avg, exp_avg_sq (and max_exp_avg_sq, where defined: amsgrad) are changed in place.
inline constinit Kernel<void(const Tensor& param, const Tensor& grad, const Tensor& exp_avg,
                             const Tensor& exp_avg_sq, const Tensor& max_exp_avg_sq,
                             const AdamStep& step)>
    adam_kernel{"adam"};

// PyTorch's SGD: g += weight_decay p; with momentum, buf = momentum buf + (1 - dampening) g (buf =
// g at the first step) and g = buf, or g + momentum buf with nesterov; p -= lr g.
struct SgdStep {
  double lr = 1e-3, momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false;
  bool first = false;  // the buffer holds nothing yet
  GradientScaling gradient;
};
// param and momentum_buffer (undefined where momentum is 0) are changed in place.
inline constinit Kernel<void(const Tensor& param, const Tensor& grad, const Tensor& momentum_buffer,
                             const SgdStep& step)>
    sgd_kernel{"sgd"};

}  // namespace sherd
