#include "examples/support/evaluate.h"

namespace examples {

using namespace sherd;

double validation_loss(const data::Dataset& samples, int64_t batch_size,
                       const std::function<Tensor(const data::Batch& batch)>& logits) {
  NoGrad off;
  constexpr double kNoLabel = -100;
  const data::EvaluationDataset padded(samples, dist::world_size() * batch_size);
  data::DistributedSampler sampler(
      padded.size(), {.num_replicas = dist::world_size(), .rank = dist::rank(), .shuffle = false});
  data::DataLoader batches(padded, {.batch_size = batch_size, .sampler = &sampler});
  dist::MeanMetric loss;
  for (auto& batch : batches) {
    const Tensor labels = batch.at("labels"), y = logits(batch);
    const Tensor losses = F::cross_entropy(y.view({-1, y.size(-1)}).to(kFloat32), labels.view({-1}),
                                           {.reduction = Reduction::kNone});
    const Tensor counts = (labels != full({}, kNoLabel, kInt64)) & batch.at("valid").view({-1, 1});
    loss.update(losses, counts.view({-1}));
  }
  return loss.compute();
}

}  // namespace examples
