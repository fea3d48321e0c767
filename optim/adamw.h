// AdamW and Adam.
//
//     optim::AdamW optimizer(model.parameters(), {.lr = 1e-4, .betas = {0.9, 0.95}});
//     optim::AdamW optimizer({{.params = matrices}, {.params = others, .weight_decay = 0}},
//                            {.lr = 1e-4, .weight_decay = 0.1});
//
// Kingma, Ba: Adam. arXiv 1412.6980. Loshchilov, Hutter: Decoupled Weight Decay Regularization
// (AdamW). arXiv 1711.05101. Reddi, Kale, Kumar: On the Convergence of Adam and Beyond (amsgrad).
// arXiv 1904.09237. Names, defaults and formulas are PyTorch's. Eight bytes of state an element for
// float32 parameters (amsgrad: twelve).
#pragma once
#include "optim/param_groups.h"

namespace sherd::optim {

struct AdamOptions {
  double lr = 1e-3;
  std::array<double, 2> betas = {0.9, 0.999};  // each in [0, 1)
  double eps = 1e-8;                           // added to the root of the second moment
  double weight_decay = 0;                     // added to the gradient (AdamW: shrinks parameters)
  bool amsgrad = false;                        // divide by the largest second moment so far
  bool maximize = false;                       // go up the gradient
};
struct AdamWOptions {
  double lr = 1e-3;
  std::array<double, 2> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 1e-2;
  bool amsgrad = false;
  bool maximize = false;
};
struct AdamGroup {
  std::vector<Tensor> params = {};
  std::optional<double> lr = {};
  std::optional<std::array<double, 2>> betas = {};
  std::optional<double> eps = {};
  std::optional<double> weight_decay = {};
  std::optional<bool> amsgrad = {};
  std::optional<bool> maximize = {};
};
struct AdamFields {
  template <class F, class... S>
  static void visit(F&& f, S&... s) {
    f("lr", s.lr...);
    f("betas", s.betas...);
    f("eps", s.eps...);
    f("weight_decay", s.weight_decay...);
    f("amsgrad", s.amsgrad...);
    f("maximize", s.maximize...);
  }
};
// Error that names the option which is out of range.
void check_options_of(const AdamOptions& options);

class Adam : public WithGroups<AdamOptions, AdamGroup, AdamFields> {
 public:
  explicit Adam(const std::vector<Tensor>& params, const AdamOptions& options = {})
      : WithGroups(params, options) {}
  explicit Adam(const NamedTensors& params, const AdamOptions& options = {})
      : WithGroups(params, options) {}
  explicit Adam(const std::vector<AdamGroup>& groups, const AdamOptions& options = {})
      : WithGroups(groups, options) {}

 private:
  virtual bool decoupled() const { return false; }
  const char* type() const override { return "Adam"; }
  std::span<const char* const> state_names() const override;
  bool needs_state(size_t group, size_t tensor) const override;
  void update(size_t group, const Tensor& param, const Tensor& grad, State& state,
              GradientScaling scaling) override;
};

class AdamW : public Adam {
 public:
  explicit AdamW(const std::vector<Tensor>& params, const AdamWOptions& options = {})
      : Adam(params, as_adam(options)) {}
  explicit AdamW(const NamedTensors& params, const AdamWOptions& options = {})
      : Adam(params, as_adam(options)) {}
  explicit AdamW(const std::vector<AdamGroup>& groups, const AdamWOptions& options = {})
      : Adam(groups, as_adam(options)) {}

 private:
  static AdamOptions as_adam(const AdamWOptions& options);
  bool decoupled() const override { return true; }
  const char* type() const override { return "AdamW"; }
};

}  // namespace sherd::optim
