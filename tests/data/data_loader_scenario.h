// A dataset that counts, and loops over it: for data_loader_test.cc and data_loader_state_test.cc.
#pragma once
#include <functional>
#include <numeric>
#include <utility>
#include <vector>

#include "data/data_loader.h"

namespace sherd::data {

using Indices = std::vector<int64_t>;

// Sample i is {"x": i, ...}, by a function of the test's.
class TestDataset : public Dataset {
 public:
  using Get = std::function<Sample(int64_t)>;
  explicit TestDataset(int64_t size, Get get = {}) : size_(size), get_(std::move(get)) {}
  int64_t size() const override { return size_; }
  Sample get(int64_t i) const override {
    return get_ ? get_(i) : Sample{{"x", tensor<int64_t>({i})}};
  }

 private:
  int64_t size_;
  Get get_;
};

inline Indices values(const Tensor& x) {
  return {x.data<int64_t>(), x.data<int64_t>() + x.numel()};
}

inline std::vector<Indices> epoch_of(DataLoader& loader) {
  std::vector<Indices> batches;
  for (auto& batch : loader) batches.push_back(values(batch.at("x")));
  return batches;
}

inline Indices flat(const std::vector<Indices>& batches) {
  Indices all;
  for (const auto& batch : batches) all.insert(all.end(), batch.begin(), batch.end());
  return all;
}

inline Indices range(int64_t n) {
  Indices all(static_cast<size_t>(n));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

}  // namespace sherd::data
