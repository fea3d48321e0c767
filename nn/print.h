// Printing a module: its tree, as PyTorch prints it.
//
//     std::cout << model << "\n";      // BigModel(\n  (embedding): Embedding(2048, 256)\n  ...
//
// A module of one's own shows its options by overriding extra_repr().
#pragma once
#include <ostream>
#include <string>

#include "nn/module.h"

namespace sherd::nn {

// Without a line end. Neighbours in a ModuleList that print alike are counted: "(0-5): 6 x Block(".
std::string to_string(const Module& module);
inline std::ostream& operator<<(std::ostream& out, const Module& module) {
  return out << to_string(module);
}

// The shortest text that gives the number back, as Python writes it: "0.1", "1e-05", "1.0".
std::string repr(double number);
inline std::string repr(bool value) { return value ? "True" : "False"; }

}  // namespace sherd::nn
