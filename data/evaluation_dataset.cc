#include "data/evaluation_dataset.h"

#include <algorithm>

#include "core/error.h"

namespace sherd::data {

EvaluationDataset::EvaluationDataset(const Dataset& dataset, int64_t multiple)
    : dataset_(dataset), size_(dataset.size()) {
  if (multiple < 1)
    fail("[EvaluationDataset] the multiple is world size times batch size, at least 1, got ",
         multiple);
  if (size_ == 0) fail("[EvaluationDataset] the dataset is empty");
  size_ = (size_ + multiple - 1) / multiple * multiple;
}

Sample EvaluationDataset::get(int64_t index) const {
  if (index < 0 || index >= size_)
    fail("[EvaluationDataset] sample ", index, " was asked for; there are ", size_);
  const int64_t n = dataset_.size();
  Sample sample = dataset_.get(std::min(index, n - 1));
  if (sample.contains("valid")) fail("[EvaluationDataset] the samples have a 'valid' of their own");
  sample.set("valid", full({}, index < n, kBool));
  return sample;
}

}  // namespace sherd::data
