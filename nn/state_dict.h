// StateDict: tensors by full name, in module order.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "core/tensor.h"

namespace sherd::nn {

class StateDict {
 public:
  using Entry = std::pair<std::string, Tensor>;
  void set(const std::string& name, const Tensor& t);
  const Tensor* find(const std::string& name) const;  // null if absent
  const Tensor& at(const std::string& name) const;  // Error names the entry and how many there are
  bool contains(const std::string& name) const { return find(name) != nullptr; }
  size_t size() const { return entries_.size(); }
  auto begin() const { return entries_.begin(); }
  auto end() const { return entries_.end(); }

 private:
  std::vector<Entry> entries_;
};

// What a load found: names of the module that the dict lacks, and names of the dict that the module
// lacks.
struct LoadResult {
  std::vector<std::string> missing, unexpected;
};

// Compares names and shapes, and throws one Error that lists everything wrong: "missing",
// "unexpected", and shapes. Not strict: missing and unexpected names are only returned; shapes must
// fit all the same.
struct ExpectedTensor {
  std::string name;
  Dims shape;
};
LoadResult check_state(const std::string& what, const std::vector<ExpectedTensor>& expected,
                       const std::vector<ExpectedTensor>& found, bool strict);

}  // namespace sherd::nn
