// Initialisers: how a parameter's values follow from (seed, parameter's full name, element index)
// alone, so that any sharding at any world size starts from the same model and a rank fills only
// its own piece.
//
//     weight(parameter("weight", {out, in}, init::kaiming_uniform(in)))
//
// Distributions are PyTorch's; the numbers are Sherd's own.
#pragma once
#include <functional>

#include "core/tensor.h"

namespace sherd::nn {

struct Initializer {
  // Fills `values`, one-dimensional and contiguous, with elements begin, begin + 1, .. of the
  // parameter; `key` is made of seed and full name.
  std::function<void(uint64_t key, int64_t begin, const Tensor& values)> fill;
  // It must see the whole parameter (in its shape) at once: `begin` is 0.
  bool whole = false;
};

namespace init {

Initializer constant(double value);
Initializer zeros();
Initializer ones();
Initializer uniform(double low, double high);
Initializer normal(double mean = 0, double std = 1);
Initializer trunc_normal(double mean, double std, double low, double high);
// PyTorch's default of Linear, kaiming_uniform_(a = sqrt(5)): uniform in +-1 / sqrt(fan_in).
Initializer kaiming_uniform(int64_t fan_in);
// Uniform in +-sqrt(6 / (fan_in + fan_out)). Glorot, Bengio. AISTATS 2010.
Initializer xavier_uniform(int64_t fan_in, int64_t fan_out);

}  // namespace init
}  // namespace sherd::nn
