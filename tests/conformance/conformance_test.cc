// A sample of PyTorch's recorded cases (samples/README.md), an op or a module a test case.
#include <gtest/gtest.h>

#include "tests/conformance/report.h"

namespace sherd::test {
namespace {

struct Entry {
  std::string name;
  Count count;
};
std::vector<Entry> entries(const std::string& folder, void (*run)(const std::string&, Report&)) {
  Report report;
  run("tests/conformance/samples/" + folder, report);
  std::vector<Entry> r;
  for (auto& [name, count] : report.counts()) r.push_back({name, count});
  return r;
}

class Conformance : public testing::TestWithParam<Entry> {};

TEST_P(Conformance, AgreesWithPyTorch) {
  const Count& c = GetParam().count;
  EXPECT_EQ(c.failed, 0) << c.first;
  EXPECT_EQ(c.unsupported, 0);
  EXPECT_GT(c.passed + c.refused, 0);
}

std::string case_name(const testing::TestParamInfo<Entry>& info) {
  std::string name = info.param.name;
  std::replace(name.begin(), name.end(), '.', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Ops, Conformance, testing::ValuesIn(entries("ops", run_ops)), case_name);
INSTANTIATE_TEST_SUITE_P(Modules, Conformance, testing::ValuesIn(entries("modules", run_modules)),
                         case_name);

}  // namespace

}  // namespace sherd::test
