#include "examples/support/evaluate.h"

#include <algorithm>
#include <map>
#include <string>
#include <vector>

namespace examples {

using namespace sherd;

double validation_loss(const data::Dataset& samples, int64_t batch_size,
                       const std::function<Tensor(const data::Batch& batch)>& logits) {
  NoGrad off;
  constexpr int64_t kNoLabel = -100;
  const int64_t n = samples.size(), w = dist::world_size();
  double sum = 0, count = 0;
  for (int64_t first = 0; first < n; first += w * batch_size) {
    std::map<std::string, std::vector<Tensor>> columns;
    for (int64_t k = 0; k < batch_size; ++k) {
      const int64_t i = first + k * w + dist::rank();
      data::Sample s = samples.get(std::min(i, n - 1));
      if (i >= n) s.at("labels") = full(s.at("labels").sizes(), kNoLabel, kInt64);
      for (auto& [name, x] : s) columns[name].push_back(x);
    }
    data::Batch batch;
    for (auto& [name, list] : columns) batch.set(name, stack(list));
    const Tensor labels = batch.at("labels").view({-1}), y = logits(batch);
    const int64_t* l = labels.data<int64_t>();
    count += double(
        std::count_if(l, l + labels.numel(), [](int64_t label) { return label != kNoLabel; }));
    sum += F::cross_entropy(y.view({-1, y.size(-1)}).to(kFloat32), labels,
                            {.reduction = Reduction::kSum})
               .item();
  }
  Tensor totals = tensor<double>({sum, count});
  dist::all_reduce(totals);
  return totals.data<double>()[0] / totals.data<double>()[1];
}

}  // namespace examples
