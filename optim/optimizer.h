// Optimizer: what all optimizers share, and all that schedulers, gradient scalers and checkpoints
// know of one. Users make a concrete one (adamw.h, sgd.h):
//
//     optim::AdamW optimizer(model.parameters(), {.lr = 1e-4});
//     optimizer.zero_grad();
//     loss.backward();
//     Tensor norm = optim::clip_grad_norm_(model.parameters(), 1.0);
//     optimizer.step();
//     optimizer.param_groups()[0].lr = 3e-5;
//     save(optimizer.state_dict());
//
// [Note: optimizer state] A parameter's state (moments, number of steps) is made at its first step
// with a gradient, in the shape that the parameter then has. So an optimizer may be built over
// parameters that are only declared, or that FSDP shards later: the Tensor objects stay the same.
// State has the parameter's dtype, but float32 for bfloat16 and float16 parameters. A parameter
// without a gradient is left alone, and its steps are not counted.
#pragma once
#include <array>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "core/optimizer_kernels.h"
#include "core/tensor.h"
#include "nn/state_dict.h"

namespace sherd::optim {

// Error unless min <= value < end, by name.
void check_range(const char* op, const char* option, double value, double min,
                 double end = std::numeric_limits<double>::infinity());

struct StepArguments {
  // One element: every gradient is multiplied by it, in the same pass over memory (clip_grad.h's
  // coefficient).
  Tensor grad_scale = {};
  // One element: where it is not 0 (a gradient overflowed), the step changes nothing at all.
  Tensor found_inf = {};
};

class Optimizer {
 public:
  using NamedTensors = std::vector<std::pair<std::string, Tensor>>;

  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;
  virtual ~Optimizer();

  // Updates every parameter that has a gradient. Errors name the parameter and leave everything as
  // it was: a gradient of another shape (of a sharded parameter: one that no_sync() left
  // unreduced), state of another shape or dtype (the model was wrapped or converted after the first
  // step), an option out of range.
  void step(const StepArguments& arguments = {});
  // Gradients become undefined, or zeros where they exist.
  void zero_grad(bool set_to_none = true);

  // In order of the groups. Names are those that the optimizer was built with, or the parameters'
  // own full names (known once a model was touched), or positions; of equal names (two models in
  // one optimizer) all get "#position" behind them.
  NamedTensors named_parameters() const;

  // Everything by name, as tensors; moments of a sharded parameter are its local piece's:
  //   state.<parameter>.step          int64 []; only of parameters that were stepped
  //   state.<parameter>.<tensor>      such as exp_avg, in the parameter's shape
  //   state.<parameter>.group         int64 []: i of
  //   param_groups.<i>.<option>       float64 [] or [2], or bool []
  // State tensors are not copied: they change with the next step.
  nn::StateDict state_dict() const;
  // Takes a state_dict of the same parameters in the same groups, found by name. Dtypes are
  // converted. One Error lists all that is missing, unexpected or of another shape; another names a
  // parameter that is in another group. Nothing is changed then.
  void load_state_dict(const nn::StateDict& state);

  // ---- groups, for code that does not know the optimizer's type
  size_t num_groups() const { return num_groups_; }
  double lr(size_t group) const;
  void set_lr(size_t group, double lr);
  // SGD's momentum or Adam's first beta; null if it has neither.
  double* momentum(size_t group);
  // The lr that schedulers scale: what lr was when the first scheduler was built.
  double initial_lr(size_t group) const;
  void set_initial_lr(size_t group, double lr);
  // For the one scheduler that steps this optimizer: false while another, living one does.
  bool claim_schedule(const std::shared_ptr<void>& scheduler);

 protected:
  struct State {
    int64_t step = 0;
    std::array<Tensor, 3> tensors = {};  // by place in state_names(); undefined: not made
  };
  struct Option {
    const char* name;
    std::variant<double*, bool*, std::array<double, 2>*> value;
  };

  // A parameter that has a gradient, in one step.
  struct Stepped {
    Tensor param;
    size_t group;
    State* state;
    Tensor grad;
  };

  Optimizer() = default;
  // Error for what cannot be optimized: undefined, not a floating dtype, a result of an op, or
  // given twice. Names may be left out.
  void add_parameters(const std::vector<Tensor>& params, const std::vector<std::string>& names);
  // A state tensor like the parameter, under MemoryCategory::kOptimizer: zeros.
  static Tensor make_state(const Tensor& like);
  // Calls f(values, gradient), contiguous and in dtypes that kernels take. What f leaves in values
  // becomes the parameter's, and its version rises.
  using Change = std::function<void(const Tensor& values, const Tensor& grad)>;
  static void change(const Stepped& stepped, const Change& f);
  // One step of all that have a gradient, their steps counted: update() of one after another. An
  // optimizer that exchanges parts of several parameters does so here.
  virtual void update_all(std::vector<Stepped>& stepped, const GradientScaling& scaling);

 private:
  struct Entry {
    Tensor param;
    std::string name;  // as given; may be empty
    size_t group = 0;
    State state;
  };

  virtual const char* type() const = 0;
  virtual std::vector<Option> options(size_t group) = 0;
  virtual void check_options(size_t group) const = 0;
  virtual std::span<const char* const> state_names() const = 0;
  virtual bool needs_state(size_t group, size_t tensor) const = 0;
  // One parameter's step number state.step. `param` and `grad` are contiguous.
  virtual void update(size_t group, const Tensor& param, const Tensor& grad, State& state,
                      GradientScaling scaling) = 0;

  template <class T>
  T* find_option(size_t group, const char* name) const;
  std::string name_of(const Entry& entry) const;
  static std::string name_of(const Entry& entry, size_t position);
  std::vector<std::string> names() const;
  void check(const Entry& entry, const Tensor& grad) const;
  std::vector<int64_t> match_groups(const nn::StateDict& state,
                                    const std::vector<std::string>& names) const;

  size_t num_groups_ = 0;
  std::vector<Entry> entries_;
  std::vector<std::optional<double>> initial_lrs_;
  std::weak_ptr<void> schedule_;
};

}  // namespace sherd::optim
