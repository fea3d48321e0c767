// The smallest model and data set that can be trained. Nothing here knows of ranks.
#pragma once
#include "sherd.h"

namespace examples {

using namespace sherd;

class ToyModel : public nn::Module {
 public:
  ToyModel() : linear(add<nn::Linear>("linear", 10, 1)) {}
  Tensor forward(const Tensor& x) { return linear(x); }  // [B, 10] -> [B, 1]

  nn::Child<nn::Linear> linear;
};

// Pairs of random numbers, the same ones in every process: x in [0, 1)^10, y in [0, 1).
class ToyDataset : public data::Dataset {
 public:
  explicit ToyDataset(int64_t size) {
    Generator generator;
    generator.seed(1234);
    GeneratorGuard guard(generator);
    x_ = rand({size, 10});
    y_ = rand({size, 1});
  }
  int64_t size() const override { return x_.size(0); }
  data::Sample get(int64_t i) const override {
    return {{"x", x_.select(0, i)}, {"y", y_.select(0, i)}};
  }

 private:
  Tensor x_, y_;
};

}  // namespace examples
