#include "optim/sgd.h"

namespace sherd::optim {

void check_options_of(const SgdOptions& o) {
  check_range("sgd", "lr", o.lr, 0);
  check_range("sgd", "momentum", o.momentum, 0);
  check_range("sgd", "dampening", o.dampening, -std::numeric_limits<double>::infinity());
  check_range("sgd", "weight_decay", o.weight_decay, 0);
  if (o.nesterov && (o.momentum == 0 || o.dampening != 0))
    fail("[sgd] nesterov needs a momentum and no dampening, got momentum ", o.momentum,
         " and dampening ", o.dampening);
}

std::span<const char* const> SGD::state_names() const {
  static constexpr const char* names[] = {"momentum_buffer"};
  return names;
}
bool SGD::needs_state(size_t group, size_t) const { return param_groups()[group].momentum != 0; }

void SGD::update(size_t group, const Tensor& param, const Tensor& grad, State& state,
                 GradientScaling scaling) {
  const SgdOptions& o = param_groups()[group];
  Tensor& buffer = state.tensors[0];
  const bool first = !buffer.defined();
  if (first && needs_state(group, 0)) buffer = make_state(param);
  scaling.maximize = o.maximize;
  const SgdStep step{.lr = o.lr,
                     .momentum = o.momentum,
                     .dampening = o.dampening,
                     .weight_decay = o.weight_decay,
                     .nesterov = o.nesterov,
                     .first = first,
                     .gradient = scaling};
  sgd_kernel(param.device(), param.dtype())(param, grad, o.momentum != 0 ? buffer : Tensor(), step);
}

}  // namespace sherd::optim
