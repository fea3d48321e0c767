// Muon: momentum whose updates are orthogonalised matrices, for the weights of hidden layers.
//
//     optim::Muon matrices(hidden_weights, {.lr = 0.02});
//     optim::AdamW others(embeddings_biases_and_norms, {.lr = 3e-4});
//     ...
//     matrices.step(), others.step();
//
// Jordan et al.: Muon: An optimizer for hidden layers in neural networks. 2024. Liu et al.: Muon is
// Scalable for LLM Training. arXiv 2502.16982 (kMatchRmsAdamW). Names, defaults and formulas are
// PyTorch's:
//     B += (1 - momentum) (G - B);   U = G + momentum (B - G) with nesterov, else B
//     W = (1 - lr weight_decay) W - lr ratio orthogonalised(U)
// The Newton-Schulz iterations run in bfloat16, also for float64 parameters. Parameters are
// matrices; of a sharded one, step() brings each whole update to one rank of its group, which
// orthogonalises it, and sends the parts back: one exchange of 2 bytes an element each way, and the
// same bits as without sharding. So step() is a collective then, to be called by all ranks. Four
// bytes of state an element for float32 parameters.
#pragma once
#include "optim/param_groups.h"

namespace sherd::optim {

// By what the learning rate of an [A, B] matrix is multiplied.
enum class AdjustLr : uint8_t {
  kOriginal,           // sqrt(max(1, A / B))
  kMatchRmsAdamW,      // 0.2 sqrt(max(A, B)): AdamW's learning rates serve
  kSpectralUnclamped,  // sqrt(A / B)
};

struct MuonOptions {
  double lr = 1e-3;
  double weight_decay = 0.1;  // shrinks parameters
  double momentum = 0.95;
  bool nesterov = true;
  double eps = 1e-7;  // the least norm that updates are divided by
  // The rest is one for all groups, and in no state_dict.
  std::array<double, 3> ns_coefficients = {3.4445, -4.775, 2.0315};
  int ns_steps = 5;  // below 100
  AdjustLr adjust_lr_fn = AdjustLr::kOriginal;
};
struct MuonGroup {
  std::vector<Tensor> params = {};
  std::optional<double> lr = {};
  std::optional<double> weight_decay = {};
  std::optional<double> momentum = {};
  std::optional<bool> nesterov = {};
  std::optional<double> eps = {};
};
struct MuonFields {
  template <class F, class... S>
  static void visit(F&& f, S&... s) {
    f("lr", s.lr...);
    f("weight_decay", s.weight_decay...);
    f("momentum", s.momentum...);
    f("nesterov", s.nesterov...);
    f("eps", s.eps...);
  }
};
// Error that names the option which is out of range.
void check_options_of(const MuonOptions& options);

class Muon : public WithGroups<MuonOptions, MuonGroup, MuonFields> {
 public:
  // Error that names a parameter which is no matrix.
  explicit Muon(const std::vector<Tensor>& params, const MuonOptions& options = {})
      : WithGroups(params, options) {
    check_matrices();
  }
  explicit Muon(const NamedTensors& params, const MuonOptions& options = {})
      : WithGroups(params, options) {
    check_matrices();
  }
  explicit Muon(const std::vector<MuonGroup>& groups, const MuonOptions& options = {})
      : WithGroups(groups, options) {
    check_matrices();
  }

 private:
  struct Sharded;

  void check_matrices() const;
  const char* type() const override { return "Muon"; }
  std::span<const char* const> state_names() const override;
  bool needs_state(size_t, size_t) const override { return true; }
  void update(size_t group, const Tensor& param, const Tensor& grad, State& state,
              GradientScaling scaling) override;
  void update_all(std::vector<Stepped>& stepped, const GradientScaling& scaling) override;
  Tensor direction(size_t group, const Tensor& param, const Tensor& grad, State& state,
                   const GradientScaling& scaling) const;
  void apply(size_t group, const Dims& shape, const Tensor& param, const Tensor& direction) const;
  void update_sharded(const std::vector<Sharded>& sharded, const GradientScaling& scaling);
};

}  // namespace sherd::optim
