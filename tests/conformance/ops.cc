// Runs recorded calls of ops.
#include <fstream>

#include "core/safetensors.h"
#include "tests/conformance/bind.h"

namespace sherd::test {

void run_ops(const std::string& folder, Report& report) {
  const Tensors buffers = load_safetensors(folder + "/tensors.safetensors");
  std::ifstream lines(folder + "/cases.jsonl");
  if (!lines) fail("[conformance] ", folder, " holds no cases.jsonl");
  for (std::string line; std::getline(lines, line);) {
    const Json test = Json::parse(line);
    const std::string op = test["op"];
    report.run(op, test, buffers, [&](Decoder& decoder) {
      const Bound* bound = op_bindings().find(op);
      if (!bound) throw Unsupported("no such op");
      return (*bound)(decoder, test);
    });
  }
}

}  // namespace sherd::test
