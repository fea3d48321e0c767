// The stateless forms of layers and losses, under PyTorch's names: F::cross_entropy(logits,
// targets).
#pragma once
#include "autograd/ops.h"

namespace sherd::nn::functional {

using sherd::cross_entropy;
using sherd::dropout;
using sherd::embedding;
using sherd::gelu;
using sherd::layer_norm;
using sherd::leaky_relu;
using sherd::linear;
using sherd::log_softmax;
using sherd::mse_loss;
using sherd::relu;
using sherd::scaled_dot_product_attention;
using sherd::silu;
using sherd::softmax;

}  // namespace sherd::nn::functional

namespace sherd {
namespace F = nn::functional;
}
