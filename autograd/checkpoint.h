// Activation checkpointing: a region's activations are not kept but computed again in backward.
//
//     Tensor y = checkpoint([&](const Tensor& x) { return block(x); }, x);
//
// The function is called again in backward: what it refers to must still be there. So capture
// tensors by value, and modules by reference.
//
// Chen, Xu, Zhang, Guestrin: Training Deep Nets with Sublinear Memory Cost. arXiv 1604.06174.
// Dropout draws the same numbers in both passes. Same bits as without, as long as the function is
// the same function both times. Under no_grad, or when nothing needs a gradient, it is a plain
// call.
#pragma once
#include <functional>

#include "core/tensor.h"

namespace sherd {

using TensorFunction = std::function<std::vector<Tensor>(const std::vector<Tensor>&)>;
std::vector<Tensor> checkpoint(const TensorFunction& f, const std::vector<Tensor>& inputs);
Tensor checkpoint(const std::function<Tensor(const Tensor&)>& f, const Tensor& input);

namespace autograd {
bool is_checkpointing();  // this thread is in the first pass of a checkpointed region
bool is_recomputing();    // this thread recomputes one, in backward
}  // namespace autograd

}  // namespace sherd
