// Means over all samples of all ranks, whatever number each of them has.
//
//     dist::MeanMetric loss, accuracy;
//     for (auto& batch : loader) {
//       loss.update(losses);                              // [B], one value a sample
//       accuracy.update(right, batch.at("valid"));        // of those that count
//       tokens.update(mean_loss, batch_tokens);           // a mean of that many
//     }
//     double l = loss.compute();                          // a collective; the same on all ranks
//
// Sums are exact (core/exact_sum.h): the mean of given values has the same bits at any world size,
// in any order and under any cut into batches. A mean of per-rank means it never is.
#pragma once
#include <cstdint>
#include <vector>

#include "core/exact_sum.h"
#include "distributed/process_group.h"

namespace sherd::dist {

class MeanMetric {
 public:
  MeanMetric() = default;
  MeanMetric(MeanMetric&&) = default;
  MeanMetric& operator=(MeanMetric&&) = default;
  // Adds all elements: floating, of any shape; one each.
  void update(const Tensor& values);
  // Those where `valid` (bool, of as many elements) is true.
  void update(const Tensor& values, const Tensor& valid);
  // A mean of `weight` samples. Their sum is rounded once.
  void update(double value, int64_t weight = 1);

  int64_t count() const { return count_; }  // of this rank, since reset()
  // A collective; a null group is one rank. NaN if there are no samples anywhere. Does not reset.
  double compute(const Group& group) const { return compute({this}, group)[0]; }
  double compute() const;  // over the default group; alone, if there is none
  // Several in one collective; all ranks give as many.
  static std::vector<double> compute(const std::vector<const MeanMetric*>& metrics,
                                     const Group& group);
  void reset() { *this = {}; }

 private:
  ExactSum positive_{1}, negative_{1};
  int64_t count_ = 0;
};

}  // namespace sherd::dist
