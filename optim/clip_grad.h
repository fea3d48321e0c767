// Gradient clipping. Parameters may be sharded by FSDP: each counts once, with all its pieces.
//
//     Tensor norm = optim::clip_grad_norm_(model.parameters(), 1.0);
//     optimizer.step();
//
// or, with the same bits for float32 gradients and without a pass over memory to scale them:
//
//     auto clip = optim::clip_coefficient(model.parameters(), 1.0);
//     optimizer.step({.grad_scale = clip.coefficient});
//
// [Note: norms] The norm is an exact sum (core/exact_sum.h), so it has the same bits however the
// gradients are cut into pieces: under DDP and all of FSDP's strategies. With sharded parameters
// these are collectives: all ranks of their group must call them, also those that have no gradient.
// There is one all-reduce a group (nn::ShardInfo::group), whatever the number of parameters.
//
// Errors name a parameter whose gradient has another shape than it ("not reduced yet": the last
// backward of a sharded model ran under no_sync).
#pragma once
#include <limits>
#include <vector>

#include "core/tensor.h"

namespace sherd::optim {

inline constexpr double kInfinityNorm = std::numeric_limits<double>::infinity();

struct ClipCoefficient {
  // Of all gradients together, before clipping: 0-d, in the gradients' dtype if all have one, else
  // float32. 0 if there is no gradient.
  Tensor norm;
  // min(1, max_norm / (norm + 1e-6)), from the norm in float32: 0-d float32; all in float64 if the
  // gradients are. NaN where the norm is, and 0 where it is infinite, as in PyTorch.
  Tensor coefficient;
};

// The norm of the given parameters' gradients seen as one vector (norm_type > 0: 1, 2,
// kInfinityNorm and others), and what to multiply them by so that it is at most max_norm (>= 0;
// infinite: no clipping). Error if error_if_nonfinite and the norm is NaN or infinite.
ClipCoefficient clip_coefficient(const std::vector<Tensor>& params, double max_norm,
                                 double norm_type = 2, bool error_if_nonfinite = false);

// Multiplies the gradients by the coefficient, in place; returns the norm.
Tensor clip_grad_norm_(const std::vector<Tensor>& params, double max_norm, double norm_type = 2,
                       bool error_if_nonfinite = false);

// Limits each element of the gradients to [-clip_value, clip_value], in place; NaN stays.
void clip_grad_value_(const std::vector<Tensor>& params, double clip_value);

}  // namespace sherd::optim
