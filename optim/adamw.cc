#include "optim/adamw.h"

#include <cmath>

namespace sherd::optim {

void check_options_of(const AdamOptions& o) {
  check_range("adam", "lr", o.lr, 0);
  check_range("adam", "betas[0]", o.betas[0], 0, 1);
  check_range("adam", "betas[1]", o.betas[1], 0, 1);
  check_range("adam", "eps", o.eps, 0);
  check_range("adam", "weight_decay", o.weight_decay, 0);
}

std::span<const char* const> Adam::state_names() const {
  static constexpr const char* names[] = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
  return names;
}
bool Adam::needs_state(size_t group, size_t tensor) const {
  return tensor < 2 || param_groups()[group].amsgrad;
}

void Adam::update(size_t group, const Tensor& param, const Tensor& grad, State& state,
                  GradientScaling scaling) {
  const AdamOptions& o = param_groups()[group];
  for (size_t i = 0; i < state_names().size(); ++i)
    if (needs_state(group, i) && !state.tensors[i].defined()) state.tensors[i] = make_state(param);
  scaling.maximize = o.maximize;
  const double t = double(state.step);
  const AdamStep step{.lr = o.lr,
                      .beta1 = o.betas[0],
                      .beta2 = o.betas[1],
                      .eps = o.eps,
                      .weight_decay = o.weight_decay,
                      .decoupled = decoupled(),
                      .bias_correction1 = 1 - std::pow(o.betas[0], t),
                      .bias_correction2 = 1 - std::pow(o.betas[1], t),
                      .gradient = scaling};
  adam_kernel(param.device(), param.dtype())(param, grad, state.tensors[0], state.tensors[1],
                                             o.amsgrad ? state.tensors[2] : Tensor(), step);
}

AdamOptions AdamW::as_adam(const AdamWOptions& options) {
  AdamOptions result;
  AdamFields::visit([](const char*, auto& to, auto& from) { to = from; }, result, options);
  return result;
}

}  // namespace sherd::optim
