// Gradcheck: analytic derivatives against central differences, in float64.
//
//     // Error if they differ
//     gradcheck([](const auto& in) { return std::vector<Tensor>{tanh(in[0]) * in[1]}; }, {x, y});
#pragma once
#include <functional>
#include <vector>

#include "core/tensor.h"

namespace sherd {

struct GradcheckOptions {
  double eps = 1e-6;  // step of the differences
  double atol = 1e-5, rtol = 1e-3;
  bool create_graph = false;  // check the composed derivative (what a graph of the gradient uses),
                              // not the fused one
};
using TensorsFunction = std::function<std::vector<Tensor>(const std::vector<Tensor>&)>;

// Checks d(outputs)/d(inputs) for each input that is float64. Error names input, element, both
// values.
void gradcheck(const TensorsFunction& f, const std::vector<Tensor>& inputs,
               const GradcheckOptions& options = {});
// The same for the second derivative: gradcheck of the function's own gradient.
void gradgradcheck(const TensorsFunction& f, const std::vector<Tensor>& inputs,
                   const GradcheckOptions& options = {});

}  // namespace sherd
