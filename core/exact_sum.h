// ExactSum: sums of |x|^p over any number of tensors, without rounding, so that a norm depends on
// the values alone and not on how they are cut into pieces, ordered, or spread over threads and
// ranks.
//
//     ExactSum sum(2.0);                             // squares; 1: absolute values; kInfinity: max
//     for (const Tensor& g : gradients) sum.add(g);  // this rank's pieces
//     group->all_reduce(sum.state(), sum.merges_by_max() ? ReduceOp::kMax : ReduceOp::kSum);
//     double norm = sum.norm();                      // the same bits on every rank
//
// The state is a tensor of int64 on the inputs' device. Adding the states of several ranks element
// by element gives the state of the union of their inputs, so one integer all-reduce merges them
// (up to 2^20 ranks; it leaves digits above 2^40, which norm() and the next add() carry).
//
// [Note: exact sums] The state is one wide fixed-point integer: limb k counts multiples of
// 2^(kLowest + 40 k). A square of a float32 has 48 bits and is added without rounding: for
// A = 1.5 * 2^(a + 52), t = (q + A) - A is q rounded to a multiple of 2^a; t is summed in double
// (2,048 terms below 2^(a + 41): no addition rounds), q - t is exact, and the next, 40 bits finer
// grid takes it. After the finest needed grid nothing is left. The sums then go into the limbs as
// integers, and integer addition is associative and commutative. It must be compiled without
// -ffast-math. Values with wider mantissas (float64, other powers) are split as integers.
#pragma once
#include <limits>

#include "core/kernel.h"

namespace sherd {

class ExactSum {
 public:
  static constexpr double kInfinity = std::numeric_limits<double>::infinity();
  // The grid of limbs: from below the square of the smallest float64 to 2^2160, so that 2^64
  // squares of the largest fit.
  static constexpr int kLimbs = 108, kBits = 40, kLowest = -2160;
  // The state's places after the limbs.
  static constexpr int kInfs = kLimbs, kNaNs = kLimbs + 1, kStateSize = kLimbs + 2;

  // p > 0: the sum of |x|^p; kInfinity: the largest |x|. Other powers than 1, 2 and kInfinity are
  // rounded to double one by one (the same on every cut) before they are summed exactly. Error for
  // p <= 0 or NaN.
  explicit ExactSum(double p = 2, Device device = kCPU);

  // Adds all elements of x: any shape and strides; float16, bfloat16, float32 or float64. Error for
  // other dtypes and for another device.
  void add(const Tensor& x);
  // Adds what `other` holds. Error if its p differs.
  void merge(const ExactSum& other);

  double p() const { return p_; }
  // int64 [kStateSize], or [1] for kInfinity; zeros of it are the state of no inputs.
  const Tensor& state() const { return state_; }
  bool merges_by_max() const { return p_ == kInfinity; }

  // (sum of |x|^p)^(1/p), or the largest |x|; 0 for no inputs. NaN if any input was NaN, else
  // infinity if any was infinite. For p = 2 within one unit in the last place of the true value.
  double norm() const;
  // The sum itself (the largest |x| for kInfinity), rounded once; infinity where it exceeds double.
  double sum() const;

  // Brings limbs to digits in [0, 2^40), but for the last one; negative limbs too.
  static void carry(int64_t* limbs);

 private:
  double p_;
  Tensor state_;
};

// Adds |x|^p of a contiguous x into the state, and leaves digits in [0, 2^40) but for the last
// limb.
inline constinit Kernel<void(const Tensor& x, double p, const Tensor& state)> exact_sum_kernel{
    "exact_sum"};

}  // namespace sherd
