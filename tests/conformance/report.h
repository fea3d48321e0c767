// What a run of recorded cases found, by op (or module).
//
//     Report report;
//     report.run("matmul", test, buffers, [&](Decoder& d) { return std::vector{...}; });
//     return report.print();                                     // the number of failures
//
// A case agrees if outputs, and gradients for the recorded cotangents, are PyTorch's within
// PyTorch's own tolerances; gradients both by the fused backward and by the composed one that a
// graph of the gradient uses.
#pragma once
#include <functional>
#include <map>
#include <string>

#include "tests/conformance/decode.h"

namespace sherd::test {

using Outputs = std::vector<Tensor>;

struct Count {
  int passed = 0;   // values and gradients agree
  int refused = 0;  // PyTorch refuses the call, and so does Sherd
  int failed = 0;
  int excused =
      0;  // differs for a reason: nearer to the exact result, or on purpose (excuses() in report.cc)
  int unsupported = 0;  // the op, a keyword or a kind of argument is not there
  std::string first;    // the first failure
};

class Report {
 public:
  explicit Report(bool verbose = false) : verbose_(verbose) {}

  // `call` makes the call with what the decoder gives. It is called again in float64 where rounding
  // may be why float32 or bfloat16 differ.
  void run(const std::string& name, const Json& test, const Tensors& buffers,
           const std::function<Outputs(Decoder&)>& call);

  int print() const;  // a table to stdout; returns the number of failures
  const std::map<std::string, Count>& counts() const { return counts_; }

 private:
  bool verbose_;
  std::map<std::string, Count> counts_;
};

// Runs FOLDER/cases.jsonl (exported by export_ops.py or export_modules.py); Error if there is none.
void run_ops(const std::string& folder, Report& report);
void run_modules(const std::string& folder, Report& report);

}  // namespace sherd::test
