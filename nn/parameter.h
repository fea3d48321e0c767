// Parameter and Buffer: named slots of a Module, held as members.
//
//     nn::Parameter weight;                                   // in the class
//     weight(parameter("weight", {out, in}, init)),           // in its constructor
//     F::linear(x, weight)                                    // a Parameter converts to its Tensor
//
// [Note: declared parameters] A parameter is declared at construction (shape, dtype, initialiser; a
// tensor on the meta device) and gets its values at first touch, when the tree is whole and its
// full name is known; or a piece at a time by FSDP, which never makes the whole. The Tensor object
// is the same before and after: an optimizer may be built at any time.
#pragma once
#include <atomic>
#include <string>

#include "core/tensor.h"
#include "nn/init.h"

namespace sherd::nn {

struct ModuleState;

struct Slot {
  std::string name;  // within its module
  ModuleState* owner = nullptr;
  bool is_buffer = false;
  bool persistent = true;  // a buffer that is part of state_dict
  Initializer init;
  // What the module sees now. FSDP shows the local piece or the gathered whole here.
  Tensor tensor;
  std::atomic<bool> declared = false;  // `tensor` has no values yet
  Slot* tied_to = nullptr;

  std::string full_name() const;  // from the outermost module
  // Fills every declared parameter of the outermost module's tree. Of several threads at once, one.
  void materialize_tree();
  const Tensor& get() {
    if (declared) [[unlikely]]
      materialize_tree();
    return tensor;
  }
};

// A handle on a slot; copies are the same parameter. Assigning one to another would change a handle
// and leave its module's slot as it was, so it does not compile: to share a parameter under two
// names, head->weight.tie(embedding->weight).
class Parameter {
 public:
  Parameter() = default;
  explicit Parameter(Slot* slot) : slot_(slot) {}
  Parameter(const Parameter&) = default;
  Parameter(Parameter&&) = default;
  Parameter& operator=(const Parameter&) = delete;  // tie() is meant
  Parameter& operator=(Parameter&&) = default;
  const Tensor& get() const {
    if (!slot_)
      fail("[parameter] a parameter that its module does not have was used, as a bias may be");
    return slot_->get();
  }
  operator const Tensor&() const { return get(); }
  const Tensor* operator->() const { return &get(); }
  bool defined() const { return slot_ != nullptr; }
  Slot& slot() const { return *slot_; }
  // Makes this slot hold the other's parameter: one tensor under two names.
  void tie(const Parameter& other) const;
  friend std::ostream& operator<<(std::ostream& out, const Parameter& p) { return out << p.get(); }

 private:
  Slot* slot_ = nullptr;
};
using Buffer = Parameter;

}  // namespace sherd::nn
