// Saved: a tensor kept for backward, with the version it had. Unpacking a value that was changed in
// place since, or whose bytes were released, is an Error that names the op.
#pragma once
#include "autograd/node.h"

namespace sherd::autograd {

enum SavedAs { kInput, kOutput };

class Saved {
 public:
  Saved() = default;
  explicit Saved(const Tensor& t, SavedAs as = kInput, int output = 0);
  // The tensor. An output is given back with the running node as its history where a graph of the
  // gradient is wanted.
  Tensor get() const;
  bool defined() const { return tensor_.defined(); }

 private:
  Tensor tensor_;
  uint32_t version_ = 0;
  int output_ = -1;  // >= 0: kept without its history, or the node would own itself
};

}  // namespace sherd::autograd
