// EvaluationDataset: a dataset made as long as ranks and batches need it, so that an evaluation
// counts each sample exactly once at any world size while every rank runs as many batches, all of
// them full.
//
//     data::EvaluationDataset padded(dataset, dist::world_size() * 8);
//     data::DistributedSampler sampler(padded.size(), {..., .shuffle = false});
//     data::DataLoader loader(padded, {.batch_size = 8, .sampler = &sampler});
//     for (auto& batch : loader) {
//       Tensor losses = ...;                                     // [B]
//       metric.update(losses, batch.at("valid"));                // dist::MeanMetric
//     }
//     double loss = metric.compute();
//
// Where the ranks' forwards exchange nothing, DistributedSampler's `uneven` does without padding.
#pragma once
#include "data/dataset.h"

namespace sherd::data {

class EvaluationDataset : public Dataset {
 public:
  // Its size is the next multiple of `multiple`. `dataset` must live as long. Error if it is empty.
  EvaluationDataset(const Dataset& dataset, int64_t multiple);
  int64_t size() const override { return size_; }
  // The sample, beyond the end the last one, and "valid", bool []: false beyond the end.
  Sample get(int64_t index) const override;

 private:
  const Dataset& dataset_;
  int64_t size_;
};

}  // namespace sherd::data
