// Cross entropy of logits against class indices, fused: no probabilities are stored.
//
//     cross_entropy_forward(x.device(), x.dtype())(logits, targets, options, losses, log_sums,
//                                                  sums);
//     loss = sums[0] / sums[1];                                       // reduction "mean"
//     cross_entropy_backward(x.device(), x.dtype())(g, sums[1], logits, targets, log_sums,
//                                                   options, dlogits);
//
// Legend: N rows (tokens), V classes. With t = targets[n], w = weight (1 where undefined), p =
// softmax(logits[n]) and s = label_smoothing,
//     losses[n] = -(1 - s) w[t] log p[t] - s / V sum_v w[v] log p[v];     0 where t = ignore_index
//     sums = {sum of losses, sum of w[t] over the rows not ignored}
// which are PyTorch's definitions for reductions none, sum and mean.
#pragma once
#include "core/kernel.h"

namespace sherd {

struct CrossEntropyOptions {
  int64_t ignore_index = -100;
  double label_smoothing = 0;  // in [0, 1]
  Tensor weight = {};          // [V], the classes' weights, floating point; undefined: all 1
};

// logits [N, V], rows side by side or not, columns with stride 1: float32, bfloat16, float16 or
// float64. targets [N] int64. losses [N], log_sums [N, 2] (m = max of the row's logits and
// log(sum_v e^(x[v] - m)), also of ignored rows: rounded, the sum of the two would lack digits) and
// sums [2] are written, in float32 (float64 for float64 logits). The sums are taken in float64, in
// an order that follows from N alone. Error where a target is neither ignore_index nor in [0, V):
// names position, value and V.
inline constinit Kernel<void(const Tensor& logits, const Tensor& targets,
                             const CrossEntropyOptions& options, const Tensor& losses,
                             const Tensor& log_sums, const Tensor& sums)>
    cross_entropy_forward{"cross_entropy"};

// dlogits = d(losses)/d(logits) g / divisor. g [N], or of one element for all rows; divisor of one
// element, or undefined for 1. dlogits [N, V] of any floating point dtype; it may be the memory of
// logits itself (where both have one dtype), which is then overwritten. Rows ignored get zeros.
inline constinit Kernel<void(const Tensor& g, const Tensor& divisor, const Tensor& logits,
                             const Tensor& targets, const Tensor& log_sums,
                             const CrossEntropyOptions& options, const Tensor& dlogits)>
    cross_entropy_backward{"cross_entropy backward"};

}  // namespace sherd
