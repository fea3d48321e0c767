// SGD: stochastic gradient descent, with momentum (also Nesterov's) and weight decay.
//
//     optim::SGD optimizer(model.parameters(), {.lr = 0.1, .momentum = 0.9});
//
// Sutskever, Martens, Dahl, Hinton: On the importance of initialization and momentum in deep
// learning. ICML 2013. Names, defaults and formulas are PyTorch's: the first step sets the momentum
// buffer to the gradient, without dampening. No state without momentum, else four bytes an element
// for float32 parameters.
#pragma once
#include "optim/param_groups.h"

namespace sherd::optim {

struct SgdOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;     // share of the gradient that does not enter the momentum buffer
  double weight_decay = 0;  // added to the gradient
  bool nesterov = false;    // needs momentum and no dampening
  bool maximize = false;    // go up the gradient
};
struct SgdGroup {
  std::vector<Tensor> params = {};
  std::optional<double> lr = {};
  std::optional<double> momentum = {};
  std::optional<double> dampening = {};
  std::optional<double> weight_decay = {};
  std::optional<bool> nesterov = {};
  std::optional<bool> maximize = {};
};
struct SgdFields {
  template <class F, class... S>
  static void visit(F&& f, S&... s) {
    f("lr", s.lr...);
    f("momentum", s.momentum...);
    f("dampening", s.dampening...);
    f("weight_decay", s.weight_decay...);
    f("nesterov", s.nesterov...);
    f("maximize", s.maximize...);
  }
};
// Error that names the option which is out of range.
void check_options_of(const SgdOptions& options);

class SGD : public WithGroups<SgdOptions, SgdGroup, SgdFields> {
 public:
  explicit SGD(const std::vector<Tensor>& params, const SgdOptions& options = {})
      : WithGroups(params, options) {}
  explicit SGD(const NamedTensors& params, const SgdOptions& options = {})
      : WithGroups(params, options) {}
  explicit SGD(const std::vector<SgdGroup>& groups, const SgdOptions& options = {})
      : WithGroups(groups, options) {}

 private:
  const char* type() const override { return "SGD"; }
  std::span<const char* const> state_names() const override;
  bool needs_state(size_t group, size_t tensor) const override;
  void update(size_t group, const Tensor& param, const Tensor& grad, State& state,
              GradientScaling scaling) override;
};

}  // namespace sherd::optim
