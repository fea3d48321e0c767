// NanCheck: finds where the first NaN (or infinity) comes from, by name. Every value is looked at,
// so it is for searching, not for every run.
//
//     nn::NanCheck check(model);                 // until it goes out of scope
//     Tensor loss = nn::call(model, x);          // throws: "[nan_check] the output of module
//     backward(loss);                            //   'layers.3.mlp' (sherd::nn::Linear) has a NaN ..."
//     check.gradients();                         // throws: "... the gradient of parameter ..."
//
// It works on sharded models too: make it before or after wrapping; each rank looks at what it has.
// An error on one rank alone ends the others as any error does.
#pragma once
#include <memory>
#include <string>

#include "nn/module.h"

namespace sherd::nn {

struct NanCheckOptions {
  bool infinities = true;  // count as wrong too
  bool inputs = true;      // look at what goes into a module before what comes out of it
  bool parameters = true;  // and at its parameters
};

class NanCheck {
 public:
  explicit NanCheck(Module& model, const NanCheckOptions& options = {});
  ~NanCheck();  // takes itself out of the modules, which must still be there
  NanCheck(const NanCheck&) = delete;
  NanCheck& operator=(const NanCheck&) = delete;

  // The first parameter, in order of declaration, whose gradient has one. Error names it.
  void gradients() const;

 private:
  class Hooks;
  Module& model_;
  const NanCheckOptions options_;
};

// "NaN at [3, 0]", "infinity at [7]", or empty. Of other than floating point numbers: empty.
std::string find_non_finite(const Tensor& x, bool infinities = true);

}  // namespace sherd::nn
